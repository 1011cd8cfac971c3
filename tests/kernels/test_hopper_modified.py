"""The Hopper kernels with modified scores: what the compiler makes of them, without a GPU; on one, against the plain kernels."""

import itertools

import numpy as np
import pytest
import torch

import ringattn as ra
import ringattn_kernels as rk
from ringattn_kernels import dispatch, hopper, score_arguments
from ringattn_kernels.dispatch import Kernels
from ringattn_kernels.hopper import backward, forward_config, fused
from ringattn_kernels.hopper.forward_kernel import hopper_forward_kernel
from ringattn_kernels.hopper.forward_softcap import caps_late
from ringattn_kernels.hopper.statistics import PaddedStatistics
from ringattn_kernels.hopper.turns import key_turns
from ringattn_kernels.hopper.work_queue import WorkQueue
from ringattn_kernels.modifiers import Bias, Dropout, Modifiers
from ringattn_kernels.score_arguments import fixed_arguments, hopper_obstacle, moving_arguments
from tests.kernels import dense
from tests.kernels.test_hopper_backward import RELEASE, compile_for_hopper

on_gpu = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU")
PARTS = ("softcap", "alibi", "bias", "dropout")
FAR = 1 << 29
ROWS = 1000
TILES = {
    "causal": [(0, ROWS, 0, ROWS, 0, FAR)],
    "full": [(0, ROWS, 0, ROWS, -FAR, FAR)],
    "window": [(0, ROWS, 0, ROWS, 0, 200)],
    "two": [(0, ROWS // 2, 0, ROWS, -100, FAR), (ROWS // 2, ROWS, 0, ROWS, 0, 300)],
}


def modifiers(parts, h, device="cpu", b=1, cap=30.0):
    generator = torch.Generator().manual_seed(0)
    edges = (-40, -9, -8, -3, 0, 5, 70)
    slopes, values = (torch.rand(shape, generator=generator).to(device) for shape in ((b, h), (h, len(edges) + 1)))
    return Modifiers(
        cap if "softcap" in parts else None,
        slopes if "alibi" in parts else None,
        Bias(edges, values) if "bias" in parts else None,
        Dropout(0.3, (5 << 40) + 3, 7, h + 3, 2) if "dropout" in parts else None,
    )


def table_of(kind, place=64):
    """Its last tile lies elsewhere than the others."""
    places = np.zeros((len(TILES[kind]), 2), dtype=np.int64)
    places[-1, 0] = place
    return rk.TileTable(np.array(TILES[kind]), ROWS, ROWS, places)


# (kernel, head dim, parts) -> bytes that a thread may spill under Triton 3.6, measured
SPILLS = {
    ("forward", 128, ("alibi",)): 24,
    ("forward", 64, ("dropout",)): 0,
    ("forward", 128, ("softcap",)): 0,
    ("forward", 128, PARTS): 80,
    ("wide key", 256, ("softcap",)): 0,
    ("wide key", 256, ("alibi",)): 0,
    ("query", 256, ("softcap",)): 112,
    ("query", 256, ("bias",)): 52,
    ("key", 128, ("softcap",)): 116,
    ("query", 128, ("softcap",)): 0,
    ("fused", 128, ("bias",)): 84,
    ("fused", 64, ("dropout",)): 152,
    ("fused", 64, ("softcap",)): 0,
    ("fused", 128, ("dropout",)): 136,
    ("ordered", 128, ("softcap",)): 12,
    ("learned", 128, ("alibi",)): 276,
    ("learned", 128, ("bias",)): 432,
    ("learned", 64, ("alibi", "bias", "dropout")): 780,
}


IN_TWO = {
    "key": (backward.key_kernel, backward.key_arguments),
    "wide key": (backward.wide_key_kernel, backward.wide_key_arguments),
    "query": (backward.query_kernel, backward.query_arguments),
}


def forms():
    """One of the backward in one kernel, and those in two with a softcap; the others are thorough."""
    for form in SPILLS:
        chosen = form in (("fused", 64, ("dropout",)), ("wide key", 256, ("softcap",)), ("query", 256, ("softcap",)))
        yield pytest.param(*form, id=str(form), marks=() if chosen else pytest.mark.thorough)


@pytest.mark.parametrize(("kernel", "d", "parts"), list(forms()))
def test_the_compiler_keeps_products_asynchronous(kernel, d, parts, tmp_path, monkeypatch):
    monkeypatch.setattr(score_arguments, "spread", lambda values, pieces: values.new_empty(len(values), len(pieces)))
    h = 4
    found, table = modifiers(parts, h), table_of("two")
    q, dout = (torch.empty(1, ROWS, h, d, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.empty(1, ROWS, 2, d, dtype=torch.bfloat16) for _ in range(2))
    score = moving_arguments(found, table, 0.1, q.device)
    if kernel == "forward":
        registers = forward_config.registers_for(found)
        how = forward_config.configs_for(d, d, registers)[0]
        assert how.warpgroups == (2 if registers == 240 else 3)
        queue = WorkQueue(*torch.empty(2, 6, dtype=torch.int32), torch.empty(4, 2, dtype=torch.int32))
        rows, counter = torch.empty(1, h, ROWS), torch.empty(1, dtype=torch.int32)
        arguments = hopper.forward.kernel_arguments(q, k, v, q, rows, rows, queue, counter, 0.1, None, how)
        late = dict(LATE_CAP=caps_late(found))
        compiled = compile_for_hopper(
            hopper_forward_kernel, arguments | fixed_arguments(found, table, queue.places) | score | late, tmp_path
        )
    elif kernel in IN_TWO:
        kind, make = IN_TWO[kernel]
        queries, rows = rk.Queries(q, dout, *torch.empty(3, 1, h, ROWS)), PaddedStatistics(*torch.empty(2, h, 1024))
        results = [q] if kernel == "query" else [k, v]
        arguments = make(queries, k, v, table, 0.1, rows, *results, False, found)[1]
        compiled = compile_for_hopper(kind, arguments | score, tmp_path)
    else:
        queries, sums, step = (
            rk.Queries(q, dout, *torch.empty(3, 1, h, ROWS)),
            torch.empty(h, 1024, d),
            fused.config_for(d, found).step,
        )
        counter = torch.empty(2, dtype=torch.int32)
        turns = key_turns(table, 128, step, q.device), torch.empty(h * 1024 // step, dtype=torch.int32)
        turns = turns if kernel == "ordered" else (None, None)
        inputs = queries, k, v, table, 0.1, PaddedStatistics(*torch.empty(2, h, 1024)), sums, k, v, False
        arguments = fused.fused_arguments(*inputs, counter, *turns, found)[1]
        if kernel == "learned":
            score |= fused.gradient_sums(dense.zero_sums(found), found, 1)
        compiled = compile_for_hopper(fused.fused_kernel, arguments | score, tmp_path)
    assert not compiled.warnings
    assert compiled.shared <= 227 * 1024
    if RELEASE == (3, 6):
        assert compiled.spills <= SPILLS[kernel, d, parts]


@pytest.fixture
def hopper_gpu(monkeypatch):
    monkeypatch.setattr(dispatch, "architecture", lambda device: "sm_90")


def chosen(parts, d=128, dv=None, learned=False, stride=1, place=64, deterministic=False, b=9, scale=0.1):
    """The kernels of the forward and of the backward."""
    h, found = 4, modifiers(parts, 4)
    places = np.array([[place, 0]])
    table = rk.TileTable(np.array(TILES["causal"]), ROWS, ROWS, places, stride)
    q, dout = (torch.empty(b, ROWS, h, dim, dtype=torch.bfloat16) for dim in (d, dv or d))
    k, v = (torch.empty(b, ROWS, h, dim, dtype=torch.bfloat16) for dim in (d, dv or d))
    queries = rk.Queries(q, dout, *torch.empty(3, b, h, ROWS))
    forward = dispatch.forward_kernels(q, k, v, table, scale, None, found)
    return forward, dispatch.backward_kernels(queries, k, v, table, scale, None, deterministic, found, learned)


def test_hopper_kernels_modify_scores_where_they_can(hopper_gpu):
    for parts in [(part,) for part in PARTS] + [PARTS]:
        assert chosen(parts) == (Kernels.HOPPER, Kernels.HOPPER_FUSED)
        assert chosen(parts, deterministic=True) == (Kernels.HOPPER, Kernels.HOPPER_ORDERED)
    assert chosen(("alibi", "bias", "dropout"), learned=True) == (Kernels.HOPPER, Kernels.HOPPER_FUSED)
    # too few items to take turns, or a head dim too large for one pass
    for where in (dict(deterministic=True, b=1), dict(d=256), dict(d=256, deterministic=True)):
        assert chosen(("softcap", "alibi", "bias"), **where) == (Kernels.HOPPER, Kernels.HOPPER)
        # what the kernels in two passes leave to the plain ones
        assert chosen(("dropout",), **where) == (Kernels.HOPPER, Kernels.PLAIN)
        assert chosen(("alibi",), learned=True, **where) == (Kernels.HOPPER, Kernels.PLAIN)
    # and the one in one pass: gradients of slopes and biases in a fixed order, or behind a softcap, and two head dims
    assert chosen(("alibi",), learned=True, deterministic=True) == (Kernels.HOPPER, Kernels.PLAIN)
    assert chosen(("alibi", "softcap"), learned=True) == (Kernels.HOPPER, Kernels.PLAIN)
    assert chosen(("softcap",), d=192, dv=128) == (Kernels.HOPPER, Kernels.PLAIN)
    # numbers that drop pairs are compared as fp16, up to its infinity
    assert not hopper_obstacle(Modifiers(dropout=Dropout(0.96875, 1, 0, 4)), table_of("causal"), 0.1)
    assert "above 0.96875" in hopper_obstacle(Modifiers(dropout=Dropout(0.97, 1, 0, 4)), table_of("causal"), 0.1)
    # the least score of a pair that is not live, times another scale, would be the greatest
    for part, scale, d in itertools.product(PARTS, (0.0, -0.1), (64, 256)):
        assert chosen((part,), d, scale=scale) == (Kernels.PLAIN, Kernels.PLAIN)
    # pairs are drawn where positions are multiples of 16
    for other in (dict(place=8), dict(stride=2)):
        assert chosen(("dropout",), **other) == (Kernels.PLAIN, Kernels.PLAIN)
        assert chosen(("alibi",), **other) == (Kernels.HOPPER, Kernels.HOPPER_FUSED)


def test_a_wish_that_cannot_be_met_is_refused(hopper_gpu):
    q = torch.empty(1, ROWS, 4, 128, dtype=torch.bfloat16)
    table = rk.TileTable(np.array(TILES["causal"]), ROWS, ROWS, np.array([[8, 0]]))
    with pytest.raises(ValueError, match=r"HOPPER is asked for, but tiles do not begin at positions that are multiples of 16"):
        dispatch.forward_kernels(q, q, q, table, 0.1, Kernels.HOPPER, modifiers(("dropout",), 4))
    wide = Modifiers(bias=Bias((0, 1 << 20), torch.empty(4, 3)))
    assert dispatch.forward_kernels(q, q, q, table, 0.1, None, wide) == Kernels.PLAIN


def distance(x, y):
    return float((x.float() - y.float()).norm() / y.float().norm())


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("parts", [(part,) for part in PARTS] + [PARTS], ids=str)
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_hopper_kernels_modify_as_the_plain_ones_do(d, dv, parts):
    b, h, hk = 2, 4, 2
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(b, ROWS, n, dim).cuda().bfloat16() for n, dim in ((h, d), (hk, d), (hk, dv), (h, dv)))
    softmax_scale = d**-0.5
    for kind, cap in (("two", 30.0), ("window", 1.0), ("full", 30.0)):
        # slopes of each batch, and of all
        table, found = table_of(kind), modifiers(parts, h, "cuda", 1 if kind == "window" else b, cap)
        options = dict(softmax_scale=softmax_scale, modifiers=found)
        plain, ours = (rk.forward(q, k, v, table, **options, kernels=kernels) for kernels in (Kernels.PLAIN, None))
        lse = [state[1] + state[2].log() for state in (plain, ours)]
        # weights are rounded to 16 bits
        assert distance(ours[0], plain[0]) < 5e-3 and distance(lse[1], lse[0]) < 1e-5, (kind, "forward")
        # a state that goes from launch to launch
        state = None
        for tile in range(len(table)):
            one = rk.TileTable(table.tiles[tile : tile + 1], ROWS, ROWS, table.places[tile : tile + 1])
            state = rk.forward(q, k, v, one, **options, state=state, final=tile == len(table) - 1)
        assert distance(state[0], plain[0]) < 5e-3, (kind, "state")
        queries = rk.Queries(q, dout, *ours[1:], rk.delta(ours[0], dout))
        gradients = []
        for kernels, deterministic in ((Kernels.PLAIN, False), (None, False), (None, True), (None, True)):
            found_here = [torch.empty(x.shape, device="cuda") for x in (q, k, v)]
            names = dict(zip(("dq", "dk", "dv"), found_here))
            rk.backward(queries, k, v, table, **options, **names, add=False, kernels=kernels, deterministic=deterministic)
            gradients.append(found_here)
        for found_here in gradients[1:]:
            assert all(distance(x, y) < 8e-3 for x, y in zip(found_here, gradients[0])), (kind, "backward")
        assert all(torch.equal(x, y) for x, y in zip(*gradients[2:]))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("parts", [("alibi",), ("bias",), ("alibi", "bias", "dropout")], ids=str)
@pytest.mark.parametrize("d", [64, 96, 128])
def test_gradients_of_slopes_and_biases_are_those_of_the_plain_kernels(d, parts):
    b, h, hk = 2, 4, 2
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(b, ROWS, n, d).cuda().bfloat16() for n in (h, hk, hk, h))
    for kind in TILES:
        table, found = table_of(kind), modifiers(parts, h, "cuda", b)
        options = dict(softmax_scale=d**-0.5, modifiers=found)
        out, row_max, row_sum = rk.forward(q, k, v, table, **options)
        queries = rk.Queries(q, dout, row_max, row_sum, rk.delta(out, dout))
        both = []
        for kernels in (Kernels.PLAIN, Kernels.HOPPER_FUSED):
            sums = dense.zero_sums(found)
            names = {name: torch.empty(x.shape, device="cuda") for name, x in (("dq", q), ("dk", k), ("dv", v))}
            # sums of several launches
            for _ in range(2):
                rk.backward(queries, k, v, table, **options, **names, add=False, kernels=kernels, sums=sums)
            both.append([sums.slopes, sums.values, *names.values()])
        for x, y in zip(*both):
            assert (x is None) == (y is None)
            assert x is None or distance(y, x) < 5e-3, kind


@pytest.mark.gpu
@on_gpu
def test_a_block_of_the_tensor_cores_keeps_the_pairs_that_the_cpu_keeps():
    """Values and their gradient are unit vectors, so that the output and the gradient of values show which weights there are."""
    from ringattn.device.philox import kept

    s, h, dropout = 128, 3, Dropout(0.4, 9 << 50, 3, 5, 1)
    q, k = (torch.zeros(2, s, h, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    eye = torch.eye(s, device="cuda", dtype=torch.bfloat16)[None, :, None].repeat(2, 1, h, 1)
    table = rk.TileTable(np.array([(0, s, 0, s, -FAR, FAR)]), s, s, np.array([[1 << 20, 48]]))
    found = Modifiers(dropout=dropout)
    out, row_max, row_sum = rk.forward(q, k, eye, table, softmax_scale=1.0, modifiers=found, kernels=Kernels.HOPPER)
    wanted = torch.from_numpy(kept(dropout, 2, h, np.arange(s) + (1 << 20), np.arange(s) + 48))
    assert torch.equal(out.transpose(1, 2).cpu() != 0, wanted)
    queries = rk.Queries(q, eye, row_max, row_sum, torch.zeros_like(row_max))
    for kernels in (Kernels.HOPPER_FUSED, Kernels.HOPPER_ORDERED):
        dq, dk, dv = (torch.empty(x.shape, device="cuda") for x in (q, k, eye))
        rk.backward(queries, k, eye, table, softmax_scale=1.0, dq=dq, dk=dk, dv=dv, add=False, modifiers=found, kernels=kernels)
        assert torch.equal(dv.permute(0, 2, 3, 1).cpu() != 0, wanted), kernels


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("lift", [0.0, -20.0])
@pytest.mark.parametrize("size", [1, 6, 30])
@pytest.mark.parametrize("cap", [30.0, 50.0])
def test_a_late_softcap_is_exact_near_and_far(cap, size, lift):
    """Scores of all sizes, and below 0 by `lift`."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, ROWS, h, 128, device="cuda") for h in (4, 2, 2))
    q *= size
    q[..., 0], k[..., 0] = 128**0.5, lift
    inputs, score = [x.bfloat16() for x in (q, k, v)], ra.score(softcap=cap)
    out, stats = ra.ring_attention(*inputs, score=score, return_stats=True)
    exact, wanted = ra.reference.attention(*(x.double() for x in inputs), score=score, return_stats=True)
    rounded = ra.reference.attention(*inputs, score=score)
    assert (out - exact).norm() <= (rounded - exact).norm()
    torch.testing.assert_close(stats.lse.double(), wanted.lse, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(stats.row_max.double(), wanted.row_max, rtol=2e-5, atol=2e-5)
