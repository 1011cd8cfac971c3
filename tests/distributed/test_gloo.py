"""Ring attention over process groups of gloo: every rank's output, statistics and gradients against the dense reference, in fp64."""

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringattn as ra
from ringattn.runtime import groups
from tests.distributed import dense
from tests.distributed.dense import MASKS, difference, inputs

LENGTHS = (1, 2, 17, 97, 127, 129, 131)
LAYOUTS = dense.LAYOUTS | {"lopsided": lambda n, world_size: lopsided(n, world_size)}
SCHEDULES = {"ring": ra.ring(), "gather": ra.gather(), "default": None}
WAVES = {"waves-1": ra.waves(1), "waves-2": ra.waves(2), "waves-5": ra.waves(5)}
DOUBLE_RINGS = {f"double-ring-{n}": ra.double_ring(n) for n in (1, 2, 3, 4)}


ALL_SCHEDULES = SCHEDULES | WAVES | DOUBLE_RINGS


def lopsided(n, world_size):
    """Rank 0 holds the end, the last rank every other token of the beginning, a middle rank the tokens between; some ranks hold nothing."""
    if world_size == 1:
        return ra.Layout(n, ((ra.Span(n // 2, n - n // 2), ra.Span(0, n // 2)),), "lopsided")
    half, quarter = n // 2, n // 4
    spans = [() for _ in range(world_size)]
    spans[0] = (ra.Span(half, n - half),)
    spans[-1] = (ra.Span(0, (half + 1) // 2, 2),)
    spans[world_size // 2] += (ra.Span(1, half // 2, 2),)
    if quarter and world_size > 5:
        spans[0] = (ra.Span(half + quarter, n - half - quarter),)
        spans[1] = (ra.Span(half, quarter),)
    return ra.Layout(n, tuple(spans), "lopsided")


def check(group, n, mask, layout, schedule, seed, change=None):
    """`dense.check`, with gradients through out only."""
    q, k, v, dout, _ = inputs(n, seed, batch=1 + seed % 2)
    held_by_last = torch.zeros(n, dtype=torch.bool)
    held_by_last[layout.positions(layout.world_size - 1)] = True
    if change == "dout on the last rank only":
        dout[:, ~held_by_last] = 0
    if change == "v on the last rank only":
        v[:, ~held_by_last] = 0
    return dense.check(group, dist.get_rank(group), mask, layout, schedule, q, k, v, dout)


def check_many(group, cases):
    """`check` each (mask, layout, schedule, n), given by names; returns the worst few."""
    world_size = dist.get_world_size(group)
    found = []
    for seed, (mask, layout, schedule, n) in enumerate(cases):
        args = n, MASKS[mask](n), LAYOUTS[layout](n, world_size), ALL_SCHEDULES[schedule]
        found.append((check(group, *args, seed), (mask, layout, schedule, n)))
    return sorted(found, reverse=True)[:4]


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.some(2)
def test_every_rank_agrees_with_the_reference(gloo, world_size):
    """Cases, schedules and lengths shift with the number of ranks: all tests together try each mask with each layout, and on each number of
    ranks each mask, layout and schedule. `tests/test_attention.py` tries their combinations, over threads."""
    names = tuple(SCHEDULES)
    cases = [
        (mask, layout, names[(i + world_size) % 3], LENGTHS[(3 * i + 2 * world_size) % 7])
        for i, (mask, layout) in enumerate(product(MASKS, LAYOUTS))
    ]
    for worst in gloo.run(world_size, check_many, cases[world_size % 4 :: 4]):
        assert worst[0][0] < 1e-10, worst


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (3, [("documents", "balanced", "gather", 1025), ("window", "striped", "ring", 1031)]),
        (8, [("causal", "zigzag", "ring", 1025)]),
    ],
)
@pytest.mark.thorough
def test_a_thousand_tokens(gloo, world_size, cases):
    for worst in gloo.run(world_size, check_many, cases):
        assert worst[0][0] < 1e-10, worst


def some(schedule, shift):
    """Each mask with a layout or two, and each layout, at changing lengths."""
    cases = [(mask, layout, schedule, LENGTHS[i % 7]) for i, (mask, layout) in enumerate(product(MASKS, LAYOUTS))]
    return cases[shift % 4 :: 4]


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (2, 3), (2, 4), (3, 2)], ids=lambda n: str(n))
@pytest.mark.some(1)
def test_double_rings(gloo, nodes, ranks_per_node):
    for worst in gloo.run(nodes * ranks_per_node, check_many, some(f"double-ring-{ranks_per_node}", nodes + ranks_per_node)):
        assert worst[0][0] < 1e-10, worst


@pytest.mark.parametrize(("schedule", "shift"), [(name, i) for i, name in enumerate(WAVES)])
@pytest.mark.some(1)
def test_waves(gloo, schedule, shift):
    for worst in gloo.run(6, check_many, some(schedule, shift)):
        assert worst[0][0] < 1e-10, worst


@pytest.mark.parametrize("change", ["dout on the last rank only", "v on the last rank only"])
@pytest.mark.parametrize("schedule", [ra.ring(), ra.gather()], ids=repr)
def test_one_rank_matters(gloo, change, schedule):
    for worst in gloo.run(5, check, 97, ra.causal(), ra.zigzag(97, 5), schedule, 3, change):
        assert worst < 1e-10


def test_group_ranks_are_not_global_ranks(gloo):
    cases = [("causal", "zigzag", "ring", 97), ("window", "contiguous", "gather", 17), ("full", "striped", "ring", 1)]
    for worst in gloo.run(3, check_many, cases, ranks=(2, 5, 7)):
        assert worst[0][0] < 1e-10, worst


def two_groups(group):
    """Even and odd ranks run separate rings at the same time, with different lengths; then all ranks run one ring."""
    groups = [dist.new_group([0, 2, 4, 6]), dist.new_group([1, 3, 5, 7])]
    parity = dist.get_rank() % 2
    cases = [("causal", "zigzag", "ring", 61 + 30 * parity), ("bigbird", "striped", "gather", 97 - 40 * parity)] * (2 + parity)
    worst = check_many(groups[parity], cases) + check_many(None, [("causal", "zigzag", "ring", 64)])
    for made in groups:
        if dist.get_rank(made) >= 0:
            dist.destroy_process_group(made)
    return worst


def test_two_groups_at_once_and_the_default_group(gloo):
    for worst in gloo.run(8, two_groups):
        assert max(worst)[0] < 1e-10, worst


def meshes(group):
    """The differences for a 1-D mesh and for both axes of a 2-D one, and the error for the 2-D mesh."""
    line = init_device_mesh("cpu", (8,))
    plane = init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "ring"))
    found = []
    for mesh, world_size in ((line, 8), (plane["ring"], 4), (plane["data"], 2)):
        layout = ra.zigzag(33, world_size)
        rank = mesh.get_local_rank()
        q, k, v, *_ = inputs(33, 5)
        out = ra.ring_attention(*(ra.shard(x, layout, rank) for x in (q, k, v)), layout=layout, group=mesh)
        found.append(difference(out, ra.shard(ra.reference.attention(q, k, v), layout, rank)))
    try:
        ra.ring_attention(q, k, v, group=plane)
    except ValueError as error:
        return found, str(error)


def test_device_meshes(gloo):
    for found, message in gloo.run(8, meshes):
        assert max(found) < 1e-10
        assert message.startswith(
            "group is a 2-D DeviceMesh with the axes ('data', 'ring'): pass one axis of it, such as mesh['ring']"
        )


def default_layouts(group, n):
    """Without a layout, the shards are those of the default layout."""
    found = []
    for make in MASKS.values():
        mask = make(n)
        layout = ra.default_layout(mask, n, dist.get_world_size(group))
        q, k, v, *_ = inputs(n, 6)
        shards = [ra.shard(x, layout, dist.get_rank(group)) for x in (q, k, v)]
        out = ra.ring_attention(*shards, mask=mask, group=group)
        found.append(difference(out, ra.shard(ra.reference.attention(q, k, v, mask=mask), layout, dist.get_rank(group))))
    return max(found)


def test_the_default_layout_comes_from_the_shards(gloo):
    assert max(gloo.run(5, default_layouts, 101)) < 1e-10


def gradients_of_lse(group, n):
    """Gradients through the statistics alone, and through statistics and output."""
    rank, layout = dist.get_rank(group), ra.zigzag(n, dist.get_world_size(group))
    q, k, v, dout, _ = inputs(n, 7)
    weight = torch.linspace(-1, 1, n, dtype=torch.float64)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    leaves = [ra.shard(x, layout, rank).requires_grad_() for x in (q, k, v)]
    ref, ref_stats = ra.reference.attention(*whole, return_stats=True)
    out, stats = ra.ring_attention(*leaves, layout=layout, group=group, return_stats=True)
    found = []
    for with_out in (0, 1):
        wanted = torch.autograd.grad((ref_stats.lse * weight).sum() + with_out * (ref * dout).sum(), whole, retain_graph=True)
        mine = ra.shard(weight, layout, rank, dim=0), ra.shard(dout, layout, rank)
        got = torch.autograd.grad((stats.lse * mine[0]).sum() + with_out * (out * mine[1]).sum(), leaves, retain_graph=True)
        found += [difference(x, ra.shard(y, layout, rank)) for x, y in zip(got, wanted, strict=True)]
    return max(found)


def test_gradients_of_the_statistics(gloo):
    assert max(gloo.run(3, gradients_of_lse, 41)) < 1e-10


def some_leaves(group, n):
    """Gradients if only one of q, k, v needs one, and if none does."""
    rank, layout = dist.get_rank(group), ra.contiguous(n, dist.get_world_size(group))
    *whole, dout, _ = inputs(n, 8)
    found = []
    for wanting in range(3):
        full = [x.clone().requires_grad_(i == wanting) for i, x in enumerate(whole)]
        leaves = [ra.shard(x, layout, rank).requires_grad_(i == wanting) for i, x in enumerate(whole)]
        out = ra.ring_attention(*leaves, layout=layout, group=group)
        (got,) = torch.autograd.grad(out, leaves[wanting], ra.shard(dout, layout, rank))
        (wanted,) = torch.autograd.grad(ra.reference.attention(*full), full[wanting], dout)
        found.append(difference(got, ra.shard(wanted, layout, rank)))
    with torch.no_grad():
        assert not ra.ring_attention(*leaves, layout=layout, group=group).requires_grad
    return max(found)


def test_gradients_of_some_inputs(gloo):
    assert max(gloo.run(4, some_leaves, 30)) < 1e-10


def slow_rank(group, n):
    """One rank is late in each of three layers; one backward pass runs through all layers."""
    rank, layout = dist.get_rank(group), ra.zigzag(n, dist.get_world_size(group))
    q, *_ = inputs(n, 9)
    whole = q[..., :3].clone().requires_grad_()
    leaf = ra.shard(whole.detach(), layout, rank).requires_grad_()
    x, y = leaf, whole
    for _ in range(3):
        if rank == 1:
            time.sleep(0.05)
        x = ra.ring_attention(x, x, x, layout=layout, group=group, schedule=ra.ring())
        y = ra.reference.attention(y, y, y)
    (got,), (wanted,) = torch.autograd.grad(x.square().sum(), leaf), torch.autograd.grad(y.square().sum(), whole)
    return max(difference(x, ra.shard(y, layout, rank)), difference(got, ra.shard(wanted, layout, rank)))


def test_layers_and_a_slow_rank(gloo):
    assert max(gloo.run(4, slow_rank, 50)) < 1e-10


def round_trips(group, n):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    for make in LAYOUTS.values():
        layout = make(n, world_size)
        for dim in (0, 1, -1):
            shape = [2, 3, 4]
            shape[dim] = n
            dense.check_unshard(group, rank, layout, shape, dim)


@pytest.mark.parametrize("world_size", [1, 2, 5, 7])
@pytest.mark.some(2)
def test_unshard(gloo, world_size):
    for n in (0, 1, 23):
        gloo.run(world_size, round_trips, n)


def half_precision(group, n, dtype):
    *whole, _ = inputs(n, 10, dtype=dtype)
    return dense.errors_in_16_bits(group, dist.get_rank(group), ra.zigzag(n, dist.get_world_size(group)), *whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(gloo, dtype):
    for rows in gloo.run(4, half_precision, 257, dtype):
        for factor, (error, same_dtype) in zip((2, 3, 3, 3), rows, strict=True):
            assert error <= factor * same_dtype


def many_lengths(group, calls):
    """How many facts, plans and layouts are kept after calls with many lengths."""
    world_size = dist.get_world_size(group)
    for n in range(calls):
        q = torch.ones(1, len(range(dist.get_rank(group), n, world_size)), 1, 2)
        ra.ring_attention(q, q, q, layout=ra.striped(n, world_size), group=group)
    kept = groups.get_context(group)
    return len(kept._facts), len(kept._attentions), len(kept._layouts)


@pytest.mark.thorough
def test_plans_kept_are_bounded(gloo):
    for facts, routes, layouts in gloo.run(2, many_lengths, 150):
        assert 0 < facts <= 64
        assert 0 < routes <= 64
        assert layouts <= 64


def come_and_go(group):
    """How many contexts stay after groups were made, used and destroyed, on all 8 ranks; later groups get the names of earlier ones."""
    gc.collect()  # what earlier tests have left
    before = [*groups._contexts]  # held, so that none of them goes meanwhile
    for members in [(0, 1, 2), (1, 2, 3), (0, 1, 2), (0, 4)] * 2:
        made = dist.new_group(members)
        if dist.get_rank() in members:
            q = torch.ones(1, 3, 1, 2, requires_grad=True)
            ra.ring_attention(q, q, q, group=made).sum().backward()
            kept = weakref.ref(groups.get_context(made))
            dist.destroy_process_group(made)
            del made
            gc.collect()
            assert kept() is None
    return len(groups._contexts) - len(before)


def threads_at_once(group):
    """The first call with each of four groups, in a separate thread each."""
    groups = [dist.new_group(range(4)) for _ in range(4)]
    q = torch.ones(1, 2, 1, 2)
    if dist.get_rank() < 4:
        with ThreadPoolExecutor(len(groups)) as threads:
            return [float(out.sum()) for out in threads.map(lambda made: ra.ring_attention(q, q, q, group=made), groups)]
    return [4.0] * 4


def test_groups_connect_from_threads_at_once(gloo):
    assert gloo.run(8, threads_at_once, timeout=30) == [[4.0] * 4] * 8


def test_contexts_are_freed_with_their_groups(gloo):
    assert gloo.run(8, come_and_go) == [0] * 8
