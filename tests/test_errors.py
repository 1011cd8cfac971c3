"""Bad input: each kind raises a ValueError that says which argument is wrong, its value, and what is expected."""

import inspect
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

import ringattn as ra
from ringattn.integrations.huggingface import attach
from ringattn.runtime.groups import get_context
from ringattn.training.data import shard_batch
from ringattn.training.loss import mean_loss, summed


def tensor(*shape, **options):
    return torch.zeros(shape or (1, 6, 4, 8), **options)


def call(q=None, k=None, v=None, **options):
    """A correct call, except for the arguments given."""
    return ra.ring_attention(*(tensor() if x is None else x for x in (q, k, v)), **options)


def local(q=None, **options):
    return ra.attend(tensor() if q is None else q, tensor(), tensor(), **options)


def local_with_a_tangent():
    with torch.autograd.forward_ad.dual_level():
        return local(torch.autograd.forward_ad.make_dual(tensor(), tensor()))


def partial(*shape, dtype=torch.float32, device=None):
    b, s, h, d = shape or (1, 6, 4, 8)
    return ra.Partial(
        torch.zeros(b, s, h, d, dtype=dtype, device=device), *(torch.zeros(b, h, s, dtype=dtype, device=device) for _ in range(2))
    )


NESTED = torch.nested.nested_tensor([torch.zeros(3, 4, 8), torch.zeros(2, 4, 8)], layout=torch.jagged)
NAN = float("nan")
SIX = ra.zigzag(6, 1)

AS_TORCH = tensor(1, 4, 6, 8)  # (batch, heads, tokens, head_dim)
ELSEWHERE = {
    "dropout_p": (0.1, r"'dropout_p' \(use score=score\(dropout=...\)\)"),
    "attn_mask": (None, r"'attn_mask' \(use mask=, over global positions, for what is live"),
    "softcap": (30.0, r"use score=score\(softcap=...\)"),
    "alibi_slopes": (None, r"use score=score\(alibi=...\)"),
    "causal": (True, r"use mask=causal\(\), the default, or mask=full\(\)"),
    "is_causal": (True, r"use mask=causal\(\)"),
    "window_size": ((3, 0), r"use mask=sliding_window\(left, right\)"),
    "scale": (1.0, "use softmax_scale="),
    "bias": (None, r"use score=score\(bias=relative_bias"),
    "key_padding_mask": (None, r"use mask=documents\(...\) over packed sequences; padding on the right needs nothing"),
    "block_mask": (None, r"use mask=, such as block_sparse\(blocks, block_size\)"),
    "mask_mod": (None, r"use mask=, such as causal\(\)"),
    "score_mod": (None, r"use score=score\(softcap=..., alibi=..., bias=..."),
    "anything": (1, r"ring_attention\(\) got an unexpected keyword argument 'anything'$"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_argument_of_other_functions_is_told_what_takes_its_place(name):
    value, message = ELSEWHERE[name]
    with pytest.raises(TypeError, match=message):
        call(**{name: value})
    assert name not in inspect.signature(ra.ring_attention).parameters


# sizes of q, and of k: the warning comes, or not
AXES = {
    "torch's order": ((1, 8, 160, 4), (1, 8, 160, 4), True),
    "torch's order, other keys": ((1, 128, 129, 1), (1, 128, 129, 1), True),
    "one new token": ((1, 1, 128, 4), (1, 1, 128, 4), False),
    "many query heads": ((1, 2, 256, 4), (1, 2, 8, 4), False),
    "many tokens": ((1, 129, 256, 1), (1, 129, 256, 1), False),
}


@pytest.mark.parametrize(("q", "k", "warned"), AXES.values(), ids=AXES)
def test_sizes_in_torchs_order_are_warned_of_once(monkeypatch, caplog, q, k, warned):
    monkeypatch.setattr(get_context(None), "_warned_of_axes", False)
    for more in (0, 1):
        q, k = ((*sizes[:3], sizes[3] + more) for sizes in (q, k))
        ra.ring_attention(torch.zeros(q), torch.zeros(k), torch.zeros(k))
    assert len(caplog.records) == warned
    sizes = f"q and k have {q[1]} tokens and {q[2]} heads; if they are (batch, heads, tokens, head_dim), as torch has them"
    assert (sizes in caplog.text) == warned


def test_no_warning_of_axes_beside_a_layout(monkeypatch, caplog):
    monkeypatch.setattr(get_context(None), "_warned_of_axes", False)
    ra.ring_attention(*[torch.zeros(1, 8, 160, 4)] * 3, layout=ra.zigzag(8, 1))
    assert not caplog.records


def test_the_output_of_a_model_is_no_summed_loss():
    output = types.SimpleNamespace(loss=tensor(), logits=tensor())
    with pytest.raises(ValueError, match=r"summed_loss is a SimpleNamespace, the output of a model: wrap CausalLMLoss\(model\)"):
        mean_loss(output, torch.zeros(1, 3, dtype=torch.int64), reduction=summed())


def test_the_signature_holds_what_is_taken():
    parameters = inspect.signature(ra.ring_attention).parameters.values()
    assert all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    assert [parameter.name for parameter in parameters][-1] == "return_stats"


TENSORS = {
    "q is a list": (lambda: call(q=[1.0]), "q is a list, but must be a torch.Tensor"),
    "k is an array": (lambda: call(k=np.zeros((1, 6, 4, 8))), "k is a ndarray, but must be a torch.Tensor"),
    "v is None": (lambda: ra.ring_attention(tensor(), tensor(), None), "v is a NoneType, but must be a torch.Tensor"),
    "3-D": (lambda: call(q=tensor(6, 4, 8)), r"q has 3 dimensions, shape \(6, 4, 8\), but must have 4: \(batch, tokens, heads"),
    "5-D": (lambda: call(v=tensor(1, 1, 6, 4, 8)), r"v has 5 dimensions, shape .*, but must have 4"),
    "integers": (lambda: call(q=tensor(dtype=torch.int64)), "q has dtype torch.int64, but must be bfloat16, float16, float32 or"),
    "complex": (lambda: call(q=tensor(dtype=torch.complex64)), "q has dtype torch.complex64, but must be bfloat16"),
    "float8": (lambda: call(k=tensor().to(torch.float8_e4m3fn)), "k has dtype torch.float8_e4m3fn, but must be bfloat16"),
    "sparse": (lambda: call(k=tensor().to_sparse()), r"k has the layout torch.sparse_coo, but must be dense: pass k.to_dense\(\)"),
    "nested": (lambda: call(q=NESTED), r"q is a nested tensor: pack the sequences into one dimension and pass mask=documents"),
    "k's dtype": (
        lambda: call(k=tensor(dtype=torch.bfloat16)),
        "k has dtype torch.bfloat16 and q has torch.float32: cast all three",
    ),
    "v's dtype": (lambda: call(v=tensor(dtype=torch.float64)), "v has dtype torch.float64 and q has torch.float32: cast all three"),
    "k's batch": (lambda: call(k=tensor(2, 6, 4, 8)), "k has batch size 2 and q has 1: they must be equal"),
    "v's batch": (lambda: call(v=tensor(2, 6, 4, 8)), "v has batch size 2 and q has 1: they must be equal"),
    "k's tokens": (
        lambda: call(k=tensor(1, 5, 4, 8), v=tensor(1, 5, 4, 8)),
        "q has 6 tokens and k has 5: a rank's q, k and v must hold the same tokens; .* use attend with q_positions",
    ),
    "v's tokens": (lambda: call(v=tensor(1, 5, 4, 8)), "v has 5 tokens and k has 6: each key needs its value"),
    "v's heads": (lambda: call(v=tensor(1, 6, 2, 8)), "v has 2 heads and k has 4: they must be equal"),
    "heads do not divide": (
        lambda: call(k=tensor(1, 6, 3, 8), v=tensor(1, 6, 3, 8)),
        "k has 3 heads, which does not divide q's 4: grouped-query attention needs h % hk == 0",
    ),
    "more k heads": (lambda: call(k=tensor(1, 6, 8, 8), v=tensor(1, 6, 8, 8)), "k has 8 heads, which does not divide q's 4"),
    "no heads": (lambda: call(*[tensor(1, 6, 0, 8)] * 3), "q has 0 heads and k has 0: both need at least one"),
    "k's head_dim": (
        lambda: call(k=tensor(1, 6, 4, 16)),
        r"k has head_dim 16 and q has 8: they must be equal \(only v's may differ",
    ),
    "head_dim 0": (lambda: call(*[tensor(1, 6, 4, 0)] * 3), "q has head_dim 0, but it must be 1 to 512"),
    "head_dim 513": (lambda: call(*[tensor(1, 6, 4, 513)] * 3), "q has head_dim 513, but it must be 1 to 512"),
    "v's head_dim 576": (lambda: call(v=tensor(1, 6, 4, 576)), "v has head_dim 576, but it must be 1 to 512"),
    "queries over queries": (lambda: ra.pass_q(ra.pass_q()), r"over is pass_q\(\), but queries move by ring\(\), gather\(\)"),
    "queries over memory": (lambda: ra.pass_q(ra.waves(memory=9)), r"over is waves\(memory=9\), but queries move by"),
    "queries over a name": (lambda: ra.pass_q("ring"), "over is 'ring', but must be a Schedule"),
    "the reference's offset": (
        lambda: ra.reference.attention(*[tensor()] * 3, q_offset=-1),
        "q_offset is -1, but must be at least 0",
    ),
    "a plan's offset alone": (
        lambda: ra.make_plan(ra.zigzag(6, 2), ra.causal(), q_offset=1),
        "q_offset is 1, but without kv_layout",
    ),
    "a plan of other ranks": (
        lambda: ra.make_plan(ra.zigzag(6, 2), ra.causal(), ra.zigzag(6, 3)),
        r"kv_layout zigzag\(seq_len=6, world_size=3\) is for 3 ranks, but layout zigzag\(seq_len=6, world_size=2\) is for 2",
    ),
    "the reference's heads": (
        lambda: ra.reference.attention(tensor(), tensor(1, 6, 3, 8), tensor(1, 6, 3, 8)),
        "k has 3 heads, which does not divide q's 4",
    ),
    "the reference's mask": (
        lambda: ra.reference.attention(*[tensor()] * 3, mask="causal"),
        "mask is 'causal', but must be a Mask: build one",
    ),
    "the reference's array": (
        lambda: ra.reference.attention(np.zeros((1, 6, 4, 8)), tensor(), tensor()),
        "q is a ndarray, but must be a torch.Tensor",
    ),
    "the reference's dimensions": (
        lambda: ra.reference.attention(tensor(), tensor(6, 4), tensor()),
        r"k has dtype torch.float32 and shape \(6, 4\), but must hold floating-point numbers, in the shape \(batch, tokens",
    ),
    "the reference's integers": (
        lambda: ra.reference.attention(*[tensor(dtype=torch.int64)] * 3),
        "q has dtype torch.int64 and shape .*, but must hold floating-point numbers",
    ),
    "the reference's dtypes": (
        lambda: ra.reference.attention(tensor(), tensor(dtype=torch.float64), tensor()),
        "k has dtype torch.float64 and q has torch.float32: cast all three",
    ),
    "the reference's head_dim": (lambda: ra.reference.attention(*[tensor(1, 6, 4, 0)] * 3), "q has head_dim 0, but it must be at"),
    "the reference's scale": (
        lambda: ra.reference.attention(*[tensor()] * 3, softmax_scale=NAN),
        "softmax_scale is nan, but must be finite",
    ),
    "the reference's tokens": (
        lambda: ra.reference.attention(tensor(), tensor(1, 5, 4, 8), tensor(1, 5, 4, 8)),
        "q has 6 tokens and k has 5",
    ),
}

OPTIONS = {
    "mask is a tensor": (
        lambda: call(mask=torch.ones(6, 6, dtype=torch.bool)),
        r"mask is a tensor of shape \(6, 6\), but must be a Mask: build one with causal\(\)",
    ),
    "mask is a name": (lambda: call(mask="causal"), "mask is 'causal', but must be a Mask: build one with"),
    "mask is a bool": (lambda: call(mask=True), "mask is True, but must be a Mask"),
    "mask is not called": (lambda: call(mask=ra.causal), "mask is <function causal at .*>, but must be a Mask"),
    "name is a number": (lambda: call(name=3), "name is 3, but must be a str: pass a text, the same on every rank"),
    "mask in attend": (lambda: local(mask="full"), "mask is 'full', but must be a Mask"),
    "layout is a name": (lambda: call(layout="zigzag"), r"layout is 'zigzag', but must be a Layout: build one with zigzag\("),
    "layout is not called": (lambda: call(layout=ra.zigzag), "layout is <function zigzag at .*>, but must be a Layout"),
    "layout of more ranks": (
        lambda: call(layout=ra.zigzag(6, 2)),
        r"layout zigzag\(seq_len=6, world_size=2\) is for 2 ranks, but the group has 1: .*; no process group is initialised: start",
    ),
    "layout of another length": (
        lambda: call(layout=ra.striped(7, 1)),
        r"q has 6 tokens, but rank 0 of layout striped\(seq_len=7, world_size=1\) holds 7: shard q, k and v",
    ),
    "torch's order of dimensions": (
        lambda: call(AS_TORCH, AS_TORCH, AS_TORCH, layout=SIX),
        r"q has 4 tokens, but .* holds 6: .*; if they are \(batch, heads, tokens, head_dim\), as torch has them, pass x.transpose\(1, 2\)",
    ),
    "torch's order, grouped heads": (
        lambda: call(AS_TORCH, tensor(1, 2, 6, 8), tensor(1, 2, 6, 8)),
        r"q has 4 tokens and k has 2: .* with q_positions and k_positions; if they are \(batch, heads, tokens, head_dim\)",
    ),
    "mask longer than the sequence": (
        lambda: call(mask=ra.documents([4, 4])),
        r"mask documents\(<2 documents, 8 tokens>, causal=True\) needs at least 8 tokens and is longer than the sequence of 6",
    ),
    "mask longer than the layout": (lambda: call(layout=SIX, mask=ra.prefix(9)), r"mask prefix\(9\) needs at least 9 tokens"),
    "mask shorter than the sequence": (
        lambda: call(mask=ra.block_sparse(np.ones((2, 2), bool), 2)),
        r"mask block_sparse\(<2 x 2 blocks>, 2\) covers at most 4 tokens, but the sequence has 6",
    ),
    "schedule is a name": (
        lambda: call(schedule="ring"),
        r"schedule is 'ring', but must be a Schedule: build one with ring\(\), waves\(width\) and the like",
    ),
    "schedule is not called": (lambda: call(schedule=ra.ring), "schedule is <function ring at .*>, but must be a Schedule"),
    "scale is a tensor": (
        lambda: call(softmax_scale=torch.ones(4)),
        r"softmax_scale is a tensor of shape \(4,\), but must be a Python number or None: pass scale.item\(\)",
    ),
    "scale is text": (lambda: call(softmax_scale="auto"), "softmax_scale is 'auto', but must be a Python number or None"),
    "scale is a bool": (lambda: call(softmax_scale=True), "softmax_scale is True, but must be a Python number"),
    "scale is complex": (lambda: call(softmax_scale=1j), "softmax_scale is 1j, but must be a Python number"),
    "scale is NaN": (lambda: call(softmax_scale=NAN), "softmax_scale is nan, but must be finite"),
    "scale is infinite": (lambda: local(softmax_scale=float("inf")), "softmax_scale is inf, but must be finite"),
    "return_stats is a number": (lambda: call(return_stats=1), "return_stats is 1, but must be a bool"),
    "group is a number": (lambda: call(group=3), "group is a int, but must be a ProcessGroup, a DeviceMesh, hybrid"),
    "group is a name": (lambda: call(group="world"), "group is a str, but must be a ProcessGroup, a DeviceMesh, hybrid"),
    "q of torch.func": (
        lambda: torch.func.grad(lambda q: call(q=q).sum())(tensor()),
        "q is differentiated in forward mode or by torch.func, which attention does not support: call backward",
    ),
    "q with a tangent": (local_with_a_tangent, "q is differentiated in forward mode or by torch.func"),
    "too few positions": (
        lambda: local(q_positions=torch.arange(5)),
        "q_positions has 5 positions, but q has 6 tokens: give one position a token",
    ),
    "too many positions": (lambda: local(k_positions=range(9)), "k_positions has 9 positions, but k has 6 tokens"),
    "negative position": (
        lambda: local(k_positions=torch.arange(6) - 2),
        "k_positions has the negative position -2: positions start",
    ),
    "position beyond sums": (
        lambda: local(k_positions=[0, 1, 2, 3, 4, 2**62]),
        r"k_positions has the position 4611686018427387904, but positions must be less than 2\*\*48",
    ),
    "fractional positions": (lambda: local(q_positions=torch.arange(6.0)), "q_positions has dtype float32, but must hold integers"),
    "2-D positions": (lambda: local(q_positions=torch.zeros(1, 6)), r"q_positions has shape \(1, 6\), but must be one-dimensional"),
}

MASKS = {
    "negative window": (lambda: ra.sliding_window(-1), "left is -1, but must be at least 0"),
    "negative right": (lambda: ra.sliding_window(1, -2), "right is -2, but must be at least 0"),
    "fractional window": (lambda: ra.sliding_window(1.5), "left is 1.5, but must be an integer"),
    "window is text": (lambda: ra.sliding_window("1"), "left is '1', but must be an integer"),
    "dilation 0": (lambda: ra.dilated_window(3, 0), "dilation is 0, but must be at least 1"),
    "dilated window of three": (lambda: ra.dilated_window((1, 2, 3), 2), r"window is \(1, 2, 3\), but must be .* \(left, right\)"),
    "dilated without end": (lambda: ra.dilated_window((None, 0), 2), "window is None, but must be an integer"),
    "no documents": (lambda: ra.documents(), "documents takes either cu_seqlens or lengths, and got neither"),
    "documents twice": (lambda: ra.documents([0, 3], lengths=[3]), "documents takes either cu_seqlens or lengths, and got both"),
    "empty cu_seqlens": (lambda: ra.documents([]), "cu_seqlens is empty: documents needs at least one length"),
    "decreasing cu_seqlens": (
        lambda: ra.documents([0, 4, 3]),
        "cu_seqlens decreases from 4 to 3 at index 2: it must be non-decreasing",
    ),
    "negative length": (lambda: ra.documents([3, -1]), "cu_seqlens has the negative length -1: a document has 0 or more tokens"),
    "fractional cu_seqlens": (lambda: ra.documents([0, 2.5]), "cu_seqlens has dtype float64, but must hold integers"),
    "2-D cu_seqlens": (lambda: ra.documents([[0, 3]]), r"cu_seqlens has shape \(1, 2\), but must be one-dimensional"),
    "ragged cu_seqlens": (lambda: ra.documents([0, [3]]), r"cu_seqlens is \[0, \[3\]\], but must be one-dimensional"),
    "cu_seqlens is a number": (lambda: ra.documents(5), r"cu_seqlens has shape \(\), but must be one-dimensional"),
    "bool lengths": (
        lambda: ra.documents(lengths=torch.ones(3, dtype=torch.bool)),
        "lengths has dtype bool, but must hold integers",
    ),
    "causal is a number": (lambda: ra.documents([3], 1), "causal is 1, but must be a bool"),
    "documents' window": (lambda: ra.documents([3], window=(1, 2, 3)), r"window is \(1, 2, 3\), but must be .* \(left, right\)"),
    "documents' window is negative": (lambda: ra.documents([3], window=-4), "window is -4, but must be at least 0"),
    "negative prefix": (lambda: ra.prefix(-1), "n is -1, but must be at least 0"),
    "prefix is a bool": (lambda: ra.prefix(True), "n is True, but must be an integer"),
    "negative global tokens": (lambda: ra.global_tokens(-3), "n_or_positions is -3, but must be at least 0"),
    "negative global position": (lambda: ra.global_tokens([3, -1]), "n_or_positions has the negative position -1: positions start"),
    "fractional global positions": (lambda: ra.global_tokens([0.5]), "n_or_positions has dtype float64, but must hold integers"),
    "global tokens is text": (
        lambda: ra.global_tokens("cls"),
        "n_or_positions is 'cls'.*a number of tokens or a list of positions",
    ),
    "global tokens is None": (lambda: ra.global_tokens(None), "n_or_positions is None.*a number of tokens or a list of positions"),
    "block_mask not square": (
        lambda: ra.block_sparse(torch.ones(2, 3), 4),
        r"block_mask has shape \(2, 3\), but must be a square matrix \(query blocks, key blocks\)",
    ),
    "block_mask of floats": (
        lambda: ra.block_sparse(torch.ones(2, 2), 4),
        "block_mask has dtype float32, but must be bool, or integers",
    ),
    "block_mask of other integers": (
        lambda: ra.block_sparse([[2]], 4),
        "block_mask has dtype int64, but must be bool, or integers of 0",
    ),
    "block_mask ragged": (
        lambda: ra.block_sparse([[True], []], 4),
        r"block_mask is \[\[True\], \[\]\], but must be a square matrix",
    ),
    "block_size 0": (lambda: ra.block_sparse([[True]], 0), "block_size is 0, but must be at least 1"),
    "bigbird's even window": (lambda: ra.bigbird(64, 8, window_blocks=2), "window_blocks is 2, but must be odd"),
    "bigbird's negative count": (lambda: ra.bigbird(64, 8, random_blocks=-1), "random_blocks is -1, but must be at least 0"),
    "bigbird's length": (lambda: ra.bigbird(-1), "seq_len is -1, but must be at least 0"),
    "mask | text": (lambda: ra.causal() | "window", "masks combine with masks only, but got a str"),
    "mask & tensor": (lambda: ra.causal() & torch.ones(2, 2), "masks combine with masks only, but got a Tensor"),
    "dense of a shorter sequence": (
        lambda: ra.documents([5, 5]).dense(7),
        "needs at least 10 tokens and is longer than the sequence of 7",
    ),
    "dense of a negative length": (lambda: ra.causal().dense(-1), "seq_len is -1, but must be at least 0"),
    "regions of half a token": (lambda: ra.causal().regions(1.5), "seq_len is 1.5, but must be an integer"),
}

LAYOUTS = {
    "negative seq_len": (lambda: ra.zigzag(-1, 2), "seq_len is -1, but must be at least 0"),
    "fractional seq_len": (lambda: ra.striped(6.0, 2), "seq_len is 6.0, but must be an integer"),
    "no ranks": (lambda: ra.contiguous(6, 0), "world_size is 0, but must be at least 1"),
    "balanced without a mask": (lambda: ra.balanced("causal", 6, 2), "mask is 'causal', but must be a Mask"),
    "balanced mask too long": (lambda: ra.balanced(ra.prefix(9), 6, 2), r"mask prefix\(9\) needs at least 9 tokens"),
    "layout without ranks": (lambda: ra.Layout(0, ()), "spans is empty: a layout needs at least one rank"),
    "layout of negative length": (lambda: ra.Layout(-2, ((),)), "seq_len is -2, but must be at least 0"),
    "position held twice": (
        lambda: ra.Layout(4, ((ra.Span(0, 2),), (ra.Span(1, 2),))),
        "spans do not hold each of 4 positions exactly once: position 1 is held twice",
    ),
    "position not held": (
        lambda: ra.Layout(4, ((ra.Span(0, 3),),)),
        "spans do not hold each of 4 positions exactly once: they hold 3",
    ),
    "span outside": (lambda: ra.Layout(4, ((ra.Span(2, 4),),)), r"Span\(start=2, length=4, stride=1\) is not inside the sequence"),
    "span of no stride": (
        lambda: ra.Layout(2, ((ra.Span(0, 2, 0),),)),
        r"Span\(start=0, length=2, stride=0\) is not inside the sequence",
    ),
    "span of halves": (lambda: ra.Layout(2, ((ra.Span(0.0, 2),),)), "start is 0.0, but must be an integer"),
    "spans of numbers": (lambda: ra.Layout(2, ((0, 1),)), "spans holds 0, but must hold a tuple of Spans for each rank"),
    "one rank's spans": (
        lambda: ra.Layout(2, (ra.Span(0, 2),)),
        "spans holds Span.*, but must hold a tuple of Spans for each rank",
    ),
    "positions of another rank": (lambda: SIX.positions(1), r"rank is 1, but zigzag\(.*\) has the ranks 0 to 0"),
    "positions of a name": (lambda: SIX.positions("0"), "rank is '0', but must be an integer"),
    "balance of a name": (lambda: SIX.balance("causal"), "mask is 'causal', but must be a Mask"),
    "plan of a name": (lambda: ra.make_plan(SIX, "causal"), "mask is 'causal', but must be a Mask"),
    "plan of no layout": (lambda: ra.make_plan(6, ra.causal()), "layout is 6, but must be a Layout"),
    "default layout of a name": (lambda: ra.default_layout("causal", 6, 2), "mask is 'causal', but must be a Mask"),
    "shard of another length": (
        lambda: ra.shard(tensor(1, 5), SIX, 0),
        r"x has 5 tokens in dim 1, but zigzag\(.*\) is for 6: shard the whole sequence",
    ),
    "shard of an array": (lambda: ra.shard(np.zeros((1, 6)), SIX, 0), "x is .*, but must be a Tensor"),
    "shard with a name": (lambda: ra.shard(tensor(1, 6), "zigzag", 0), "layout is 'zigzag', but must be a Layout"),
    "shard of another rank": (lambda: ra.shard(tensor(1, 6), SIX, -1), "rank is -1, but"),
    "shard's dim": (lambda: ra.shard(tensor(1, 6), SIX, 0, dim=2), "dim is 2, but x has 2 dimensions"),
    "shard's dim is half": (lambda: ra.shard(tensor(1, 6), SIX, 0, dim=0.5), "dim is 0.5, but must be an integer"),
    "unshard of a list": (lambda: ra.unshard([1.0], SIX), r"x_local is \[1.0\], but must be a Tensor"),
    "unshard of a sparse tensor": (
        lambda: ra.unshard(tensor(1, 6).to_sparse(), SIX),
        r"x_local has the layout torch.sparse_coo, but must be dense: pass x_local.to_dense\(\)",
    ),
    "unshard with a name": (lambda: ra.unshard(tensor(1, 6), "zigzag"), "layout is 'zigzag', but must be a Layout"),
    "unshard of more ranks": (lambda: ra.unshard(tensor(1, 6), ra.zigzag(6, 2)), "is for 2 ranks, but the group has 1"),
    "unshard of another length": (lambda: ra.unshard(tensor(1, 5), SIX), "x_local has 5 tokens in dim 1, but rank 0 of .* holds 6"),
    "unshard's dim": (lambda: ra.unshard(tensor(6), SIX), "dim is 1, but x_local has 1 dimensions"),
    "unshard's dim is text": (lambda: ra.unshard(tensor(1, 6), SIX, dim="1"), "dim is '1', but must be an integer"),
}

PARTIALS = {
    "merge of other queries": (
        lambda: ra.merge(partial(), partial(1, 5, 4, 8)),
        r"partials of \(1, 6, 4, 8\) and \(1, 5, 4, 8\) do not merge: both must be of the same queries and heads",
    ),
    "merge of two dtypes": (
        lambda: ra.merge(partial(), partial(dtype=torch.float64)),
        "partials of dtypes torch.float32 and torch.float64 do not merge: compute both from inputs of one dtype",
    ),
    "merge of two devices": (lambda: ra.merge(partial(), partial(device="meta")), "partials on cpu and meta do not merge"),
    "merge of a tensor": (lambda: ra.merge(partial(), tensor()), "b is a tensor of shape .*, but must be a Partial"),
    "merge of nothing": (lambda: ra.merge(None, partial()), "a is None, but must be a Partial"),
    "finish of a tensor": (lambda: ra.finish(tensor()), "part is a tensor of shape .*, but must be a Partial"),
    "merge of a partial of numbers": (
        lambda: ra.merge(partial(), ra.Partial(1, 2, 3)),
        r"b.out is 1, but must be a Tensor: make one with attend\(",
    ),
    "finish to integers": (lambda: ra.finish(partial(), torch.int64), "dtype is torch.int64, but must be of floating point"),
    "finish to text": (lambda: ra.finish(partial(), "bf16"), "dtype is 'bf16', but must be a dtype: pass torch.bfloat16"),
}

MODEL = torch.nn.Linear(2, 2)
BATCH = {"input_ids": torch.zeros(1, 6, dtype=torch.int64)}
SUM, LABELS = torch.tensor(1.0), torch.zeros(1, 6, dtype=torch.int64)

DOORS = {
    "attach to a name": (lambda: attach(MODEL, layout="zigzag"), "layout is 'zigzag', but must be a Layout"),
    "attach a tensor": (
        lambda: attach(MODEL, layout=SIX, mask=torch.ones(6, 6)),
        r"mask is a tensor of shape \(6, 6\), but must be a Mask",
    ),
    "ignore one name": (
        lambda: attach(MODEL, layout=SIX, ignore="softcap"),
        r"ignore is 'softcap', but must be a list of names: give \['softcap'\]",
    ),
    "shard a batch by a name": (lambda: shard_batch(BATCH, "zigzag", 0), "layout is 'zigzag', but must be a Layout"),
    "verify with a name": (lambda: ra.verify(MODEL, BATCH, layout="zigzag"), "layout is 'zigzag', but must be a Layout"),
    "replace with a name": (lambda: ra.replace_attention(MODEL, layout="zigzag"), "layout is 'zigzag', but must be a Layout"),
    "replace with a mask's name": (lambda: ra.replace_attention(MODEL, mask="full"), "mask is 'full', but must be a Mask"),
    "a number for a reduction": (lambda: mean_loss(SUM, LABELS, reduction=2), "reduction is 2, but must be a Reduction: make one"),
}

ALL = {**TENSORS, **OPTIONS, **MASKS, **LAYOUTS, **PARTIALS, **DOORS}


@pytest.mark.parametrize(("bad", "message"), ALL.values(), ids=ALL)
def test_bad_input_is_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        bad()


def test_the_calls_are_right_otherwise():
    assert call(layout=SIX, mask=ra.prefix(2), schedule=ra.ring(), softmax_scale=np.float64(0.5)).shape == (1, 6, 4, 8)
    assert local(q_positions=range(6)).out.shape == (1, 6, 4, 8)
    assert ra.merge(partial(), partial()).out.shape == (1, 6, 4, 8)


@pytest.mark.parametrize("with_statistics", [False, True])
def test_second_derivatives_are_refused(with_statistics):
    q = torch.randn(1, 6, 4, 8, requires_grad=True)
    out, stats = call(q=q, return_stats=True)
    target = stats.lse.sum() if with_statistics else out.sum()
    with pytest.raises(ValueError, match="ring attention has no second derivative: call backward without create_graph=True"):
        torch.autograd.grad(target, q, create_graph=True)


def refusals_in_a_job(group):
    """Messages of calls that need process groups: a DTensor, a group without this rank, a mesh of two dimensions."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 4))
    whole = DTensor.from_local(tensor(), dist.device_mesh.init_device_mesh("cpu", (8,)), [Replicate()])
    others = dist.new_group([1, 2])
    layout = ra.zigzag(48, 8)
    calls = {
        "DTensor": lambda: call(q=whole, group=group),
        "mesh": lambda: call(group=mesh),
        "layout": lambda: call(layout=ra.zigzag(6, 1), group=group),
        "mask": lambda: call(layout=layout, mask=ra.prefix(50), group=group),
        "unshard": lambda: ra.unshard(tensor(1, 5), layout, group),
    }
    if dist.get_rank() not in (1, 2):
        calls["group"] = lambda: call(group=others)
    messages = {}
    for name, make in calls.items():
        with pytest.raises(ValueError) as caught:
            make()
        messages[name] = str(caught.value)
    return messages


def test_refusals_in_a_job(gloo):
    for rank, messages in enumerate(gloo.run(8, refusals_in_a_job)):
        assert messages["DTensor"] == "q is a DTensor: pass this rank's shard, q.to_local()"
        assert messages["mesh"].startswith("group is a 2-D DeviceMesh")
        assert "is for 1 ranks, but the group has 8" in messages["layout"]
        assert "needs at least 50 tokens and is longer than the sequence of 48" in messages["mask"]
        assert f"x_local has 5 tokens in dim 1, but rank {rank} of zigzag" in messages["unshard"]
        if rank not in (1, 2):
            assert messages["group"] == f"group does not hold this rank: rank {rank} of the job must not call with it"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: call(q=tensor(device="cuda")), "k is on cpu and q is on cuda:0: move all three to one device"),
        (
            lambda: call(*[tensor(device="cuda", dtype=torch.float64)] * 3),
            "q is float64 on cuda:0: GPUs compute in bfloat16, float16 or float32; float64 is for CPU tensors",
        ),
    ],
)
def test_bad_input_on_a_gpu(bad, message):
    with pytest.raises(ValueError, match=message):
        bad()
