"""Times a chunked prefill of a long document through one layer's attention, beside the training forward's rate in the same run.

The document's chunks go through `ra.prefill` one after another, as a server reads a document; the sizes are those of a model of a billion
parameters. Where 0, 1, 2, 4, ... chunks are cached, and at the last chunk, schedules take turns: the default, `pass_q`, where queries move,
and `ring`, where pages move. All other chunks are computed once, by the default. Columns:

    plan     milliseconds that the first call with a chunk takes the host beyond a later one: its plan, which all layers share. The first
             rows also count kernels that compile
    layer    milliseconds of a later call with the chunk, of the slowest rank: what each layer takes
    rate     TFLOP/s a GPU over the live pairs, and its ratio to that of `ring_attention` over the whole document without gradients

Each chunk's results are compared between schedules, and those of the first chunk with `ring_attention`. `--device cpu` needs toy sizes.

`--plans` measures plans alone, on this host without GPUs or other ranks: a transport that moves nothing stands in for them, and nothing is
attended. Its times are of the processor; the least of some.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.device import local
from ringattn.transport import SilentTransport

from .shared.ranks import add_ranks, group_of, slowest, start_ranks
from .shared.timing import spread

_ONCE = 2.0  # seconds; a call that takes longer is timed once
_REPEATS = 5  # of shorter ones
_LARGEST_ERROR = 2e-2  # of the norm, in bf16

SCHEDULES: dict[str, Callable[[], ra.Schedule | None]] = {"default": lambda: None, "pass_q": ra.pass_q, "ring": ra.ring}


class Seconds(NamedTuple):
    """Of one call: until the host has queued it, and until the device has done it."""

    host: float
    whole: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=17 << 16, help="of the document (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=1 << 16, help="tokens of a chunk (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--page-size", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES), help="(default: all)")
    parser.add_argument("--plans", action="store_true", help="measure what plans take the host, for --world-size ranks (8)")
    add_ranks(parser)


def main(arguments: argparse.Namespace) -> None:
    for name in ("tokens", "chunk", "heads", "kv_heads", "head_dim"):
        if getattr(arguments, name) < 1:
            raise SystemExit(f"bench prefill: {name} is {getattr(arguments, name)}, but must be at least 1")
    if arguments.plans:
        plans(arguments)
    else:
        start_ranks(run_rank, arguments)


class Server:
    """This rank of a server that reads one document: its cache, and random shards of each chunk."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        ranks = group_of(dist.get_world_size(), arguments)
        self.arguments, self.device, self.size = arguments, arguments.device, ranks.size
        self.group = ranks.transports.get("symmetric", ranks.transports[""])
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        pages = -(-arguments.tokens // (arguments.page_size * self.size)) + 1
        sizes = dict(kv_heads=arguments.kv_heads, head_dim=arguments.head_dim, page_size=arguments.page_size)
        self.cache = ra.PagedCache(pages=pages, **sizes, dtype=self.dtype, device=self.device, group=self.group)
        self.document = self.cache.add()

    def shards(self, layout: ra.Layout) -> list[torch.Tensor]:
        """q, k and v of this rank's rows."""
        heads = self.arguments.heads, self.arguments.kv_heads, self.arguments.kv_heads
        rows = layout.lengths[dist.get_rank()]
        return [torch.randn(1, rows, h, self.arguments.head_dim, device=self.device, dtype=self.dtype) for h in heads]

    def rate(self, cached: int, tokens: int, seconds: float) -> float:
        """TFLOP/s a GPU of so many new tokens after so many cached ones."""
        pairs = tokens * cached + tokens * (tokens + 1) // 2
        return 4 * pairs * self.arguments.heads * self.arguments.head_dim / self.size / seconds / 1e12

    def seconds(self, call: Callable[[], object]) -> Seconds:
        """Of a call that all ranks begin together; of the slowest rank."""
        self._meet()
        began = time.perf_counter()
        call()
        host = time.perf_counter() - began
        self._finish()
        return Seconds(*slowest([host, time.perf_counter() - began], self.device))

    def _meet(self) -> None:
        self._finish()
        slowest([0.0], self.device)
        self._finish()

    def _finish(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


@torch.no_grad()
def run_rank(arguments: argparse.Namespace) -> None:
    """One rank; the first one prints."""
    torch.manual_seed(dist.get_rank())
    server = Server(arguments)
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    heads = f"heads {arguments.heads}:{arguments.kv_heads} of {arguments.head_dim}, {str(server.dtype).removeprefix('torch.')}"
    say(f"{arguments.tokens:,} tokens in chunks of {arguments.chunk:,}, {heads}, {server.size} ranks", flush=True)
    trained = training(server)
    rate = server.rate(0, arguments.tokens, trained)
    say(f"training forward of the whole document: {1e3 * trained:,.1f} ms a layer, {rate:.4g} TFLOP/s a GPU")
    say(f"{'cached':>11} {'schedule':>9} {'plan ms':>9} {'layer ms':>10} {'TFLOP/s':>9} {'of training':>11}", flush=True)
    plans = layers = 0.0
    for cached in range(0, arguments.tokens, arguments.chunk):
        tokens = min(arguments.chunk, arguments.tokens - cached)
        names = arguments.schedules if is_compared(cached, arguments) else arguments.schedules[:1]
        for name, plan, layer in chunk(server, tokens, names):
            found = server.rate(cached, tokens, layer)
            say(f"{cached:>11,} {name:>9} {1e3 * plan:>9.1f} {1e3 * layer:>10.2f} {found:>9.4g} {found / rate:>11.0%}", flush=True)
            plans, layers = (plans + plan, layers + layer) if name == names[0] else (plans, layers)
    say(f"all chunks by {arguments.schedules[0]}: {1e3 * layers:,.1f} ms a layer, and once {1e3 * plans:,.1f} ms for plans")


def is_compared(cached: int, arguments: argparse.Namespace) -> bool:
    """Whether schedules take turns at the chunk after so many tokens."""
    chunks = cached // arguments.chunk
    return chunks & (chunks - 1) == 0 or cached + arguments.chunk >= arguments.tokens


def training(server: Server) -> float:
    """Seconds of `ring_attention` over the whole document."""
    # the kernels compile on a shorter one
    for tokens in (min(server.arguments.chunk, server.arguments.tokens), server.arguments.tokens):
        layout = ra.zigzag(tokens, server.size)
        shards = server.shards(layout)
        found = repeated(server, lambda shards=shards, layout=layout: ra.ring_attention(*shards, layout=layout, group=server.group))
    return found


def repeated(server: Server, call: Callable[[], object]) -> float:
    """Seconds of a call: the median of some after the first, or the first if it is long."""
    first = server.seconds(call).whole
    return first if first > _ONCE else spread([server.seconds(call).whole for _ in range(_REPEATS)]).median


def chunk(server: Server, tokens: int, names: list[str]) -> list[tuple[str, float, float]]:
    """The next chunk by each of these schedules: name, seconds of the plan, seconds of a layer."""
    layout = ra.zigzag(tokens, server.size)
    shards = server.shards(layout)
    begin = server.document.length
    batch = server.cache.extend([server.document], tokens)
    rows, outs = [], {}
    for name in names:
        schedule = SCHEDULES[name]()

        def call(name: str = name, schedule: ra.Schedule | None = schedule) -> None:
            outs[name] = ra.prefill(*shards, server.cache, batch, layout, schedule=schedule)

        first = server.seconds(call)
        later = server.seconds(call)
        layer = later.whole if later.whole > _ONCE or len(names) == 1 else repeated(server, call)
        rows.append((name, max(0.0, first.host - later.host), layer))
    if begin == 0:
        outs["ring_attention"] = ra.ring_attention(*shards, layout=layout, group=server.group)
    compare(outs, server.device)
    return rows


def compare(outs: dict[str, torch.Tensor], device: str) -> None:
    """Stop unless all schedules compute the same on every rank."""
    (first, out), *others = outs.items()
    for name, other in others:
        error = float((out.float() - other.float()).norm() / other.float().norm()) if other.numel() else 0.0
        (error,) = slowest([error], device)
        if not error < _LARGEST_ERROR:
            raise SystemExit(f"bench prefill: {first} does not compute what {name} does: the relative difference is {error:.2g}")


@torch.no_grad()
def plans(arguments: argparse.Namespace) -> None:
    """Print what the plans of the chunks that are compared take the host of one rank."""
    size = arguments.world_size or 8
    group = SilentTransport(size // 2, size)
    # rows as short as can be
    heads = (arguments.heads, arguments.kv_heads, arguments.kv_heads)
    pages = -(-arguments.tokens // (arguments.page_size * size)) + 1
    cache = ra.PagedCache(pages=pages, kv_heads=heads[1], head_dim=1, page_size=arguments.page_size, group=group)
    document = cache.add()
    print(f"{size} ranks, chunks of {arguments.chunk:,} tokens, pages of {arguments.page_size}; milliseconds of the host")
    print(f"{'cached':>11} {'schedule':>9} {'plan ms':>9}", flush=True)
    for cached in range(0, arguments.tokens, arguments.chunk):
        layout = ra.zigzag(min(arguments.chunk, arguments.tokens - cached), size)
        if not is_compared(cached, arguments):
            cache.extend([document], layout.seq_len)
            continue
        shards = [torch.zeros(1, layout.lengths[group.rank], h, 1) for h in heads]
        for name in arguments.schedules:
            times = [plan_seconds(cache, document, layout, shards, SCHEDULES[name]()) for _ in range(_REPEATS)]
            print(f"{cached:>11,} {name:>9} {1e3 * min(times):>9.1f}", flush=True)
        cache.extend([document], layout.seq_len)


def plan_seconds(
    cache: ra.PagedCache,
    document: ra.CachedSequence,
    layout: ra.Layout,
    shards: list[torch.Tensor],
    schedule: ra.Schedule | None,
) -> float:
    """Seconds of the processor that the first call of `prefill` with a chunk takes beyond the second; the cache is as before."""
    length = document.length
    batch = cache.extend([document], layout.seq_len)
    # sliding windows of other lengths, all longer than the document, have plans of their own
    mask = ra.sliding_window((1 << 24) + document.edition)

    def nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: object, **options: object) -> local.State:
        stats = q.new_zeros(q.shape[0], q.shape[2], q.shape[1])
        return torch.zeros_like(q), stats, stats

    times = [time.process_time()]
    with mock.patch.object(local, "forward", nothing):
        for _ in range(2):
            ra.prefill(*shards, cache, batch, layout, mask=mask, schedule=schedule)
            times.append(time.process_time())
    cache.truncate(document, length)
    begin, middle, end = times
    return max(0.0, 2 * middle - begin - end)
