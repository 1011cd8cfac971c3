"""The numerics contract on GPUs, one rank per GPU: errors against fp64, on each rank by itself, for every number of ranks.

Each rank draws the same whole sequence and computes the dense references from it, in fp64 and in the same dtype.
"""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringattn as ra
from ringattn.transport import Alone, Peer
from tests.distributed.dense import from_first

pytestmark = pytest.mark.gpu

NAMES = ("out", "dq", "dk", "dv")
FACTOR = {"out": 2, "dq": 3, "dk": 3, "dv": 3}
SCHEDULES = {"ring": ra.ring(), "gather": ra.gather(), "waves": ra.waves(2)}
LAYOUTS = {"contiguous": ra.contiguous, "zigzag": ra.zigzag, "striped": ra.striped, "balanced": None}


def masks(n):
    return {
        "causal": ra.causal(),
        "full": ra.full(),
        "window": ra.sliding_window(700, 33),
        "documents": ra.documents(lengths=[1, 0, n // 3, n // 7, n // 30, n // 4]),  # the rest is padding
        "prefix": ra.prefix(n // 5),
        "global+window": (ra.global_tokens(3) | ra.sliding_window(200, 200)) & ra.causal(),
        "dilated": ra.dilated_window((90, 20), 3),
        "bigbird": ra.bigbird(n, 64),
    }


def inputs(seq_len, heads, dtype):
    """q, k, v and dout of the whole sequence, on this rank's GPU."""
    h, hk, d, d_v = heads
    generator = torch.Generator().manual_seed(7 * seq_len + d)
    shapes = (1, seq_len, h, d), (1, seq_len, hk, d), (1, seq_len, hk, d_v), (1, seq_len, h, d_v)
    return [torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes]


def dense(q, k, v, dout, mask, dtype):
    """out, dq, dk, dv and lse of the whole sequence, computed in `dtype` and returned in fp64."""
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    out, stats = ra.reference.attention(*leaves, mask=mask, return_stats=True)
    gradients = torch.autograd.grad(out, leaves, dout.to(dtype))
    return [x.detach().double() for x in (out, *gradients, stats.lse)]


def ring(q, k, v, dout, layout, mask, group, schedule, rank):
    """(out, dq, dk, dv) and the statistics of a rank's shard."""
    leaves = [ra.shard(x, layout, rank).requires_grad_() for x in (q, k, v)]
    out, stats = ra.ring_attention(*leaves, layout=layout, mask=mask, group=group, schedule=schedule, return_stats=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, ra.shard(dout, layout, rank))], stats


def errors(group, dtype, heads, seq_len, names, layouts, grid=None):
    """The errors of this rank's shard in each case, for `judge`; `grid`: the shape (ring, heads) of a grid of all ranks."""
    rank, world_size, everyone = dist.get_rank(group), dist.get_world_size(group), group
    if grid is not None:
        group = ra.hybrid(init_device_mesh("cuda", grid, mesh_dim_names=("ring", "heads")))
        assert (group.rank, group.size) == (rank, world_size)
    q, k, v, dout = inputs(seq_len, heads, dtype)
    rows = {}
    for name in names:
        mask = masks(seq_len)[name]
        *exact, lse = from_first(everyone, dense, q, k, v, dout, mask, torch.float64)
        *same, _ = from_first(everyone, dense, q, k, v, dout, mask, dtype)
        same_dtype = [x - y for x, y in zip(same, exact, strict=True)]
        one, _ = ring(q, k, v, dout, ra.contiguous(seq_len, 1), mask, Alone(), None, 0)
        one_rank = [x - y for x, y in zip(one, exact, strict=True)]
        for layout_name in layouts:
            make = LAYOUTS[layout_name]
            layout = make(seq_len, world_size) if make else ra.balanced(mask, seq_len, world_size)
            for schedule_name, schedule in SCHEDULES.items():
                got, stats = ring(q, k, v, dout, layout, mask, group, schedule, rank)
                row = {}
                for what, x, *others in zip(NAMES, got, exact, same_dtype, one_rank, strict=True):
                    y, other, single = (ra.shard(z, layout, rank) for z in others)
                    error = x - y
                    row[what] = [error.abs().max(), other.abs().max(), (error**2).sum(), (single**2).sum()]
                    row[what] = [float(z) for z in row[what]]
                mine = ra.shard(lse, layout, rank, dim=2)
                empty = mine == float("-inf")
                off = ((stats.lse - mine) / mine.abs().clamp(min=1)).masked_fill(empty, 0)
                row["lse"] = float(off.abs().max())
                nothing = empty.transpose(1, 2)
                row["empty rows are zero"] = (
                    bool((stats.row_max[empty] == float("-inf")).all() and (stats.row_sum[empty] == 0).all())
                    and not got[0][nothing].any()
                    and not got[1][nothing].any()
                )
                rows[f"{name}-{layout_name}-{schedule_name}"] = row
    return rows


def judge(ranks):
    """What breaks the contract, as a list of texts."""
    broken = []
    for case in ranks[0]:
        for rank, rows in enumerate(ranks):
            row = rows[case]
            for what in NAMES:
                error, same_dtype, *_ = row[what]
                if not error <= FACTOR[what] * same_dtype:
                    broken.append(f"{case}, rank {rank}: {what} off by {error:.2e}, same-dtype dense by {same_dtype:.2e}")
            if not row["lse"] <= 1e-5:
                broken.append(f"{case}, rank {rank}: lse off by {row['lse']:.1e}")
            if not row["empty rows are zero"]:
                broken.append(f"{case}, rank {rank}: rows with nothing live are not zero")
        for what in NAMES:
            ring_error, single = (sum(rows[case][what][i] for rows in ranks) ** 0.5 for i in (2, 3))
            if not ring_error <= 1.25 * single:
                broken.append(f"{case}: {what} of {len(ranks)} ranks is off by {ring_error / single:.2f}x the error of one rank")
    return broken


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_layout_mask_and_schedule(nccl, world_size, dtype):
    found = nccl.run(world_size, errors, dtype, (4, 2, 128, 128), 4096, tuple(masks(4096)), tuple(LAYOUTS), timeout=200)
    assert len(found[0]) == len(masks(4096)) * len(LAYOUTS) * len(SCHEDULES)
    assert judge(found) == []


@pytest.mark.parametrize(
    ("heads", "seq_len"), [((4, 4, 64, 64), 4099), ((4, 1, 128, 128), 4099), ((2, 1, 192, 128), 4096)], ids=str
)
def test_uneven_shards_and_head_dims(nccl, world_size, heads, seq_len):
    names = ("causal", "documents")
    found = nccl.run(world_size, errors, torch.bfloat16, heads, seq_len, names, ("zigzag", "striped"), timeout=200)
    assert judge(found) == []


@pytest.mark.parametrize("heads", [(4, 2, 128, 128), (4, 1, 64, 64)], ids=["shared out", "copied"])
def test_a_grid_of_all_gpus(nccl, heads):
    """Rings of half of the GPUs, and pairs on the heads axis, with K/V heads for both ranks of a pair or with copied ones."""
    count = nccl.size
    if count % 2:
        pytest.skip("needs an even number of GPUs")
    names, grid = ("causal", "documents"), (count // 2, 2)
    found = nccl.run(count, errors, torch.bfloat16, heads, 4099, names, ("zigzag", "balanced"), grid, timeout=200)
    assert judge(found) == []


def test_sixteen_thousand_tokens(nccl, world_size):
    found = nccl.run(world_size, errors, torch.bfloat16, (2, 1, 128, 128), 16384, ("causal",), ("zigzag",), timeout=200)
    assert judge(found) == []


def repeat(group, seq_len):
    """Whether repeated runs give the same bits, and whether changed tokens leave all earlier outputs unchanged."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    q, k, v, dout = inputs(seq_len, (4, 2, 128, 128), torch.bfloat16)
    torch.use_deterministic_algorithms(True, warn_only=True)
    layout = ra.zigzag(seq_len, world_size)
    cut = seq_len // 3
    early = layout.positions(rank).to("cuda") < cut
    verdicts = {}
    for name, schedule in SCHEDULES.items():
        runs = [ring(q, k, v, dout, layout, ra.causal(), group, schedule, rank)[0] for _ in range(4)]
        verdicts[name] = all(torch.equal(x, y) for run in runs[1:] for x, y in zip(run, runs[0], strict=True))
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, cut:] = torch.randn_like(x[:, cut:])
        out = ring(*changed, dout, layout, ra.causal(), group, schedule, rank)[0][0]
        verdicts[f"{name} is causal"] = torch.equal(out[:, early], runs[0][0][:, early])
    torch.use_deterministic_algorithms(False)
    return verdicts


def test_same_bits_every_time(nccl, world_size):
    for verdicts in nccl.run(world_size, repeat, 6000):
        assert all(verdicts.values()), verdicts


def round_trip(group, seq_len):
    """Whether unshard returns the whole sequence, and its backward pass the sum of the ranks' gradients."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    x = inputs(seq_len, (2, 1, 64, 64), torch.float32)[0]
    layout = ra.zigzag(seq_len, world_size)
    leaf = ra.shard(x, layout, rank).requires_grad_()
    whole = ra.unshard(leaf, layout, group)
    (gradient,) = torch.autograd.grad(whole, leaf, (rank + 1) * x)
    total = ra.shard(x, layout, rank) * (world_size * (world_size + 1) // 2)
    return torch.equal(whole, x), torch.allclose(gradient, total, rtol=1e-6)


def test_unshard(nccl, world_size):
    assert nccl.run(world_size, round_trip, 1001) == [(True, True)] * world_size


def full_precision(group, seq_len):
    """Errors in fp32, to compare with dense fp32 without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return errors(group, torch.float32, (2, 1, 64, 64), seq_len, ("causal",), ("zigzag",))


def test_fp32(nccl, world_size):
    assert judge(nccl.run(world_size, full_precision, 2048)) == []


def refusal(group, odd):
    """This rank's error if rank `odd[0]` calls differently, and whether the group works afterwards."""
    rank = dist.get_rank(group)
    odd_rank, change = odd
    heads, device, scale = 2, "cuda", None
    if rank == odd_rank:
        heads = 1 if change == "heads" else heads
        device = "cpu" if change == "device" else device
        scale = 0.5 if change == "scale" else scale
    q = torch.randn(1, 64, heads, 64, device=device, dtype=torch.bfloat16)
    message = ""
    try:
        ra.ring_attention(q, q, q, group=group, softmax_scale=scale)
    except ValueError as error:
        message = str(error)
    q = torch.ones(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
    return message, bool((ra.ring_attention(q, q, q, group=group) == 1).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("device", r"q is on cpu, but the group's backend is nccl"),
        ("heads", r"ranks disagree: number of query heads is .*1 on rank 1"),
        ("scale", r"ranks disagree: softmax_scale is .*0\.5 on rank 1"),
    ],
)
def test_a_rank_that_differs_stops_every_rank(nccl, change, message):
    for text, works in nccl.run(2, refusal, (1, change)):
        assert re.search(message, text)
        assert works


def other_backends(group):
    """The error of a gloo group for GPU tensors, and whether a group of both backends takes tensors of both devices."""
    gloo, both = dist.new_group(backend="gloo"), dist.new_group(backend="cpu:gloo,cuda:nccl")
    q = torch.ones(1, 16, 2, 32, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError) as caught:
        ra.ring_attention(q, q, q, group=gloo)
    works = [bool((ra.ring_attention(x, x, x, group=both) - 1).abs().max() < 1e-2) for x in (q, q.cpu(), q)]
    return str(caught.value), works


def test_groups_of_other_backends(nccl):
    for message, works in nccl.run(nccl.size, other_backends):
        assert "q is on cuda, but the group's backend is gloo: tensors on cuda need a group of nccl" in message
        assert works == [True, True, True]


class Steps:
    """Forward and backward steps of a rank over NCCL, with two inputs in turn, so that stale rows give wrong results."""

    def __init__(self, group, schedule, seq_len):
        self.rank = dist.get_rank(group)
        layout = ra.zigzag(seq_len, dist.get_world_size(group))
        self.options = layout, ra.causal(), ra.process_group(group), schedule, self.rank
        q, k, v, dout = inputs(seq_len, (4, 4, 128, 128), torch.bfloat16)
        self.inputs = [(q, k, v, dout), (q, v, k, dout)]
        self.wrong = torch.zeros((), device="cuda", dtype=torch.int64)
        self.right = []
        for case in self.inputs:
            self.right.append(ring(*case, *self.options)[0])
            torch.cuda.synchronize()

    def run(self, count):
        """Run `count` steps; returns the reserved bytes afterwards."""
        for i in range(count):
            for x, y in zip(ring(*self.inputs[i % 2], *self.options)[0], self.right[i % 2], strict=True):
                self.wrong += (x != y).any()
        return torch.cuda.memory_reserved()


def host_ahead(group, schedule, seq_len):
    """Reserved bytes after 10 steps, and after 6 more that are queued before the GPU starts; whether they were; how many outputs differ."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.cuda.empty_cache()  # otherwise memory reserved by an earlier test would suffice
    steps = Steps(group, schedule, seq_len)
    before = steps.run(10)
    torch.cuda.synchronize()
    dist.barrier(group)
    # one rank's GPU starts after the other's, so that transfers wait, too
    torch.cuda._sleep(1_000_000_000 * (1 + steps.rank))
    begun = torch.cuda.Event()
    begun.record()
    after = steps.run(6)
    ahead = not begun.query()
    torch.use_deterministic_algorithms(False)
    return before, after, ahead, int(steps.wrong)


@pytest.mark.parametrize("schedule", [ra.ring(), ra.gather()], ids=["ring", "gather"])
def test_a_host_that_is_ahead_needs_no_more_memory(nccl, schedule):
    for before, after, ahead, wrong in nccl.run(2, host_ahead, schedule, 8192):
        assert ahead
        assert wrong == 0
        assert after == before


def dropped(group):
    """Whether memory is reused while a transfer uses it whose handle was dropped."""
    transport = ra.process_group(group)
    transport.connect(torch.device("cuda"))
    peer = 1 - transport.rank
    torch.cuda.empty_cache()
    source, target = (torch.zeros(1 << 20, device="cuda") for _ in range(2))
    places = {source.data_ptr(), target.data_ptr()}
    torch.cuda._sleep(200_000_000)
    transport.exchange([Peer(peer, source)], [Peer(peer, target)])
    del source, target
    again = [torch.empty(1 << 20, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    return any(x.data_ptr() in places for x in again)


def test_a_transfer_without_a_handle_keeps_its_memory(nccl):
    assert nccl.run(2, dropped) == [False, False]
