"""What `bench.py ring` compares: ring attention with each schedule and transport, its peers, and one GPU's kernels.

A method is named `schedule`, or `schedule+symmetric` to move K/V through symmetric memory instead of NCCL (gloo on a CPU); a schedule is
`ring`, `gather`, `waves-W` (W owners a wave), `double_ring-G` (G ranks a node) or `default`. With `+graph` after it each pass is
captured in a CUDA graph and replayed. `@` and a layout may follow (`ring@balanced`; zigzag without). The others:

    local             the same rank's tiles in one launch on random K/V: no communication, the kernels' single-GPU rate
    ulysses           all-to-all from sequence to heads and back around PyTorch's attention (cuDNN), over a contiguous layout
    cp-alltoall, cp-allgather   torch.distributed's context_parallel over cuDNN, with its two ways to rotate K/V
    ring_flash_attn   its zigzag ring, where it is installed
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringattn as ra
from ringattn.device import local
from ringattn.geometry.plan import Tiles, move_keys
from ringattn.geometry.rows import Rows
from ringattn.score import Score
from ringattn.transport import Transport

Tensors = tuple[torch.Tensor, ...]


class Ranks:
    """The first `size` ranks of this launch; on one of them (`takes_part`) also their group and transports, by a method's word for each."""

    def __init__(self, size: int, device: str, budget: int | None = None) -> None:
        whole = size == dist.get_world_size()
        # all ranks make a group, whether they are in it or not
        group = dist.group.WORLD if whole else dist.new_group(range(size))
        self.size, self.takes_part = size, dist.get_rank() < size
        if not self.takes_part:
            return
        self.group = group
        self.transports: dict[str, Transport] = {"": ra.process_group(group)}
        if device == "cuda":
            self.transports["symmetric"] = ra.symmetric(group, **({} if budget is None else {"budget": budget}))


@dataclass(frozen=True)
class Case:
    """One size: batch 1, bf16 on GPUs and fp32 elsewhere."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    device: str
    mask: ra.Mask
    ranks: Ranks

    def layout(self, kind: str = "") -> ra.Layout:
        return make_layout(kind, self.mask, self.tokens, self.ranks.size)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @cached_property
    def forward_flop(self) -> float:
        """A rank's mean share: two products over the live pairs."""
        pairs = self.layout().work(self.mask).sum()
        return 4 * float(pairs) * self.heads * self.head_dim / self.ranks.size

    def whole(self) -> Tensors:
        """q, k, v and dout of the whole sequence, the same on every rank."""
        generator = torch.Generator(self.device).manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return tuple(self._random(self.tokens, h, generator) for h in heads)

    def shards(self, layout: ra.Layout) -> Tensors:
        """q, k, v and dout of this rank's length, of random numbers."""
        generator = torch.Generator(self.device).manual_seed(dist.get_rank())
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return tuple(self._random(layout.lengths[dist.get_rank()], h, generator) for h in heads)

    def keys(self) -> Tensors:
        """k and v of the whole sequence's length."""
        return tuple(self._random(self.tokens, self.kv_heads, None) for _ in range(2))

    def _random(self, tokens: int, heads: int, generator: torch.Generator | None) -> torch.Tensor:
        return torch.randn(1, tokens, heads, self.head_dim, device=self.device, dtype=self.dtype, generator=generator)


# of (mask, tokens, ranks)
LAYOUTS: dict[str, Callable[[ra.Mask, int, int], ra.Layout]] = {
    "balanced": ra.balanced,
    "zigzag": lambda _, *sizes: ra.zigzag(*sizes),
    "striped": lambda _, *sizes: ra.striped(*sizes),
    "contiguous": lambda _, *sizes: ra.contiguous(*sizes),
}


def make_layout(kind: str, mask: ra.Mask, tokens: int, ranks: int) -> ra.Layout:
    """The layout of a method's word for it, zigzag without one."""
    return LAYOUTS[kind or "zigzag"](mask, tokens, ranks)


@dataclass(frozen=True)
class Contestant:
    """A layout of the sequence, the function from (q, k, v) shards to out, and the context that both passes run in.

    `transport` is what moves the data of our own.
    """

    layout: ra.Layout
    compute: Callable[[Tensors], torch.Tensor]
    surroundings: Callable[[], AbstractContextManager] = nullcontext
    transport: Transport | None = None
    graph: bool = False


class Method:
    """`forward` and then `backward`, on the same inputs every time."""

    def __init__(self, contestant: Contestant, inputs: Tensors) -> None:
        *leaves, self.dout = inputs
        self.layout, self.compute, self.surroundings = contestant.layout, contestant.compute, contestant.surroundings
        self.transport = contestant.transport
        self.leaves = tuple(x.requires_grad_() for x in leaves)
        self.results_bytes = sum(x.numel() * x.element_size() for x in inputs)  # dq, dk, dv and out

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


class Graphed(Method):
    """Each pass as a CUDA graph, captured in the first forward pass after a call that is not."""

    def __init__(self, contestant: Contestant, inputs: Tensors) -> None:
        super().__init__(contestant, inputs)
        self.transport = None  # a replay calls nobody
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


class Local(Method):
    """A rank's kernels alone: all its tiles over the whole K/V in one launch, gradients straight in their final dtype."""

    transport = None

    def __init__(self, case: Case, layout: ra.Layout) -> None:
        rank = dist.get_rank()
        self.layout = layout
        plan = ra.make_plan(layout, case.mask)
        assert plan.order[rank] is None
        bases = np.cumsum([0, *plan.lengths])
        rows = [move_keys(plan.tiles(rank, o), Rows.span(0, n), int(bases[o])) for o, n in enumerate(plan.lengths)]
        self.tiles = Tiles(np.concatenate(rows), plan.lengths[rank], case.tokens)
        self.q, *_, self.dout = case.shards(self.layout)
        self.k, self.v = case.keys()
        self.score = Score(case.head_dim**-0.5)
        self.results_bytes = sum(x.numel() * x.element_size() for x in (self.q, self.k, self.v, self.dout))  # dq, dk, dv and out

    def forward(self) -> None:
        self.state = local.forward(self.q, self.k, self.v, self.tiles, self.score, state=None, final=True)

    def backward(self) -> Tensors:
        out, *stats = self.state
        queries = local.Queries(self.q, self.dout, *stats, local.delta(out, self.dout))
        del self.state
        dq, dk, dv = local.query_sums(self.q, self.score, self.q.dtype), torch.empty_like(self.k), torch.empty_like(self.v)
        local.backward(queries, self.k, self.v, self.tiles, self.score, dq=dq, dk=dk, dv=dv, add=False)
        return dq.finish(self.q.dtype), dk, dv


def make_method(name: str, case: Case, *, same: bool = False) -> Method:
    """A method on random shards, or with `same` on the shards of one sequence, so that results can be compared."""
    word, _, layout = name.partition("@")
    if word == "local":
        return Local(case, case.layout(layout))
    contestant = PEER_METHODS[name](case) if name in PEER_METHODS else ours(word, case, case.layout(layout))
    rank = dist.get_rank()
    inputs = tuple(ra.shard(x, contestant.layout, rank) for x in case.whole()) if same else case.shards(contestant.layout)
    return (Graphed if contestant.graph else Method)(contestant, inputs)


def ours(word: str, case: Case, layout: ra.Layout) -> Contestant:
    graph = word.endswith("+graph")
    if graph and case.device == "cpu":
        raise ValueError(f"method {word!r} is a CUDA graph, but this runs on a CPU")
    word, _, kind = word.removesuffix("+graph").partition("+")
    transport = case.ranks.transports[kind]
    options = dict(layout=layout, mask=case.mask, schedule=schedule(word), group=transport)
    return Contestant(layout, lambda leaves: ra.ring_attention(*leaves, **options), transport=transport, graph=graph)


@contextmanager
def count_sent(method: Method):
    """Yields a list of the bytes of each message that this rank sends; peers' stays empty."""
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
    """`ring`, `gather`, `waves-2`, `double_ring-4`, or `default`."""
    kind, _, number = word.partition("-")
    makers = {"default": lambda: None, "ring": ra.ring, "gather": ra.gather, "waves": ra.waves, "double_ring": ra.double_ring}
    if kind not in makers:
        raise ValueError(f"method {word!r} is not one of {', '.join((*makers, 'local', *PEER_METHODS))}")
    if number and not (number.isdigit() and kind in ("waves", "double_ring")):
        raise ValueError(f"method {word!r}: only waves and double_ring take a number, such as waves-2")
    return makers[kind](int(number)) if number else makers[kind]()


def check(name: str, device: str, mask: str) -> None:
    """Raise ValueError for a name that is no method here, or a peer that does not know the mask."""
    word, at, layout = name.partition("@")
    if at and layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} of method {name!r} is not one of {', '.join(LAYOUTS)}")
    if name in PEER_METHODS:
        if mask != "causal":
            raise ValueError(f"method {name!r} is measured with a causal mask only, but mask is {mask!r}")
        if name == "ring_flash_attn" and not importlib.util.find_spec(name):
            raise ValueError(f"method {name!r} needs the package of that name, which is not installed")
        return
    if word == "local":
        return
    kind, _, transport = word.removesuffix("+graph").partition("+")
    schedule(kind)
    if transport not in ("", "symmetric"):
        raise ValueError(f"method {name!r} has the transport {transport!r}, but must have none (NCCL, gloo) or symmetric")
    if device == "cpu" and "+" in word:
        raise ValueError(f"method {name!r} needs GPUs: on a CPU a method has no transport and no graph")


class _AllToAll(torch.autograd.Function):
    """(s_local, h, d) to (s, h / world_size, d), or back."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, to_heads: bool, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.to_heads, ctx.group = to_heads, group
        return _swap(x, to_heads, group)

    @staticmethod
    def backward(ctx, dx: torch.Tensor):
        return _swap(dx, not ctx.to_heads, ctx.group), None, None


def _swap(x: torch.Tensor, to_heads: bool, group: dist.ProcessGroup) -> torch.Tensor:
    n = group.size()
    parts = x.unflatten(1, (n, -1)).transpose(0, 1) if to_heads else x.unflatten(0, (n, -1))
    parts = parts.contiguous()  # (n, s_local, h / n, d)
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received.flatten(0, 1) if to_heads else received.transpose(0, 1).flatten(1, 2)


def ulysses(case: Case) -> Contestant:
    """DeepSpeed-Ulysses (Jacobs et al. 2023), with contiguous shards of equal length."""

    group = case.ranks.group

    def compute(leaves: Tensors) -> torch.Tensor:
        q, k, v = (_AllToAll.apply(x[0], True, group)[None].transpose(1, 2) for x in leaves)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if q.is_cuda else nullcontext():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return _AllToAll.apply(out[0].transpose(0, 1), False, group)[None]

    return Contestant(case.layout("contiguous"), compute)


def context_parallel(case: Case, rotate: str) -> Contestant:
    """torch.distributed.tensor.experimental.context_parallel, whose balanced layout is zigzag."""
    from torch.distributed.tensor.experimental import context_parallel as enter
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    n = case.ranks.size
    mesh = dist.device_mesh.DeviceMesh.from_group(case.ranks.group, case.device)
    repeats = case.heads // case.kv_heads

    @contextmanager
    def surroundings():
        set_rotate_method(rotate)
        # it wants a buffer to shard; ours are sharded
        nothing = torch.zeros(1, 2 * n, device=case.device)
        with enter(mesh, buffers=[nothing], buffer_seq_dims=[1]), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            yield

    def compute(leaves: Tensors) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in leaves)
        # it has no grouped-query attention: K and V are repeated, and autograd sums their gradients
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return Contestant(case.layout(), compute, surroundings)


def ring_flash_attn(case: Case) -> Contestant:
    """zhuzilin/ring-flash-attention's zigzag ring."""
    from ring_flash_attn import zigzag_ring_flash_attn_func

    options = dict(causal=True, group=case.ranks.group)
    return Contestant(case.layout(), lambda leaves: zigzag_ring_flash_attn_func(*leaves, **options))


PEER_METHODS = {
    "ulysses": ulysses,
    "cp-alltoall": lambda case: context_parallel(case, "alltoall"),
    "cp-allgather": lambda case: context_parallel(case, "allgather"),
    "ring_flash_attn": ring_flash_attn,
}
