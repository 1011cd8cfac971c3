"""If ranks disagree, or one rank has bad input, every rank raises an error that names the odd rank, within seconds; no rank hangs."""

import re
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn import check
from ringattn.runtime import agree

N = 24


def arguments(rank, world_size):
    """The common arguments of all ranks: shards of 24 tokens."""
    held = ra.zigzag(N, world_size).lengths[rank]
    return {
        "q": (1, held, 4, 8),
        "k": (1, held, 2, 8),
        "v": (1, held, 2, 6),
        "dtype": torch.float32,
        "requires_grad": True,
        "layout": ra.zigzag(N, world_size),
        "mask": ra.causal(),
    }


def call(group, odd):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    options = {**arguments(rank, world_size), **odd}
    if options.pop("function", "") == "unshard":
        return ra.unshard(torch.ones(options["q"]), options["layout"], group)
    dtype, requires_grad = options.pop("dtype"), options.pop("requires_grad")
    q, k, v = (torch.ones(options.pop(name), dtype=dtype, requires_grad=requires_grad) for name in "qkv")
    return ra.ring_attention(q, k, v, group=group, **options)


def disagree(group, odd_rank, odd, common):
    """This rank's error if `odd_rank` calls with `odd`, how long it took, and whether the group works afterwards.

    It takes milliseconds, or seconds on a busy machine. The group's timeout is 90 s.
    """
    began = time.monotonic()
    message = ""
    try:
        call(group, {**common, **(odd if dist.get_rank(group) == odd_rank else {})})
    except ValueError as error:
        message = str(error)
    took = time.monotonic() - began
    return message, took, bool((call(group, {}) - 1).abs().max() < 1e-5)


def long_mask(window):
    mask = ra.sliding_window(window)
    for n in range(12):
        mask = mask | (ra.sliding_window(1) & ra.prefix(n))
    return mask


DISAGREEMENTS = {
    "dtype": ({"dtype": torch.bfloat16}, {}, "dtype is torch.bfloat16 on rank 2, but torch.float32 on ranks 0, 1, 3"),
    "batch": (
        dict.fromkeys("qkv", (2, 6, 2, 6)),
        {"q": (1, 6, 2, 6), "k": (1, 6, 2, 6)},
        "batch size is 2 on rank 2, but 1 on ranks 0",
    ),
    "query heads": (
        {"q": (1, 6, 8, 8)},
        {},
        "number of query heads is 8 on rank 2, but 4 on ranks 0, 1, 3: pass the same on every rank$",
    ),
    "key heads": (
        {"k": (1, 6, 4, 8), "v": (1, 6, 4, 6)},
        {},
        "number of key/value heads is 4 on rank 2, but 2 on ranks 0, 1, 3",
    ),
    "axes in torch's order": (
        dict.fromkeys("qkv", (1, 6, 7, 8)),
        dict.fromkeys("qkv", (1, 6, 5, 8)),
        r"number of query heads is 7 on rank 2, but 5 .* key/value heads is 7 .*\(batch, heads, tokens, head_dim\), as torch has them",
    ),
    "head_dim": ({"q": (1, 6, 4, 16), "k": (1, 6, 2, 16)}, {}, "head_dim is 16 on rank 2, but 8 on ranks 0, 1, 3"),
    "v's head_dim": ({"v": (1, 6, 2, 8)}, {}, "v's head_dim is 8 on rank 2, but 6 on ranks 0, 1, 3"),
    "mask": ({"mask": ra.full()}, {}, r"mask is full\(\) \(.*\) on rank 2, but causal\(\) \(.*\) on ranks 0, 1, 3"),
    "masks that look alike": (
        {"mask": ra.documents([10, 14])},
        {"mask": ra.documents([11, 13])},
        r"mask is documents\(<2 documents, 24 tokens>, causal=True\) \(\w+\) on rank 2, but documents\(.*\) on ranks 0, 1, 3",
    ),
    "long masks": ({"mask": long_mask(3)}, {"mask": long_mask(4)}, r"mask is \(.* on rank 2, but \(.* on ranks 0, 1, 3"),
    "layout": (
        {"layout": ra.contiguous(N, 4)},
        {},
        r"layout is contiguous\(seq_len=24, world_size=4\) \(\w+\) on rank 2, but zigzag\(.*\) on ranks 0, 1, 3",
    ),
    "layout or none": ({"layout": None}, {}, r"layout is the default on rank 2, but zigzag\(.*\) on ranks 0, 1, 3"),
    "scale": ({"softmax_scale": 0.5}, {"softmax_scale": 0.25}, "softmax_scale is 0.5 on rank 2, but 0.25 on ranks 0, 1, 3"),
    "schedule": (
        {"schedule": ra.ring()},
        {"schedule": ra.gather()},
        r"schedule is ring\(\) on rank 2, but gather\(\) on ranks 0, 1, 3",
    ),
    "schedule or none": ({"schedule": ra.ring()}, {}, r"schedule is ring\(\) on rank 2, but None on ranks 0, 1, 3"),
    "requires_grad": ({"requires_grad": False}, {}, "requires_grad is False on rank 2, but True on ranks 0, 1, 3"),
    "function": ({"function": "unshard"}, {}, "function is unshard on rank 2, but ring_attention on ranks 0, 1, 3"),
    "two things": (
        {"schedule": ra.ring(), "softmax_scale": 2.0},
        {"softmax_scale": 1.0},
        r"softmax_scale is 2.0 on rank 2, but 1.0 on ranks 0, 1, 3; schedule is ring\(\) on rank 2, but None on ranks 0, 1, 3",
    ),
}


@pytest.mark.parametrize(("odd", "common", "message"), DISAGREEMENTS.values(), ids=DISAGREEMENTS)
def test_every_rank_names_the_odd_one(gloo, odd, common, message):
    for text, took, works in gloo.run(4, disagree, 2, odd, common, timeout=30):
        with pytest.raises(ValueError, match=f"^ranks disagree: .*{message}"):
            raise ValueError(text)
        assert took < 20
        assert works


REFUSALS = {
    "3-D": ({"q": (6, 4, 8)}, "q has 3 dimensions"),
    "heads": ({"k": (1, 6, 3, 8), "v": (1, 6, 3, 6)}, "k has 3 heads, which does not divide q's 4"),
    "length": (
        dict.fromkeys("qkv", (1, 7, 2, 6)),
        r"q has 7 tokens, but rank 2 of layout zigzag\(seq_len=24, world_size=4\) holds 6",
    ),
    "mask": ({"mask": "causal"}, "mask is 'causal', but must be a Mask"),
    "mask's length": ({"mask": ra.prefix(25)}, r"mask prefix\(25\) needs at least 25 tokens"),
    "layout": ({"layout": ra.zigzag(N, 2)}, r"layout zigzag\(.*\) is for 2 ranks, but the group has 4"),
    "scale": ({"softmax_scale": float("nan")}, "softmax_scale is nan"),
    "scale beyond floats": ({"softmax_scale": 10**400}, "softmax_scale is inf"),
    "return_stats": ({"return_stats": "yes"}, "return_stats is 'yes', but must be a bool"),
    "text beyond ASCII": ({"schedule": '"ожерелье"\n' * 300}, "schedule is '.*but must be a Schedule"),
    "unshard": ({"function": "unshard", "q": (1, 9)}, "x_local has 9 tokens"),
}


@pytest.mark.parametrize(("odd", "message"), REFUSALS.values(), ids=REFUSALS)
def test_bad_input_of_one_rank_stops_all(gloo, odd, message):
    for rank, (text, took, works) in enumerate(gloo.run(4, disagree, 2, odd, {}, timeout=30)):
        with pytest.raises(ValueError, match=message if rank == 2 else f"^rank 2 refused the input: rank 2: {message}"):
            raise ValueError(text)
        assert took < 20
        assert works


def odd_environment(group, value):
    """This rank's error if the environment of rank 1 is odd, in a first call, and whether the ranks work afterwards."""
    rank, transport = dist.get_rank(group), ra.process_group(group)
    q = torch.ones(1, 4, 2, 8)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setenv("LOCAL_WORLD_SIZE", value)
        with pytest.raises(ValueError) as caught:
            ra.ring_attention(q, q, q, group=transport)
    return str(caught.value), bool((ra.ring_attention(q, q, q, group=transport) == 1).all())


@pytest.mark.parametrize("value", ["two", "0", "-1"])
def test_an_odd_environment_of_one_rank_stops_all(gloo, value):
    for rank, (text, works) in enumerate(gloo.run(2, odd_environment, value)):
        told = "" if rank else "rank 1 refused the input: rank 1: "
        assert text.startswith(
            f"{told}LOCAL_WORLD_SIZE is '{value}' in the environment, but must be the number of ranks on each node"
        )
        assert works


def test_bad_input_of_every_rank(gloo):
    for rank, (text, took, works) in enumerate(gloo.run(3, disagree, 0, {}, {"mask": None, "layout": ra.zigzag(9, 3)})):
        assert f"rank {rank} of layout zigzag(seq_len=9, world_size=3) holds 3" in text
        assert took < 20
        assert works


def default_lengths(group):
    """Shards of lengths that no default layout has."""
    rank = dist.get_rank(group)
    q = torch.ones(1, 8 if rank == 1 else 6, 2, 4)
    with pytest.raises(ValueError) as caught:
        ra.ring_attention(q, q, q, group=group)
    return str(caught.value)


def test_lengths_that_fit_no_default_layout(gloo):
    for text in gloo.run(4, default_lengths):
        assert "tokens on rank" in text
        assert "the default layout of causal(), zigzag(seq_len=26, world_size=4), holds" in text
        assert text.endswith("pass the layout that the shards were made with")


def again(group):
    """The errors if ranks agree once, and then one rank changes an argument, twice."""
    call(group, {})
    return [disagree(group, 1, {"softmax_scale": 0.5}, {}) for _ in range(2)]


def test_a_difference_after_an_agreement_is_an_error(gloo):
    for found in gloo.run(3, again, timeout=30):
        for text, _, works in found:
            assert re.search(r"softmax_scale is 0\.5 on rank 1, but 0\.35355\d+ on ranks 0, 2", text)
            assert works


def late(group):
    """Rank 1 refuses its input, and no longer waits when the others call."""
    agree._PATIENCE = 0.2
    rank = dist.get_rank(group)
    if rank != 1:
        time.sleep(1)
    found = disagree(group, 1, {"softmax_scale": float("nan")}, {})
    agree._PATIENCE = 10.0
    return found


def test_only_errors_of_input_are_told():
    class Silent:
        size = 2

        def all_gather_control(self, record, patience):
            raise AssertionError("nothing to tell")

    with pytest.raises(KeyError), agree.refusing(Silent()):
        raise KeyError("not an error of input")
    with agree.refusing(Silent()):
        pass


def test_ranks_that_come_late_raise_the_error_too(gloo):
    for text, took, works in gloo.run(3, late, timeout=30):
        assert "softmax_scale is nan, but must be finite" in text
        assert took < 20
        assert works


def unshard_disagreement(group, odd_rank, odd):
    rank = dist.get_rank(group)
    options = {"dtype": torch.float32, "features": 3, "dim": 1, "layout": ra.zigzag(8, 4), **(odd if rank == odd_rank else {})}
    shape = [2, 2, 2]
    shape[(options["dim"] + 1) % 3] = options["features"]
    try:
        ra.unshard(torch.ones(shape, dtype=options["dtype"]), options["layout"], group, options["dim"])
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"dtype": torch.float64}, "dtype is torch.float64 on rank 3, but torch.float32 on ranks 0, 1, 2"),
        ({"features": 5}, r"shape but for dim is \(2, 5\) on rank 3, but \(2, 3\) on ranks 0, 1, 2"),
        ({"dim": 0}, "dim is 0 on rank 3, but 1 on ranks 0, 1, 2"),
        ({"layout": ra.striped(8, 4)}, r"layout is striped\(.*\) on rank 3, but zigzag\(.*\) on ranks 0, 1, 2"),
    ],
)
def test_unshard_names_the_odd_one(gloo, odd, message):
    for text in gloo.run(4, unshard_disagreement, 3, odd):
        with pytest.raises(ValueError, match=message):
            raise ValueError(text)


def capturing(yes=True):
    """Let the library believe that a CUDA graph is captured, or not."""
    return mock.patch.object(check, "captured", return_value=yes)


def captured(group):
    """This rank's errors if rank 1 alone captures a call, before and after the same call without a capture; if all ranks capture only
    one pass of a call; and if rank 1 alone captures `unshard`."""
    rank, options = dist.get_rank(group), {"softmax_scale": 0.75}
    messages = []

    def refused(work):
        with pytest.raises(ValueError) as caught:
            work()
        messages.append(str(caught.value))

    with capturing(rank == 1):
        refused(lambda: call(group, options))
    call(group, options).sum().backward()
    with capturing(rank == 1):
        refused(lambda: call(group, options))
    for forward in (False, True):
        with capturing(forward):
            total = call(group, options).sum()
        with capturing(not forward):
            refused(total.backward)
    with capturing(rank == 1):
        refused(lambda: call(group, {"function": "unshard"}))
    with capturing():
        call(group, options).sum().backward()
    return messages


def test_ranks_capture_a_graph_together(gloo):
    for rank, (first, odd, backward, forward, unshard) in enumerate(gloo.run(3, captured, timeout=30)):
        refusal = "this call is captured in a CUDA graph, and the first of its kind: make the same call once before"
        assert first.startswith(refusal if rank == 1 else f"rank 1 refused the input: rank 1: {refusal}")
        for message in (odd, unshard):
            assert "ranks disagree: captured in a CUDA graph is True on rank 1, but False on ranks 0, 2" in message
        assert backward == "the backward pass is captured in a CUDA graph, but the forward pass was not: capture both, or neither"
        assert forward == "the forward pass is captured in a CUDA graph, but the backward pass was not: capture both, or neither"


def other_names(group):
    """Whether calls are right if ranks give equal layouts different names, and after that; and the errors where layouts differ."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    layout = ra.zigzag(N, world_size)
    mine = ra.Layout(N, layout.spans, f"of rank {rank}")
    calls = ({"layout": mine}, {"layout": mine, "mask": ra.full()}, {}, {"layout": mine})
    right = [bool((call(group, options) - 1).abs().max() < 1e-5) for options in calls]
    shard = torch.ones(1, mine.lengths[rank])
    right += [bool((ra.unshard(shard, each, group) == 1).all()) for each in (mine, layout)]
    return right, disagree(group, 1, {"layout": ra.Layout(N, layout.spans[::-1], "of rank 0")}, {"layout": mine})


def test_equal_layouts_may_have_different_names(gloo):
    for right, (message, _, works) in gloo.run(2, other_names):
        assert right == [True] * 6
        assert re.search(r"layout is .*\(.*\) \(\w+\) on rank 0, but of rank 0\(.*\) \(\w+\) on rank 1", message)
        assert works


def forged(mask, digest):
    object.__setattr__(mask, "digest", digest)
    return mask


def colliding(group, same):
    """This rank's error if rank 1 has a mask that looks like the others', and whose digest has the same first `same` digits."""
    digest = "0123456789abcdef" * 2
    other = digest[:same] + "0" * (32 - same)
    return disagree(group, 1, {"mask": forged(ra.documents([10, 14]), other)}, {"mask": forged(ra.documents([11, 13]), digest)})


@pytest.mark.parametrize("same", [8, 31])
def test_masks_are_compared_by_their_whole_digests(gloo, same):
    for message, _, works in gloo.run(2, colliding, same):
        found = re.search(r"^ranks disagree: mask is .* \((\w+)\) on rank 0, but .* \((\w+)\) on rank 1: pass the same", message)
        assert found is not None
        assert found[1] != found[2]
        assert len(found[1]) == same + 1
        assert works


def transforms(group):
    """This rank's error and its time for each transform, in a transport's first call; a sum of `unshard`, and its errors."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    q, k, v = (torch.ones(arguments(rank, world_size)[name]) for name in "qkv")
    found = {}

    def attention(transport):
        return lambda q: ra.ring_attention(q, k, v, group=transport).sum()

    def dual(function):
        with torch.autograd.forward_ad.dual_level():
            function(torch.autograd.forward_ad.make_dual(q, q))

    module = torch.nn.Linear(8, 8)
    weights = dict(module.named_parameters())
    for name, apply in {
        "grad": lambda f: torch.func.grad(f)(q),
        "vjp": lambda f: torch.func.vjp(f, q),
        "jvp": lambda f: torch.func.jvp(f, (q,), (q,)),
        "grad in vmap": lambda f: torch.vmap(torch.func.grad(f))(torch.stack([q, q])),
        "forward mode": dual,
        "functional_call": lambda f: torch.func.grad(lambda w: f(torch.func.functional_call(module, w, q)))(weights),
    }.items():
        transport, began = ra.process_group(group), time.monotonic()
        with pytest.raises(ValueError) as caught:
            apply(attention(transport))
        found[name] = str(caught.value), time.monotonic() - began
        assert bool((ra.ring_attention(q, k, v, group=transport) - 1).abs().max() < 1e-5)
    out = attention(group)(torch.func.functional_call(module, weights, q))
    out.backward()
    whole = ra.unshard(torch.ones(1, 6), ra.zigzag(12, world_size), group).sum()
    refused = [
        lambda: torch.func.grad(lambda x: ra.unshard(x, ra.zigzag(12, world_size), group).sum())(torch.ones(1, 6)),
        lambda: torch.vmap(lambda x: ra.unshard(x, ra.zigzag(12, world_size), group))(torch.ones(2, 1, 6)),
        lambda: ra.unshard(torch.ones(1, 6, device="meta"), ra.zigzag(12, world_size), group),
    ]
    messages = []
    for work in refused:
        with pytest.raises(ValueError) as caught:
            work()
        messages.append(str(caught.value))
    return found, float(whole), messages


def test_transforms_of_torch_func_are_refused_in_a_first_call(gloo):
    for found, whole, (grad, vmap, meta) in gloo.run(2, transforms):
        for message, took in found.values():
            assert message == (
                "q is differentiated in forward mode or by torch.func, which attention does not support: "
                "call backward, or torch.autograd.grad"
            )
            assert took < 10
        assert whole == 12
        assert grad.startswith("x_local is differentiated in forward mode or by torch.func")
        assert vmap.startswith("x_local is in torch.vmap, which this does not support")
        assert meta.startswith("x_local is on meta, so it has no values to gather")
