"""The functions of the package ring_flash_attn: each rank's results are those of dense attention in one process, in fp64."""

import inspect
import math

import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.integrations import ring_flash_attn, ring_flash_attn_arguments
from ringattn.integrations.ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens as prepare

H, HK, D = 4, 2, 6
LENGTHS = (8, 24, 0, 16)  # of documents; 4 ranks with two chunks each divide them
ACROSS = (5, 27, 0, 16)  # llama3 cuts these anywhere
WINDOW = (5, 3)
FAMILIES = ("ring", "zigzag_ring", "stripe", "ring_varlen", "zigzag_ring_varlen", "llama3_varlen")
FORMS = ("func", "kvpacked_func", "qkvpacked_func")


def name_of(family, form):
    start, _, varlen = family.partition("_varlen") if family.endswith("_varlen") else (family, "", None)
    return f"{start}_flash_attn_{'' if varlen is None else 'varlen_'}{form}"


def bounds_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def dense(q, k, v, lengths, causal, window, slopes):
    """out and lse of whole sequences (b, s, h, d), whose documents have these lengths."""
    n, groups = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = torch.arange(n)[:, None] - torch.arange(n)
    live = document[:, None] == document
    live &= distance >= 0 if causal else live
    left, right = window
    live &= (distance <= left) if left >= 0 else live
    live &= (-distance <= right) if right >= 0 else live
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.3
    if slopes is not None:
        scores = scores - slopes.double().reshape(-1, H)[:, :, None, None] * distance.abs()
    scores = scores.masked_fill(~live, -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


def rows_of(family, lengths, rank, size):
    """The rows of the whole sequence that a rank holds."""
    n = sum(lengths)
    whole = torch.arange(n)
    if family == "llama3_varlen":
        return whole.chunk(size)[rank]
    parts = whole.split(list(lengths)) if family.endswith("_varlen") else [whole]
    if family == "stripe":
        return whole[rank::size]
    if family.startswith("zigzag"):
        return torch.cat([x.tensor_split(2 * size)[i] for x in parts for i in (rank, 2 * size - 1 - rank)])
    return torch.cat([x.tensor_split(size)[rank] for x in parts])


def arguments_of(family, lengths, causal, rank, size, copied):
    """What a function takes after its tensors."""
    bounds = bounds_of(lengths)
    if family == "llama3_varlen":
        q, k, longest_q, longest_k, keys = prepare(bounds, causal, rank, size)
        if copied:
            q, k = q.clone(), k.clone()
        return [q, k, longest_q, longest_k, 1, keys]
    if family.endswith("_varlen"):
        return [bounds // size, max(lengths) // size]
    return []


def call(group, family, form, options, copied=False):
    """The greatest difference of this rank's out, lse and gradients from those of dense attention."""
    rank, size = group.rank(), group.size()
    packed = family.endswith("_varlen")
    lengths = ACROSS if family == "llama3_varlen" else LENGTHS if packed else (48,)
    batch = 1 if packed else 2
    kv_heads = H if form == "qkvpacked_func" else HK
    generator = torch.Generator().manual_seed(3)
    shapes = [(batch, sum(lengths), heads, D) for heads in (H, kv_heads, kv_heads, H)] + [(batch, H, sum(lengths))]
    *whole, dout, dlse = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    whole = [x.requires_grad_() for x in whole]
    causal, window = options.get("causal", False), options.get("window_size", (-1, -1))
    out, lse = dense(*whole, lengths, causal, window, options.get("alibi_slopes"))
    wanted = torch.autograd.grad((out * dout).sum() + (lse * dlse).sum(), whole)
    rows = rows_of(family, lengths, rank, size)
    leaves = [x.detach()[:, rows].requires_grad_() for x in whole]
    given = [x[0] for x in leaves] if packed else leaves
    heads_at = 1 if packed else 2
    if form == "kvpacked_func":
        given = [given[0], torch.stack(given[1:], heads_at)]
    elif form == "qkvpacked_func":
        given = [torch.stack(given, heads_at)]
    function = getattr(ring_flash_attn, name_of(family, form))
    further = arguments_of(family, lengths, causal, rank, size, copied)
    common = {**options, "softmax_scale": 0.3, "group": group}
    found, found_lse, nothing = function(*given, *further, **common, return_attn_probs=True)
    assert nothing is None
    assert torch.equal(found, function(*given, *further, **common))
    found, found_lse = (found[None], found_lse[None]) if packed else (found, found_lse)
    gradients = torch.autograd.grad((found * dout[:, rows]).sum() + (found_lse * dlse[:, :, rows]).sum(), leaves)
    pairs = [(found, out[:, rows]), (found_lse, lse[:, :, rows])]
    pairs += [(x, y[:, rows]) for x, y in zip(gradients, wanted, strict=True)]
    return max(float((x - y).abs().max()) for x, y in pairs)


OPTIONS = {
    "causal": dict(causal=True),
    "full": {},
    "window": dict(causal=True, window_size=(WINDOW[0], -1)),
    "both sides": dict(window_size=list(WINDOW)),
    "slopes": dict(causal=True, alibi_slopes=torch.tensor([0.5, 0.1, 0.02, 0.3]), deterministic=True),
}


def call_many(group, cases):
    return [call(group, family, form, OPTIONS[options], copied) for family, form, options, copied in cases]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.some(2)
def test_each_function_equals_dense_attention(gloo, size):
    cases = [(family, form, "causal", False) for family in FAMILIES for form in FORMS]
    cases += [(family, "func", options, False) for family in FAMILIES for options in OPTIONS if options != "causal"]
    cases += [("llama3_varlen", "func", options, True) for options in ("causal", "full")]
    for found in gloo.run(size, call_many, cases):
        for case, difference in zip(cases, found, strict=True):
            assert difference < 1e-10, case


def test_names_are_those_of_the_package():
    expected = {name_of(family, form) for family in FAMILIES for form in FORMS}
    assert expected < set(ring_flash_attn.__all__)
    first = list(inspect.signature(ring_flash_attn.ring_flash_attn_func).parameters)
    common = ["dropout_p", "softmax_scale", "causal", "window_size", "alibi_slopes", "deterministic", "return_attn_probs", "group"]
    assert first == ["q", "k", "v", *common]
    varlen = list(inspect.signature(ring_flash_attn.zigzag_ring_flash_attn_varlen_kvpacked_func).parameters)
    assert varlen == ["q", "kv", "cu_seqlens", "max_seqlen", *common]
    llama3 = list(inspect.signature(ring_flash_attn.llama3_flash_attn_varlen_qkvpacked_func).parameters)
    documents = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "heads_k_stride", "local_k_slice"]
    assert llama3 == ["qkv", *documents, *common]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(7, 7, 2), (16,), (3, 0, 13), (4, 4, 8)], ids=str)
def test_prepared_bounds_hold_what_the_queries_see(lengths, causal):
    size, bounds = 4, bounds_of(lengths)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    for rank in range(size):
        rows = torch.arange(16).chunk(size)[rank]
        q, k, longest_q, longest_k, keys = prepare(bounds, causal, rank, size)
        assert q.dtype == k.dtype == bounds.dtype
        assert longest_q == q.diff().max() and longest_k == k.diff().max()
        here, there = document[rows], document[keys]
        found = [torch.repeat_interleave(torch.arange(len(x) - 1), x.diff()) for x in (q, k)]
        assert torch.equal(found[0][:, None] == found[0], here[:, None] == here)
        assert len(found[1]) == len(there)
        assert torch.equal(found[0][:, None] == found[1], here[:, None] == there)
        last = rows[-1] + 1 if causal else (document <= here[-1]).sum()
        assert keys.stop == last and keys.start == (document < here[0]).sum()


def dropped(group, family):
    """This rank's out under dropout, with what the same draws give one process."""
    rank, size = group.rank(), group.size()
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(1, 48, H, D, generator=generator, dtype=torch.float64) for _ in range(3)]
    rows = rows_of(family, (48,), rank, size)
    torch.manual_seed(5)
    function = getattr(ring_flash_attn, name_of(family, "func"))
    out = function(*(x[:, rows] for x in whole), dropout_p=0.4, causal=True, group=group)
    torch.manual_seed(5)
    seed = int(torch.randint((1 << 63) - 1, (1,)))
    wanted = ra.reference.attention(*whole, score=ra.score(dropout=0.4, seed=seed))
    return float((out - wanted[:, rows]).abs().max())


@pytest.mark.parametrize("family", ["ring", "stripe"])
def test_dropout_is_that_of_one_process(gloo, family):
    assert max(gloo.run(2, dropped, family)) < 1e-10


def refusal(group, family, change, on):
    """The error of this rank where the rank `on` calls with a change."""
    rank, size = group.rank(), group.size()
    packed = family.endswith("_varlen")
    rows = 6 if packed else 8
    shape = (rows, H, D) if packed else (1, rows, H, D)
    given = dict(q=torch.randn(shape), k=torch.randn(shape), v=torch.randn(shape), group=group)
    if family == "llama3_varlen":
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
        prepared_for = change.pop("prepared_for", rank) if rank == on else rank
        made = prepare(torch.tensor([0, 5, rows * size]), True, prepared_for, size)
        given |= dict(zip(names, made), heads_k_stride=1, causal=True)
    elif packed:
        given |= dict(cu_seqlens=torch.tensor([0, 4, rows]), max_seqlen=4)
    if rank == on:
        given |= change
    with pytest.raises(ValueError) as error:
        getattr(ring_flash_attn, name_of(family, "func"))(**given)
    return str(error.value)


REFUSED = {
    "window": ("ring", dict(window_size=4), "window_size is 4, but must be a pair"),
    "negative window": ("ring", dict(window_size=(-2, 0)), "window_size is -2"),
    "dropout": ("stripe", dict(dropout_p=1.0), "dropout_p is 1.0, but must be less than 1"),
    "flag": ("zigzag_ring", dict(causal=1), "causal is 1, but must be a bool"),
    "probabilities": ("ring", dict(return_attn_probs=None), "return_attn_probs is None"),
    "slopes": ("ring", dict(alibi_slopes=torch.ones(3)), "alibi_slopes has dtype torch.float32 and shape (3,)"),
    "slopes of documents": ("ring_varlen", dict(alibi_slopes=torch.ones(2, H)), "slopes for each document"),
    "dimensions": ("ring_varlen", dict(q=torch.randn(1, 6, H, D)), "must have 3 for packed documents"),
    "bounds": ("ring_varlen", dict(cu_seqlens=torch.tensor([0, 4, 7])), "ends with 7, but q has 6 tokens"),
    "no zero": ("ring_varlen", dict(cu_seqlens=torch.tensor([4, 6])), "must start with 0"),
    "longest": ("ring_varlen", dict(max_seqlen=3), "max_seqlen is 3, but the longest document of cu_seqlens has 4"),
    "odd": ("zigzag_ring_varlen", dict(cu_seqlens=torch.tensor([0, 3, 6])), "cu_seqlens holds a length of 3"),
    "stride": ("llama3_varlen", dict(heads_k_stride=3), "does not divide k's 4 heads"),
    "causal": ("llama3_varlen", dict(causal=False), "was prepared with causal=True"),
    "slice": ("llama3_varlen", dict(local_k_slice=slice(1, 6)), "was prepared as"),
    "another rank's": ("llama3_varlen", dict(prepared_for=0), "was prepared for rank 0 of 2, but this is rank 1 of 2"),
    "keys": ("llama3_varlen", dict(cu_seqlens_k=torch.tensor([0, 9])), "which do not fit cu_seqlens_q"),
    "copied on one rank": ("llama3_varlen", dict(cu_seqlens_q=torch.tensor([0, 6])), "ranks disagree: function is"),
    "other documents": ("ring_varlen", dict(cu_seqlens=torch.tensor([0, 2, 6])), "ranks disagree: "),
    "heads": ("ring", dict(k=torch.randn(1, 8, 3, D), v=torch.randn(1, 8, 3, D)), "does not divide q's 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_reach_every_rank(gloo, name):
    family, change, message = REFUSED[name]
    assert all(message in error for error in gloo.run(2, refusal, family, change, 1))


def compiled(group):
    """A group's first call is from compiled code, which traces nothing of it."""
    q = torch.randn(1, 8, 2, 4, generator=torch.Generator().manual_seed(group.rank()))
    own = dist.new_group([0, 1])
    if group.rank() > 1:
        return True

    def attend(q):
        return ring_flash_attn.zigzag_ring_flash_attn_func(q + 1, q, q, causal=True, group=own) * 2

    found = torch.compile(attend, backend="eager")(q)
    return torch.equal(found, attend(q))


def test_compiled_code_breaks_around_calls(gloo):
    assert gloo.run(8, compiled) == [True] * 8


def test_zigzag_shards_are_even():
    with pytest.raises(ValueError, match="q has 5 tokens, but a zigzag shard is two chunks of one length"):
        ring_flash_attn_arguments.whole_layout(ra.zigzag, 5, 2, True)


def test_packed_tensors_are_checked():
    with pytest.raises(ValueError, match=r"kv has shape \(1, 8, 3, 2, 6\), but must be \(batch, tokens, 2, heads, head_dim\)"):
        ring_flash_attn.ring_flash_attn_kvpacked_func(torch.randn(1, 8, 2, 6), torch.randn(1, 8, 3, 2, 6))
    with pytest.raises(ValueError, match=r"qkv has shape \(1, 8, 3, 2, 6\), but must be \(tokens, 3, heads, head_dim\)"):
        ring_flash_attn.ring_flash_attn_varlen_qkvpacked_func(torch.randn(1, 8, 3, 2, 6), torch.tensor([0, 8]), 8)


def test_a_changed_tensor_is_read_again():
    bounds = torch.tensor([0, 4, 8])
    qkv = torch.randn(8, 3, 2, 4)
    before = ring_flash_attn.ring_flash_attn_varlen_qkvpacked_func(qkv, bounds, 8)
    bounds[1] = 2
    after = ring_flash_attn.ring_flash_attn_varlen_qkvpacked_func(qkv, bounds, 8)
    assert not torch.equal(before, after)
    assert torch.equal(after, ring_flash_attn.ring_flash_attn_varlen_qkvpacked_func(qkv, torch.tensor([0, 2, 8]), 8))
