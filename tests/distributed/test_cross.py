"""Queries and keys of their own layouts over gloo: every rank against dense attention in fp64, what moves, errors."""

import functools
import re

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

import ringattn as ra
from ringattn.device import local
from ringattn.runtime.groups import get_context
from ringattn.schedule.schedules import RowTraffic, cross_schedule
from ringattn.transport import run_ranks
from tests.distributed.dense import difference, from_first
from tests.transport.simulated import SimulatedTransport, World
from tests.transport.test_staged import policy

WORLDS = (1, 2, 3, 5)
LENGTHS = (0, 1, 2, 3, 5, 7, 16, 31, 61)
SCHEDULES = {
    "default": lambda n: None,
    "ring": lambda n: ra.ring(),
    "gather": lambda n: ra.gather(),
    "waves": lambda n: ra.waves(1),
    "memory": lambda n: ra.waves(memory=1 << 20),
    "double ring": ra.double_ring,
    "pass_q": lambda n: ra.pass_q(),
    "pass_q over a ring": lambda n: ra.pass_q(ra.ring()),
    "pass_q over waves": lambda n: ra.pass_q(ra.waves(1)),
    "pass_q over a double ring": lambda n: ra.pass_q(ra.double_ring(n)),
}
SCORES = {
    "none": lambda h: None,
    "softcap": lambda h: ra.score(softcap=1.5),
    "alibi": lambda h: ra.score(alibi=leaf(ra.alibi_slopes(h))),
    "bias": lambda h: ra.score(bias=ra.relative_bias(leaf(torch.linspace(-1, 1, 3 * h).view(h, 3)), ra.buckets([-4, 1]))),
    "sinks": lambda h: ra.score(sinks=leaf(torch.linspace(-2, 2, h))),
    "dropout": lambda h: ra.score(dropout=0.3, seed=7),
}


def leaf(x):
    return x.double().requires_grad_()


@st.composite
def layouts(draw, n, world_size):
    kind = draw(st.sampled_from(["contiguous", "zigzag", "striped", "custom"]))
    if kind != "custom":
        return getattr(ra, kind)(n, world_size)
    edges = [0, *sorted(draw(st.lists(st.integers(0, n), max_size=4))), n]
    spans = [[] for _ in range(world_size)]
    for a, b in zip(edges, edges[1:]):
        spans[draw(st.integers(0, world_size - 1))].append(ra.Span(a, b - a))
    return ra.Layout(n, tuple(tuple(draw(st.permutations(own))) for own in spans))


def split(draw, n, parts):
    edges = [0, *sorted(draw(st.lists(st.integers(0, n), min_size=parts - 1, max_size=parts - 1))), n]
    return [b - a for a, b in zip(edges, edges[1:])]


@st.composite
def cases(draw, world_size):
    nq, nk = draw(st.sampled_from(LENGTHS)), draw(st.sampled_from(LENGTHS))
    offset = draw(st.sampled_from([0, max(0, nk - nq), 3]))
    kind = draw(
        st.sampled_from(["causal", "full", "window", "both", "dilated", "prefix", "global", "documents", "cross documents"])
    )
    length = max(offset + nq, nk)
    small = draw(st.integers(0, 9))
    if kind == "cross documents":
        offset, parts = 0, draw(st.integers(1, 4))
        lengths = dict(lengths=split(draw, nq, parts), kv_lengths=split(draw, nk, parts))
        mask = ra.documents(**lengths, causal=draw(st.booleans()), window=draw(st.sampled_from([None, small])))
    else:
        mask = {
            "causal": ra.causal(),
            "full": ra.full(),
            "window": ra.sliding_window(small),
            "both": ra.sliding_window(small, 2),
            "dilated": ra.dilated_window((small, 1), 2),
            "prefix": ra.prefix(min(small, length)),
            "global": ra.global_tokens(min(2, length)) & ra.causal() | ra.sliding_window(small),
            "documents": ra.documents(lengths=[length // 3, length // 5]),
        }[kind]
    names = draw(st.sampled_from(sorted(SCHEDULES))), draw(st.sampled_from(sorted(SCORES)))
    heads = draw(st.sampled_from([(2, 1), (4, 2), (2, 2)]))
    return mask, draw(layouts(nq, world_size)), draw(layouts(nk, world_size)), offset, *names, heads, draw(st.integers(0, 99))


def errors(group, mask, layout, kv_layout, offset, schedule, score, heads, seed):
    """The greatest difference of this rank's out, lse, dq, dk and dv from dense attention, and of all ranks' gradients of a score."""
    rank = dist.get_rank(group)
    draw = torch.Generator().manual_seed(seed)
    b, (h, hk) = 1 + seed % 2, heads
    sizes = (layout.seq_len, h, 5), (kv_layout.seq_len, hk, 5), (kv_layout.seq_len, hk, 3), (layout.seq_len, h, 3)
    q, k, v, dout = (torch.randn(b, *size, generator=draw, dtype=torch.float64) for size in sizes)
    lse_weight = torch.randn(b, h, layout.seq_len, generator=draw, dtype=torch.float64)
    results = []
    for sharded in (False, True):
        what = SCORES[score](h)
        of = [(x, one) for x, one in zip((q, k, v, dout), (layout, kv_layout, kv_layout, layout))]
        *leaves, weight = (ra.shard(x, one, rank) if sharded else x.clone() for x, one in of)
        leaves = [x.requires_grad_() for x in leaves]
        if sharded:
            options = dict(
                layout=layout, kv_layout=kv_layout, group=group, schedule=SCHEDULES[schedule](dist.get_world_size(group))
            )
            out, stats = ra.ring_attention(*leaves, mask=mask, q_offset=offset, score=what, return_stats=True, **options)
        else:
            out, stats = ra.reference.attention(*leaves, mask=mask, q_offset=offset, score=what, return_stats=True)
        of_lse = ra.shard(lse_weight, layout, rank, dim=2) if sharded else lse_weight
        live = stats.row_sum > 0
        loss = (out * weight).sum() + (torch.where(live, stats.lse, 0) * of_lse).sum()
        given_ = [] if what is None else list(what.given.values())
        grads = torch.autograd.grad(loss, [*leaves, *given_], allow_unused=True)
        grads = [torch.zeros_like(x) if g is None else g for x, g in zip([*leaves, *given_], grads)]
        for g in grads[3:] if sharded else ():
            dist.all_reduce(g, group=group)
        results.append((out.detach(), stats.lse.detach(), *grads))
    (out, lse, dq, dk, dv, *others), found = results
    wanted = [ra.shard(out, layout, rank), ra.shard(lse, layout, rank, dim=2), ra.shard(dq, layout, rank)]
    wanted += [ra.shard(dk, kv_layout, rank), ra.shard(dv, kv_layout, rank), *others]
    return max(map(difference, found, wanted))


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.some(2)
def test_every_rank_agrees_with_the_reference(gloo, world_size):
    @settings(max_examples=25)
    @given(cases(world_size))
    @example((ra.causal(), ra.zigzag(13, world_size), ra.striped(61, world_size), 48, "pass_q", "none", (4, 2), 0))
    @example((ra.full(), ra.contiguous(61, world_size), ra.zigzag(5, world_size), 0, "ring", "none", (4, 2), 1))
    def check(case):
        assert max(gloo.run(world_size, errors, *case)) < 1e-10

    check()


def calls_of_one_layout(group):
    """Whether a call whose kv_layout is its layout does what the call without one does, to the bit; and whether queries may move there."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    layout = ra.zigzag(37, size)
    q, k, v = (
        ra.shard(torch.randn(1, 37, h, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(h)), layout, rank)
        for h in (4, 2, 2)
    )
    context = get_context(group)
    wanted = ra.ring_attention(q, k, v, layout=layout, group=group)
    kept = len(context._attentions)
    same = torch.equal(wanted, ra.ring_attention(q, k, v, layout=layout, kv_layout=ra.zigzag(37, size), group=group))
    return (
        same,
        len(context._attentions) == kept,
        difference(wanted, ra.ring_attention(q, k, v, layout=layout, schedule=ra.pass_q(), group=group)),
    )


def test_one_layout_for_both_computes_as_without_one(gloo):
    for same, kept, off in gloo.run(3, calls_of_one_layout):
        assert same and kept and off < 1e-12


def on_grids(group):
    found = []
    for ring, heads in ((2, 4), (4, 2)):
        mesh = init_device_mesh("cpu", (ring, heads), mesh_dim_names=("ring", "heads"))
        layout, kv_layout = ra.zigzag(29, 8), ra.striped(53, 8)
        for schedule in (None, ra.pass_q(), ra.ring()):
            q, k, v = (
                torch.randn(1, n, h, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
                for n, h in ((29, 4), (53, 2), (53, 2))
            )
            whole = [x.requires_grad_() for x in (q, k, v)]
            wanted = ra.reference.attention(*whole, q_offset=24)
            rank = dist.get_rank()
            shards = [ra.shard(x.detach(), one, rank).requires_grad_() for x, one in zip(whole, (layout, kv_layout, kv_layout))]
            out = ra.ring_attention(*shards, layout=layout, kv_layout=kv_layout, q_offset=24, schedule=schedule, group=mesh)
            grads, wanted_grads = torch.autograd.grad(out.sum(), shards), torch.autograd.grad(wanted.sum(), whole)
            found.append(difference(out, ra.shard(wanted, layout, rank)))
            found += [
                difference(x, ra.shard(y, one, rank)) for x, y, one in zip(grads, wanted_grads, (layout, kv_layout, kv_layout))
            ]
    return max(found)


@pytest.mark.thorough
def test_grids(gloo):
    assert max(gloo.run(8, on_grids)) < 1e-10


def message_of(function):
    with pytest.raises(ValueError) as caught:
        function()
    return str(caught.value)


ODD = {
    "kv_layout": (dict(kv_layout=ra.contiguous(10, 3)), r"kv_layout is contiguous.* on rank 1, but striped.* on ranks 0, 2"),
    "no kv_layout": (dict(kv_layout=None, q_offset=0), r"q has 2 tokens and k has 3: a rank's q, k and v must hold the same"),
    "the offset": (dict(q_offset=5), r"q_offset is 5 on rank 1, but 4 on ranks 0, 2"),
    "another number of ranks": (
        dict(kv_layout=ra.zigzag(10, 2)),
        r"kv_layout zigzag\(seq_len=10, world_size=2\) is for 2 ranks, but the group has 3",
    ),
    "another length": (
        dict(kv_layout=ra.striped(13, 3)),
        r"k has 3 tokens, but rank 1 of kv_layout striped\(seq_len=13, world_size=3\) holds 4",
    ),
    "another length of q": (
        dict(layout=ra.zigzag(9, 3)),
        r"q has 2 tokens, but rank 1 of layout zigzag\(seq_len=9, world_size=3\) holds 3",
    ),
    "no layout": (dict(layout=None), r"kv_layout is given, but layout is None"),
    "a type": (dict(kv_layout="striped"), r"kv_layout is 'striped', but must be a Layout"),
    "a negative offset": (dict(q_offset=-1), r"q_offset is -1, but must be at least 0"),
    "an offset alone": (dict(kv_layout=None), r"q_offset is 4, but without kv_layout"),
    "a far offset": (dict(q_offset=2_999_999_999), r"q_offset is 2999999999 and q has 6 tokens"),
    "a mask": (dict(mask=ra.documents(lengths=[6, 5])), r"needs at least 11 tokens and is longer than the sequence of 10"),
    "heads": (dict(heads=3), r"k has 3 heads, which does not divide q's 4"),
    "dtype": (dict(dtype=torch.float32), r"k has dtype torch.float32 and q has torch.float64"),
}


def refused(group, name):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    options = dict(
        layout=ra.zigzag(6, size), kv_layout=ra.striped(10, size), q_offset=4, heads=2, dtype=torch.float64, mask=ra.causal()
    )
    options |= ODD[name][0] if rank == 1 else {}
    heads, dtype = options.pop("heads"), options.pop("dtype")
    q = torch.zeros(1, ra.zigzag(6, size).lengths[rank], 4, 4, dtype=torch.float64)
    k = torch.zeros(1, ra.striped(10, size).lengths[rank], heads, 4, dtype=dtype)
    return message_of(lambda: ra.ring_attention(q, k, k, group=group, **options))


@pytest.mark.parametrize("name", ODD)
def test_errors_are_raised_on_every_rank(gloo, name):
    for message in gloo.run(3, refused, name):
        assert re.search(ODD[name][1], message), message


def test_the_default_moves_what_is_fewer_bytes():
    """Counted by hand: 8 ranks, everything live, 32 heads of queries and 8 of keys, of 128, in 16 bits."""
    traffic = RowTraffic.of(32, 8, 128, 128, 2, backward=False)
    assert traffic == (8 * 256 * 2, 32 * (128 * 2 + 130 * 4))
    both = RowTraffic.of(32, 8, 128, 128, 2, backward=True)
    assert both == (traffic.kv + 8 * 256 * (2 + 4), traffic.q + 32 * (256 * 2 + 3 * 4 + 128 * 4))
    keys, chosen = ra.contiguous(64_000, 8), []
    for tokens in (800, 8_000, 10_400, 10_800, 64_000):
        plan = ra.make_plan(ra.contiguous(tokens, 8), ra.full(), keys)
        schedule = cross_schedule(plan, traffic)
        chosen.append(repr(schedule))
        moved = {"ring()": 7 * 64_000 * traffic.kv, "pass_q(ring())": 7 * tokens * traffic.q}
        assert traffic.moved(schedule, plan) == min(moved.values())
    assert chosen == ["pass_q(ring())"] * 3 + ["ring()"] * 2


def test_work_of_a_chunk_is_even():
    """The last 1000 of 9000 tokens, zigzag over 4 ranks: live pairs of each rank's queries."""
    plan = ra.make_plan(ra.zigzag(1000, 4), ra.causal(), ra.striped(9000, 4), 8000)
    work = plan.pairs().sum(axis=1)
    assert work.sum() == sum(range(8001, 9001)) and work.max() / work.mean() == 1
    # and so is that of each rank's keys, for queries that move
    owned = plan.transposed.pairs().sum(axis=1)
    assert (owned == plan.pairs().sum(axis=0)).all() and owned.max() / owned.mean() < 1.001


def test_nothing_but_what_is_seen_moves():
    """Queries at 90..99 with a window of 5 need nothing of the first three quarters of the keys, and only one rank's queries move."""
    plan = ra.make_plan(ra.contiguous(10, 4), ra.sliding_window(5), ra.contiguous(100, 4), 90)
    assert plan.needed[:, :3].sum() == 0
    assert {(t.src, t.dst) for t in ra.pass_q().transfers(plan)} == {(0, 3), (1, 3), (2, 3)}


def test_documents_of_queries_and_keys():
    """The last query of each document has the place of its last key; a document without keys or queries sees nothing."""
    mask = ra.documents(lengths=[2, 0, 3, 1], kv_lengths=[4, 2, 2, 0])
    wanted = [
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert mask.dense(8)[:6].int().tolist() == wanted
    assert mask.min_length == 8 and "4 documents, 6 queries, 8 keys" in repr(mask)
    everything = ra.documents(lengths=[2, 3], kv_lengths=[3, 1], causal=False).dense(5)
    assert everything[:, :4].int().tolist() == [[1, 1, 1, 0]] * 2 + [[0, 0, 0, 1]] * 3
    with pytest.raises(ValueError, match="kv_lengths has 1 documents and lengths has 2"):
        ra.documents(lengths=[1, 2], kv_lengths=[3])


SOME = "ring", "pass_q", "pass_q over a ring"


def of_some_schedules(group, rank):
    """Outputs and gradients of one call with some schedules, twice."""
    layout, kv_layout = ra.zigzag(13, 3), ra.striped(37, 3)
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, n, h, 4, generator=draw) for n, h in ((13, 4), (37, 2), (37, 2))]
    found = []
    for schedule in 2 * SOME:
        leaves = [ra.shard(x, one, rank).requires_grad_() for x, one in zip(whole, (layout, kv_layout, kv_layout))]
        options = dict(layout=layout, kv_layout=kv_layout, q_offset=24, schedule=SCHEDULES[schedule](3))
        with torch.enable_grad():
            out = ra.ring_attention(*leaves, group=group, **options)
            found.append((out.detach(), *torch.autograd.grad(out.square().sum(), leaves)))
    return found


@pytest.mark.thorough
def test_every_transport_gives_the_same_bits(gloo, one_thread):
    """Threads, processes, and simulated copy engines in a random order."""
    world = World(3, 4096, policy(0))
    ranks = zip(
        run_ranks(3, lambda t: of_some_schedules(t, t.rank)),
        run_ranks(3, lambda t: of_some_schedules(SimulatedTransport(t, world, on_host=True), t.rank)),
        gloo.run(3, of_member),
        strict=True,
    )
    for wanted, *others in ranks:
        for found in (wanted[len(SOME) :], *others):
            for x, y in zip(wanted, found):
                assert all(map(torch.equal, x, y))


def of_member(group):
    return of_some_schedules(group, dist.get_rank(group))


def in_16_bits(group):
    """Root mean square errors of out, dq, dk, dv in bf16, with queries that move, over those of dense attention in bf16."""
    layout, kv_layout = ra.zigzag(120, group.size), ra.striped(300, group.size)
    draw = torch.Generator().manual_seed(0)
    exact = [torch.randn(1, n, h, 16, generator=draw, dtype=torch.float64) for n, h in ((120, 4), (300, 2), (300, 2), (120, 4))]
    rounded = [x.bfloat16() for x in exact]
    results = []
    for tensors in (rounded, [x.double() for x in rounded]):
        *leaves, dout = (x.clone() for x in tensors)
        leaves = [x.requires_grad_() for x in leaves]
        out = ra.reference.attention(*leaves, q_offset=180)
        results.append(
            [
                ra.shard(x.detach(), one, group.rank)
                for x, one in zip((out, *torch.autograd.grad(out, leaves, dout)), (layout, layout, kv_layout, kv_layout))
            ]
        )
    *leaves, dout = (ra.shard(x, one, group.rank) for x, one in zip(rounded, (layout, kv_layout, kv_layout, layout)))
    leaves = [x.requires_grad_() for x in leaves]
    with torch.enable_grad():
        out = ra.ring_attention(*leaves, layout=layout, kv_layout=kv_layout, q_offset=180, schedule=ra.pass_q(), group=group)
        found = (out.detach(), *torch.autograd.grad(out, leaves, dout))
    assert all(x.dtype == torch.bfloat16 for x in found)
    return [
        float((x.double() - z).square().mean().sqrt() / (y.double() - z).square().mean().sqrt()) for x, y, z in zip(found, *results)
    ]


def test_errors_in_16_bits(one_thread):
    for out, *gradients in run_ranks(4, in_16_bits):
        assert out < 2 and max(gradients) < 3


def test_the_deltas_of_a_gpu_without_queries_are_of_the_dtype_that_others_send():
    with FakeTensorMode():
        q, out, dout = (torch.empty(1, 0, 2, 8, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        row_max, row_sum = (torch.empty(1, 2, 0, device="cuda") for _ in range(2))
        assert local.queries(q, out, dout, row_max, row_sum).delta.dtype == torch.float32


GPU_CASES = {
    "few queries": (ra.full(), 77, 3000, 0),
    "few keys": (ra.full(), 3000, 77, 0),
    "a chunk": (ra.causal(), 512, 3000, 2488),
    "a window": (ra.sliding_window(700, 33), 900, 2100, 1200),
    "documents": (ra.documents(lengths=[900, 300], kv_lengths=[40, 1500], causal=False), 1200, 1540, 0),
}


def on_gpus(group):
    """What is off by more than the numerics contract allows: bf16 against fp64, beside dense attention in bf16."""
    rank, size, broken = dist.get_rank(group), dist.get_world_size(group), []
    for name, (mask, nq, nk, offset) in GPU_CASES.items():
        generator = torch.Generator("cuda").manual_seed(nq)
        sizes = (1, nq, 8, 128), (1, nk, 2, 128), (1, nk, 2, 128), (1, nq, 8, 128)
        whole = [torch.randn(size, generator=generator, device="cuda").bfloat16() for size in sizes]
        layout, kv_layout = ra.zigzag(nq, size), ra.contiguous(nk, size)
        for score in (None, ra.score(softcap=5.0), ra.score(dropout=0.2, seed=3)):

            def both(leaves, dout, call):
                leaves = [x.requires_grad_() for x in leaves]
                out = call(*leaves, mask=mask, q_offset=offset, score=score)  # noqa: B023
                return [x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, dout))]

            reference = ra.reference.attention
            exact = from_first(group, both, [x.double() for x in whole[:3]], whole[3].double(), reference)
            same = from_first(group, both, [x.clone() for x in whole[:3]], whole[3], reference)
            layouts = (layout, kv_layout, kv_layout, layout)
            for schedule in (None, ra.ring(), ra.gather(), ra.pass_q(), ra.pass_q(ra.ring())):
                *shards, dout = (ra.shard(x, one, rank) for x, one in zip(whole, layouts))
                options = dict(layout=layout, kv_layout=kv_layout, group=group, schedule=schedule)
                found = both(shards, dout, functools.partial(ra.ring_attention, **options))
                of = (layout, layout, kv_layout, kv_layout)
                for what, factor, x, y, z, one in zip(("out", "dq", "dk", "dv"), (2, 3, 3, 3), found, exact, same, of):
                    off, allowed = (x - ra.shard(y, one, rank)).abs().max(), factor * (z - y).abs().max()
                    if not off <= allowed:
                        broken.append(f"{name}, {score}, {schedule}, rank {rank}: {what} off by {off:.1e}, allowed {allowed:.1e}")
    return broken


@pytest.mark.gpu
def test_gpus(nccl, world_size):
    assert nccl.run(world_size, on_gpus, timeout=180) == [[]] * world_size
