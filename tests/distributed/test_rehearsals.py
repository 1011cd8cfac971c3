"""Passes that are recorded before their first call, on GPUs: it replays them, with the bits of the process group's transport."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.runtime import passes

pytestmark = pytest.mark.gpu

HEADS = 4, 2, 2, 4


def batches(tokens, world_size):
    """New documents for each layout: whole on a rank, in pieces on several, and with rows that are scattered."""
    generator = torch.Generator().manual_seed(0)
    for make in (ra.placed, ra.balanced, lambda mask, tokens, world_size: ra.zigzag(tokens, world_size)):
        for _ in range(3):
            cuts = torch.randperm(tokens - 1, generator=generator)[:12].sort().values + 1
            mask = ra.documents(cu_seqlens=[0, *cuts.tolist(), tokens])
            yield make(mask, tokens, world_size), mask


def tensors(layout, rank, batch, generator, d, dtype):
    """q, k, v and dout of a rank's rows, as a model makes them."""
    return [torch.randn(batch, layout.lengths[rank], h, d, generator=generator, device="cuda", dtype=dtype) for h in HEADS]


def scored(part, batch, generator=None):
    """A score with tensors of its own, and those of them that are learned."""
    shapes = (batch, HEADS[0]), (HEADS[0],), (HEADS[0], 32)
    slopes, sinks, table = (torch.rand(shape, generator=generator, device="cuda") for shape in shapes)
    learned, buckets = sinks.bfloat16().requires_grad_(), ra.t5_buckets(bidirectional=False)
    learned_slopes, learned_table = (x.clone().requires_grad_() for x in (slopes, table))
    found = {
        "none": lambda: (None, []),
        "softcap": lambda: (ra.score(softcap=2.0), []),
        "alibi": lambda: (ra.score(alibi=slopes), []),
        "slopes of all batches": lambda: (ra.score(alibi=slopes[0]), []),
        "learned slopes": lambda: (ra.score(alibi=learned_slopes), [learned_slopes]),
        "bias": lambda: (ra.score(bias=ra.relative_bias(table, buckets)), []),
        "learned bias": lambda: (ra.score(bias=ra.relative_bias(learned_table, buckets)), [learned_table]),
        "sinks": lambda: (ra.score(sinks=sinks), []),
        "learned sinks": lambda: (ra.score(sinks=learned), [learned]),
        "all": lambda: (ra.score(softcap=2.0, alibi=slopes, sinks=learned), [learned]),
    }
    return found[part]()


def step(inputs, layout, mask, group, part="none", seed=0):
    """out and all gradients. seed: of the score's tensors."""
    *leaves, dout = inputs
    score, learned = scored(part, len(dout), torch.Generator("cuda").manual_seed(seed))
    leaves = [*[x.detach().requires_grad_() for x in leaves], *learned]
    out = ra.ring_attention(*leaves[:3], layout=layout, mask=mask, group=group, score=score)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def rehearsed(group, batch, part="none", d=64, dtype=torch.float16):
    """Where bits differ (dq: where it is far), and which calls of this rank ran a pass, of those that it prepared and of the others."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    copies, reference = ra.symmetric(group), ra.process_group(group)
    generator = torch.Generator("cuda").manual_seed(rank)
    wrong, ran = [], {True: 0, False: 0}
    connected = ra.zigzag(256 * world_size, world_size)
    step(tensors(connected, rank, batch, generator, d, dtype), connected, ra.causal(), copies)
    for number, (layout, mask) in enumerate(batches(1024 * world_size, world_size)):
        inputs = tensors(layout, rank, batch, generator, d, dtype)
        # ranks may prepare or not, each as it likes
        prepared = (number + rank) % 2 == 0
        if prepared:
            ra.prepare(layout, mask, like=tuple(x[:, :1] for x in inputs[:3]), group=copies, score=scored(part, batch)[0])
        with (
            mock.patch.object(passes, "forward", side_effect=passes.forward) as forward,
            mock.patch.object(passes, "backward", side_effect=passes.backward) as backward,
        ):
            got = step(inputs, layout, mask, copies, part)
            ran[prepared] += forward.call_count + backward.call_count
            step(inputs, layout, mask, copies, part, seed=1)
            again = step(inputs, layout, mask, copies, part)
            assert forward.call_count + backward.call_count <= (0 if prepared else 4)
        expected = step(inputs, layout, mask, reference, part)
        for found in (got, again):
            far = [float((x.float() - y.float()).norm() / (y.float().norm() + 1e-6)) for x, y in zip(found, expected)]
            # gradients of slopes and biases are added up in no fixed order
            most = 1e-5 if part in ("learned slopes", "learned bias") else 0.0
            wrong += [(number, far)] if far[0] or far[1] > 2e-3 or any(far[2:4]) or any(x > most for x in far[4:]) else []
    return wrong, ran


@pytest.mark.parametrize("batch", [1, 2])
def test_a_first_call_replays_what_was_rehearsed(nccl, world_size, batch):
    for wrong, ran in nccl.run(world_size, rehearsed, batch):
        assert wrong == []
        assert ran[True] == 0 and ran[False] > 0


@pytest.mark.parametrize(
    ("part", "d", "dtype"), [("none", 256, torch.float16), ("softcap", 256, torch.float16), ("none", 64, torch.float32)], ids=str
)
def test_so_does_one_whose_backward_pass_takes_two_kernels(nccl, world_size, part, d, dtype):
    for wrong, ran in nccl.run(world_size, rehearsed, 1, part, d, dtype):
        assert wrong == []
        assert ran[True] == 0 and ran[False] > 0


@pytest.mark.parametrize(
    "part",
    ["softcap", "alibi", "slopes of all batches", "learned slopes", "bias", "learned bias", "sinks", "learned sinks", "all"],
)
def test_so_does_one_whose_scores_are_modified(nccl, world_size, part):
    """Each with slopes and sinks of its own, which lie elsewhere each time."""
    for wrong, ran in nccl.run(world_size, rehearsed, 2, part):
        assert wrong == []
        assert ran[True] == 0 and ran[False] > 0
