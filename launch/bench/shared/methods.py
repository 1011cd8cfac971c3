"""What the benchmarks of many ranks compare, by name: ring attention with each schedule and transport, its peers, and one GPU's kernels.

A method is named after its schedule: `ring`, `gather`, `waves-W` (W owners a wave), `double_ring-G` (G ranks a node) or `default`.
Endings, in this order, change it:

    +symmetric   move K/V through symmetric memory instead of NCCL (gloo on a CPU)
    +graph       capture each pass in a CUDA graph and replay it
    @LAYOUT      take another layout than zigzag: `ring@balanced`

Besides, there are the peers of `peers.py`, and

    local        a rank's tiles in one launch on random K/V: no communication, the rate of the kernels on one GPU
"""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.device import local
from ringattn.geometry.plan import make_tiles, move_keys
from ringattn.geometry.rows import Rows
from ringattn.scores import Score

from .cases import LAYOUTS, RingCase, Tensors
from .peers import PACKAGES, PEER_METHODS, Contestant, is_installed


class Method:
    """`forward` and then `backward`, on the same inputs every time."""

    def __init__(self, contestant: Contestant, inputs: Tensors) -> None:
        *leaves, self.dout = inputs
        self.layout, self.compute, self.surroundings = contestant.layout, contestant.compute, contestant.surroundings
        self.transport = contestant.transport
        self.leaves = tuple(x.requires_grad_() for x in leaves)
        self.results_bytes = _bytes(inputs)  # dq, dk, dv and out have the sizes of the inputs

    def forward(self) -> None:
        with self.surroundings():
            self.out = self.compute(self.leaves)

    def backward(self) -> Tensors:
        with self.surroundings():
            grads = torch.autograd.grad(self.out, self.leaves, self.dout)
        del self.out
        return grads

    def results(self) -> Tensors:
        """out, dq, dk and dv of this rank."""
        self.forward()
        out = self.out.detach()
        return out, *self.backward()


class GraphedMethod(Method):
    """Each pass as a CUDA graph. The first forward call runs both passes once without a graph, then captures them."""

    def __init__(self, contestant: Contestant, inputs: Tensors) -> None:
        super().__init__(contestant, inputs)
        self.transport = None  # a replay does not call the transport
        self.graphs: tuple[torch.cuda.CUDAGraph, ...] = ()

    def forward(self) -> None:
        if not self.graphs:
            self._capture()
        self.graphs[0].replay()

    def backward(self) -> Tensors:
        self.graphs[1].replay()
        return self.grads

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            super().forward()
            super().backward()
        torch.cuda.current_stream().wait_stream(stream)
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first):
            super().forward()
        out = self.out
        with torch.cuda.graph(second, pool=first.pool()):
            self.grads = super().backward()
        self.graphs, self.out = (first, second), out


class LocalMethod(Method):
    """A rank's kernels alone: all its tiles over the whole K/V in one launch, with gradients written in their final dtype."""

    transport = None

    def __init__(self, case: RingCase, layout: ra.Layout) -> None:
        rank = dist.get_rank()
        self.layout = layout
        plan = ra.make_plan(layout, case.mask)
        assert plan.order[rank] is None
        bases = np.cumsum([0, *plan.lengths])
        rows = [move_keys(plan.tiles(rank, o), Rows.span(0, n), int(bases[o])) for o, n in enumerate(plan.lengths)]
        self.tiles = make_tiles(np.concatenate(rows), plan.lengths[rank], case.tokens)
        self.q, *_, self.dout = case.shards(self.layout)
        self.k, self.v = case.keys()
        self.score = Score(case.head_dim**-0.5)
        self.results_bytes = _bytes((self.q, self.k, self.v, self.dout))  # dq, dk, dv and out have the sizes of the inputs

    def forward(self) -> None:
        self.state = local.forward(self.q, self.k, self.v, self.tiles, self.score, state=None, final=True)

    def backward(self) -> Tensors:
        out, *stats = self.state
        queries = local.queries(self.q, out, self.dout, *stats, once=True)
        del self.state
        dq, dk, dv = local.query_sums(queries, self.score, self.q.dtype), torch.empty_like(self.k), torch.empty_like(self.v)
        local.backward(queries, self.k, self.v, self.tiles, self.score, dq=dq, dk=dk, dv=dv, add=False)
        return dq.finish(self.q.dtype), dk, dv


def _bytes(tensors: Tensors) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def make_method(name: str, case: RingCase, *, same: bool = False) -> Method:
    """A method on random shards, or with `same` on the shards of one sequence, so that results can be compared."""
    word, _, layout = name.partition("@")
    if word == "local":
        return LocalMethod(case, case.layout(layout))
    contestant = PEER_METHODS[name](case) if name in PEER_METHODS else ours(word, case, case.layout(layout))
    rank = dist.get_rank()
    inputs = tuple(ra.shard(x, contestant.layout, rank) for x in case.whole()) if same else case.shards(contestant.layout)
    return (GraphedMethod if contestant.graph else Method)(contestant, inputs)


def ours(word: str, case: RingCase, layout: ra.Layout) -> Contestant:
    """Ring attention, of a method's name without its layout."""
    graph = word.endswith("+graph")
    if graph and case.device == "cpu":
        raise ValueError(f"method {word!r} is a CUDA graph, but this runs on a CPU")
    word, _, kind = word.removesuffix("+graph").partition("+")
    transport = case.ranks.transports[kind]
    options = dict(layout=layout, mask=case.mask, schedule=schedule(word), group=transport, score=case.score)
    return Contestant(layout, lambda leaves: ra.ring_attention(*leaves, **options), transport=transport, graph=graph)


@contextmanager
def count_sent(method: Method):
    """Yields a list of the bytes of each message that this rank sends. The list stays empty for peers, which have no transport."""
    sent: list[int] = []
    if method.transport is None:
        yield sent
        return
    exchange = method.transport.exchange

    def counted(sends, receives, **options):
        sent.extend(peer.tensor.nbytes for peer in sends)
        return exchange(sends, receives, **options)

    with mock.patch.object(method.transport, "exchange", counted):
        yield sent


def schedule(word: str) -> ra.Schedule | None:
    """The schedule of a name: `ring`, `gather`, `waves-2`, `double_ring-4`; None of `default`."""
    kind, _, number = word.partition("-")
    makers = {"default": lambda: None, "ring": ra.ring, "gather": ra.gather, "waves": ra.waves, "double_ring": ra.double_ring}
    if kind not in makers:
        raise ValueError(f"method {word!r} is not one of {', '.join((*makers, 'local', *PEER_METHODS))}")
    if number and not (number.isdigit() and kind in ("waves", "double_ring")):
        raise ValueError(f"method {word!r}: only waves and double_ring take a number, such as waves-2")
    return makers[kind](int(number)) if number else makers[kind]()


def check_method(name: str, device: str, mask: str) -> None:
    """Raise ValueError for a name that is no method here, or a peer that cannot compute the mask."""
    word, at, layout = name.partition("@")
    if at and layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} of method {name!r} is not one of {', '.join(LAYOUTS)}")
    if name in PEER_METHODS:
        if mask != "causal":
            raise ValueError(f"method {name!r} is measured with a causal mask only, but mask is {mask!r}")
        if name in PACKAGES and not is_installed(PACKAGES[name]):
            raise ValueError(f"method {name!r} needs the package {PACKAGES[name]}, which is not installed")
        return
    if word == "local":
        return
    kind, _, transport = word.removesuffix("+graph").partition("+")
    schedule(kind)
    if transport not in ("", "symmetric"):
        raise ValueError(f"method {name!r} has the transport {transport!r}, but must have none (NCCL, gloo) or symmetric")
    if device == "cpu" and "+" in word:
        raise ValueError(f"method {name!r} needs GPUs: on a CPU a method has no transport and no graph")
