"""Grids of ranks over gloo: every rank's output, statistics and gradients against the dense reference, in fp64; and errors."""

import gc
import time
import weakref
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn.runtime import groups, passes
from ringattn.runtime.calls import RingCall
from ringattn.runtime.op import BACKWARD, FORWARD, UNMODIFIED
from tests.distributed import dense
from tests.distributed.dense import inputs

# (ring, heads axis): (query heads, K/V heads) to try
GRIDS = {
    (2, 2): ((8, 2), (4, 1), (6, 6)),
    (2, 3): ((6, 2), (3, 1), (12, 3), (9, 9)),
    (3, 2): ((4, 2), (2, 1), (6, 3)),
    (2, 4): ((8, 2), (4, 1), (8, 8), (12, 3)),
    (1, 4): ((8, 2),),
    (4, 1): ((3, 1),),
}
LAYOUTS = {name: dense.LAYOUTS[name] for name in ("zigzag", "striped", "balanced")}
LAYOUTS["lopsided"] = lambda n, world_size: lopsided(n, world_size)
MASKS = {name: dense.MASKS[name] for name in ("causal", "full", "window", "documents", "dilated&causal")}
SCHEDULES = (ra.ring(), ra.gather(), ra.waves(1), ra.double_ring(1), None)
LENGTHS = (61, 5, 47, 97)


def lopsided(n, world_size):
    """The last rank holds half of the sequence; rank 1 and at most one other hold the rest, out of order; other ranks hold nothing."""
    spans = [() for _ in range(world_size)]
    spans[-1] = (ra.Span(1, n // 2, 2),)
    even = (n + 1) // 2
    spans[1] += (ra.Span(2 * (even // 3), even - even // 3, 2),)
    spans[world_size // 2] += (ra.Span(0, even // 3, 2),)
    return ra.Layout(n, tuple(spans), "lopsided")


_meshes = {}


def grid(shape, names=("ring", "heads")):
    """A mesh of the first ranks, made once; all 8 ranks must call it together."""
    if (shape, names) not in _meshes:
        ranks = torch.arange(shape[0] * shape[1]).view(shape)
        _meshes[shape, names] = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    return _meshes[shape, names]


def check(group, rank, n, mask, layout, schedule, heads, seed):
    """`dense.check`, with gradients through out and lse."""
    return dense.check(group, rank, mask, layout, schedule, *inputs(n, seed, heads, batch=1 + seed % 2))


def check_grid(group, shape, names, cases):
    """`check` each case on a grid; returns the worst few. Ranks outside of the grid do nothing."""
    mesh = grid(shape, names)
    if mesh.get_coordinate() is None:
        return []
    ring, heads = (mesh.get_local_rank(name) for name in ("ring", "heads"))
    sizes = dict(zip(names, shape))
    rank, world_size = ring * sizes["heads"] + heads, shape[0] * shape[1]
    found = []
    for seed, (mask, layout, schedule, heads, n) in enumerate(cases):
        args = n, MASKS[mask](n), LAYOUTS[layout](n, world_size), schedule, heads
        found.append((check(mesh, rank, *args, seed), (mask, layout, schedule, heads, n)))
    return sorted(found, key=lambda item: -item[0])[:4]


def thirds():
    """A third of the pairs of mask and layout on each grid; the others, and two of the grids, are thorough."""
    for (number, shape), third in product(enumerate(GRIDS), range(3)):
        chosen = shape not in ((1, 4), (2, 3)) and third == number // 2 % 3
        yield pytest.param(shape, third, id=f"{shape[0]}x{shape[1]}-{third}", marks=() if chosen else pytest.mark.thorough)


@pytest.mark.parametrize(("shape", "third"), list(thirds()))
@pytest.mark.some(2)
def test_every_rank_agrees_with_the_reference(gloo, shape, third):
    """Each mask, layout, schedule, number of heads and length."""
    heads = GRIDS[shape]
    cases = [
        (mask, layout, SCHEDULES[(i + shape[1] + i // 5) % 5], heads[i % len(heads)], LENGTHS[(i + shape[0]) % 4])
        for i, (layout, mask) in enumerate(list(product(LAYOUTS, MASKS))[third::3])
    ]
    found = gloo.run(8, check_grid, shape, ("ring", "heads"), cases)
    assert [len(worst) for worst in found] == [4] * (shape[0] * shape[1]) + [0] * (8 - shape[0] * shape[1])
    for worst in found[: shape[0] * shape[1]]:
        assert worst[0][0] < 1e-10, worst


def test_the_heads_axis_may_come_first(gloo):
    cases = [("causal", "zigzag", ra.ring(), (6, 2), 47), ("window", "lopsided", ra.gather(), (4, 1), 61)]
    found = gloo.run(8, check_grid, (2, 3), ("heads", "ring"), cases)
    assert max(worst[0][0] for worst in found[:6]) < 1e-10, found


def cube(group):
    """Two grids at once, of a 3-D mesh, with axes given by name and by number; both give the same object."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "seq", "head"))
    pair = ra.hybrid(mesh, ring="seq", heads="head")
    assert ra.hybrid(mesh["seq", "head"], 0, 1) is pair
    parity = mesh.get_local_rank("data")
    layout = ra.zigzag(40 + 7 * parity, 4)
    worst = [check(pair, pair.rank, layout.seq_len, ra.causal(), layout, None, (4, 2), seed) for seed in range(2 + parity)]
    x = torch.arange(2.0 * layout.seq_len).view(2, -1)
    whole = ra.unshard(ra.shard(x, layout, pair.rank, 1).requires_grad_(), layout, pair)
    assert torch.equal(whole, x)
    return pair.rank, max(worst)


def test_grids_of_a_larger_mesh(gloo):
    found = gloo.run(8, cube)
    assert [rank for rank, _ in found] == [0, 1, 2, 3] * 2
    assert max(worst for _, worst in found) < 1e-10


def round_trips(group, shape, n):
    mesh = grid(shape)
    if mesh.get_coordinate() is None:
        return
    pair = ra.hybrid(mesh)
    for make in LAYOUTS.values():
        dense.check_unshard(mesh, pair.rank, make(n, pair.size), (2, n, 3))


@pytest.mark.parametrize("shape", [(2, 3), (4, 2)], ids="{0[0]}x{0[1]}".format)
@pytest.mark.some(1)
def test_unshard(gloo, shape):
    for n in (5, 23):
        gloo.run(8, round_trips, shape, n)


def half_precision(group, shape, heads, n):
    mesh = grid(shape)
    if mesh.get_coordinate() is None:
        return []
    pair = ra.hybrid(mesh)
    *whole, _ = inputs(n, 3, heads, torch.bfloat16)
    return dense.errors_in_16_bits(pair, pair.rank, ra.zigzag(n, pair.size), *whole)


@pytest.mark.parametrize("heads", [(8, 4), (8, 1)], ids=["shared", "copied"])
def test_half_precision(gloo, heads):
    for rows in gloo.run(8, half_precision, (2, 4), heads, 130):
        for factor, (error, same_dtype) in zip((2, 3, 3, 3), rows, strict=True):
            assert error <= factor * same_dtype


def keep_contract(group, mask, layout, heads, alone):
    """torch's checks of both operators on each rank of a grid: schemas, no aliases, fake tensors' shapes and strides, tracing."""
    mesh = grid((2, 2))
    if mesh.get_coordinate() is None:
        return
    pair = ra.hybrid(mesh)
    layout = LAYOUTS[layout](23, pair.size)
    q, k, v, dout, dlse = inputs(23, 0, heads, batch=2)
    leaves = [ra.shard(x, layout, pair.rank).requires_grad_() for x in (q, k, v)]
    run = RingCall(groups.get_context(pair), layout, MASKS[mask](23), None)
    # tracing is left out: results of two calls differ in the call's place in the order
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(FORWARD, (*leaves, *UNMODIFIED, run.number, 0.3, True), test_utils=checks)
    results = FORWARD(*leaves, *UNMODIFIED, run.number, 0.3, True)
    saved = [*(x.detach() for x in leaves), *UNMODIFIED, *(x.detach() for x in results)]
    dout, dsum = ra.shard(dout, layout, pair.rank), ra.shard(dlse, layout, pair.rank, dim=2)
    for upstream in [(dout, None), (None, dsum)] if alone else [(dout, dsum)]:
        torch.library.opcheck(BACKWARD, (*upstream, *saved, run.number, 0.3, [True] * 3))


@pytest.mark.parametrize(
    ("mask", "layout", "heads", "alone"),
    [("causal", "zigzag", (4, 2), False), ("dilated&causal", "lopsided", (2, 1), True)],
    ids=["shared heads", "copied heads, another order, empty shards, one gradient of two"],
)
@pytest.mark.thorough
def test_the_operators_keep_their_contract(gloo, mask, layout, heads, alone):
    gloo.run(8, keep_contract, mask, layout, heads, alone)


def checkpointed(group):
    """Launches of both passes and the inputs' gradients: without a checkpoint, with full recomputation, and with the policy."""
    mesh = grid((2, 2))
    if mesh.get_coordinate() is None:
        return None
    pair = ra.hybrid(mesh)
    layout = ra.zigzag(29, pair.size)
    q, k, v, dout, dlse = inputs(29, 5, (4, 2))
    found = []
    for options in (None, {}, {"context_fn": ra.checkpoint_contexts}):
        leaves = [ra.shard(x, layout, pair.rank).requires_grad_() for x in (q, k, v)]

        def block(q, k, v):
            out, stats = ra.ring_attention(2 * q, k, v, layout=layout, group=mesh, return_stats=True)
            return out.sin(), stats.lse

        with (
            patch.object(passes, "forward", side_effect=passes.forward) as forward,
            patch.object(passes, "backward", side_effect=passes.backward) as backward,
        ):
            out, lse = block(*leaves) if options is None else checkpoint(block, *leaves, use_reentrant=False, **options)
            loss = (out * ra.shard(dout, layout, pair.rank)).sum() + (lse * ra.shard(dlse, layout, pair.rank, dim=2)).sum()
            gradients = torch.autograd.grad(loss, leaves)
        found.append((forward.call_count, backward.call_count, gradients))
    return found


def test_the_checkpoint_policy_saves_attention_from_running_twice(gloo):
    for (*plain, wanted), (*recomputed, again), (*saved, once) in gloo.run(8, checkpointed)[:4]:
        assert (plain, recomputed, saved) == ([1, 1], [2, 1], [1, 1])
        for x, y, z in zip(wanted, again, once, strict=True):
            assert torch.equal(x, y)
            assert torch.equal(x, z)


def call(group, odd):
    """A call on a 2 x 2 grid with the common arguments, except for those in `odd`: 24 tokens, 4 query heads and 2 K/V heads."""
    options = {"h": 4, "layout": ra.zigzag(24, 4), "mask": ra.causal(), "return_stats": False, "swapped": False, **odd}
    mesh = grid((2, 2))
    pair = ra.hybrid(mesh, "heads", "ring") if options.pop("swapped") else mesh
    h = options.pop("h")
    q, k = torch.ones(1, 6, h, 8), torch.ones(1, 6, 2 if h % 2 == 0 else h, 8)
    return ra.ring_attention(q, k, k, group=pair, **options)


def disagree(group, odd_rank, odd):
    """This rank's error if one rank calls with `odd`, how long it took, and whether the grid works afterwards."""
    mesh = grid((2, 2))
    if mesh.get_coordinate() is None:
        return None
    began = time.monotonic()
    message = ""
    try:
        call(group, odd if ra.hybrid(mesh).rank == odd_rank else {})
    except ValueError as error:
        message = str(error)
    took = time.monotonic() - began
    out = call(group, {"return_stats": True})[0]
    return message, took, bool((out - 1).abs().max() < 1e-6)


DISAGREEMENTS = {
    "mask": ({"mask": ra.full()}, r"^ranks disagree: mask is full\(\) \(.*\) on rank 3, but causal\(\) \(.*\) on ranks 0, 1, 2"),
    "schedule": ({"schedule": ra.ring()}, r"schedule is ring\(\) on rank 3, but None on ranks 0, 1, 2"),
    "axes": ({"swapped": True}, "^ranks disagree: mesh is .*, but .*: pass the same on every rank"),
}


@pytest.mark.parametrize(("odd", "message"), DISAGREEMENTS.values(), ids=DISAGREEMENTS)
def test_every_rank_names_the_odd_one(gloo, odd, message):
    for text, took, works in gloo.run(8, disagree, 3, odd, timeout=30)[:4]:
        with pytest.raises(ValueError, match=message):
            raise ValueError(text)
        assert took < 20
        assert works


def test_each_rank_may_choose_to_return_statistics(gloo):
    for text, _, works in gloo.run(8, disagree, 3, {"return_stats": True}, timeout=30)[:4]:
        assert text == ""
        assert works


REFUSALS = {
    "heads": ({"h": 5}, "q has 5 heads, which the 2 ranks of the heads axis do not divide"),
    "layout": ({"layout": ra.zigzag(24, 2)}, r"layout zigzag\(seq_len=24, world_size=2\) is for 2 ranks, but the group has 4"),
    "length": ({"layout": ra.zigzag(27, 4)}, r"q has 6 tokens, but rank 2 of layout zigzag\(.*\) holds 8"),
}


@pytest.mark.parametrize(("odd", "message"), REFUSALS.values(), ids=REFUSALS)
def test_bad_input_of_one_rank_stops_all(gloo, odd, message):
    for rank, (text, took, works) in enumerate(gloo.run(8, disagree, 2, odd, timeout=30)[:4]):
        with pytest.raises(ValueError, match=f"^{message}" if rank == 2 else f"^rank 2 refused the input: rank 2: {message}"):
            raise ValueError(text)
        assert took < 20
        assert works


def bad_meshes(group):
    """The errors for meshes that do not make a grid."""
    mesh = grid((2, 4), ("data", "ring"))
    unordered = DeviceMesh("cpu", [[0, 3], [2, 1], [4, 5], [6, 7]], mesh_dim_names=("ring", "heads"))
    unnamed = DeviceMesh("cpu", [[0, 1, 2, 3], [4, 5, 6, 7]])
    calls = {
        "a number": lambda: ra.hybrid(4),  # type: ignore[arg-type]
        "no such axis": lambda: ra.hybrid(mesh),
        "no such number": lambda: ra.hybrid(unnamed, 0, 2),
        "no names": lambda: ra.hybrid(unnamed),
        "one axis": lambda: ra.hybrid(mesh, "ring", "ring"),
        "unordered": lambda: ra.hybrid(unordered),
    }
    messages = {}
    for name, make in calls.items():
        with pytest.raises(ValueError) as caught:
            make()
        messages[name] = str(caught.value)
    return messages


def test_bad_meshes(gloo):
    for messages in gloo.run(8, bad_meshes):
        assert messages["a number"] == "mesh is a int, but must be a DeviceMesh: make one with init_device_mesh"
        assert messages["no such axis"].startswith("heads is 'heads', but the mesh has the axes ('data', 'ring'): give")
        assert messages["no such number"].startswith("heads is 2, but the mesh has 2 axes without names: give")
        assert messages["no names"].startswith("ring is 'ring', but the mesh has 2 axes without names")
        assert messages["one axis"].startswith("ring and heads are both axis 'ring' of the mesh")
        assert "[[0, 3], [2, 1], [4, 5], [6, 7]], which do not ascend along both axes" in messages["unordered"]


def outsider(group):
    """The error of a rank outside of the mesh."""
    mesh = grid((2, 2))
    if mesh.get_coordinate() is None:
        with pytest.raises(ValueError) as caught:
            ra.hybrid(mesh)
        return str(caught.value)


def test_a_rank_outside_the_mesh(gloo):
    assert gloo.run(8, outsider) == [None] * 4 + ["mesh is a DeviceMesh that does not hold this rank"] * 4


def come_and_go(group):
    """How many grids stay after their groups are destroyed; a new mesh of the same ranks must work."""
    gc.collect()  # what earlier tests have left
    before = [*groups._hybrids]  # held, so that none of them goes meanwhile
    for _ in range(3):
        mesh = DeviceMesh("cpu", [[0, 1, 2, 3], [4, 5, 6, 7]], mesh_dim_names=("ring", "heads"))
        kept = weakref.ref(ra.hybrid(mesh))
        q = torch.ones(1, 3, 4, 2, requires_grad=True)
        ra.ring_attention(q, q, q, group=mesh).sum().backward()
        for made in mesh.get_all_groups():
            dist.destroy_process_group(made)
        del mesh, made
        gc.collect()
        assert kept() is None
    return len(groups._hybrids) - len(before)


@pytest.mark.thorough
def test_grids_are_freed_with_their_groups(gloo):
    assert gloo.run(8, come_and_go) == [0] * 8
