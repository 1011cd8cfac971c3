"""Times decoding over a paged cache, beside a copy and torch's attention in the same run.

A step decodes a token of each sequence in every layer, with so many layers that no step finds its keys in a cache of the chip. On a GPU
it is replayed as a CUDA graph, and contestants take turns: the host's time does not count. `--host` prints that apart. Bytes are those of
all keys and values. Contestants on one rank:

    pages      pages of --page-size tokens, in random order
    in order   the same pages in the order of their memory
    one page   the same kernel, with all tokens of a sequence in one page, or in pages of 65,536: keys and values are contiguous
    SDPA       torch's scaled_dot_product_attention over contiguous keys and values, with the backend that torch chooses
    cuDNN, flash    the same with this backend
    Flex       torch's compiled flex_attention over the same

Each rate stands beside its share of two copies' rates: of one with the same bytes a layer, half of them read and half written, as kernels
of such a graph; and of one of a gigabyte.

On several ranks, which share the sequences, the step is timed with each way of exchanging partials between ranks, and with none: the
difference is what an exchange costs. Ways are the library's default (on GPUs of one host, a kernel that writes into the others' memory)
and torch.distributed's all-gather (NCCL; gloo on a CPU). `--sweep` times forms of the kernel instead.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ringattn as ra
from ringattn.transport import SilentTransport

from .shared.ranks import add_ranks, group_of, slowest, start_ranks

_LEAST = 1 << 30  # bytes of keys and values that a step reads, on a GPU: what it takes to start a graph is then little
_LARGEST_PAGE = 1 << 16
_COPIED = 1 << 30  # bytes of the tensor that is copied
_BUSY = 60_000_000  # clock cycles, about thirty milliseconds
_AHEAD = 20  # calls that are queued while the GPU is busy
_CONTESTANTS = ("pages", "in order", "one page", "SDPA", "cuDNN", "flash", "Flex")

Step = Callable[[], list[torch.Tensor]]


@dataclass(frozen=True)
class DecodeLoad:
    """`batch` sequences, with `tokens` tokens in all, and the sizes of a layer."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    device: str

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.tokens // self.batch

    @property
    def layer_bytes(self) -> int:
        """Of all keys and values of a layer."""
        return self.batch * self.length * self.kv_heads * self.head_dim * 2 * self.dtype.itemsize

    @property
    def layers(self) -> int:
        return max(1, -(-_LEAST // self.layer_bytes)) if self.device == "cuda" else 2

    def queries(self) -> torch.Tensor:
        return torch.randn(self.batch, 1, self.heads, self.head_dim, device=self.device, dtype=self.dtype)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64], help="sequences (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[8192, 65536, 262144, 1048576], help="of all sequences (default: %(default)s)"
    )
    parser.add_argument("--heads", type=int, default=32, help="query heads (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=8, help="K/V heads (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--page-size", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=10, help="steps of each contestant (default: %(default)s)")
    parser.add_argument("--contestants", nargs="+", choices=_CONTESTANTS, default=["pages", "in order", "SDPA"], metavar="NAME")
    parser.add_argument("--host", action="store_true", help="time what a call takes the host, too")
    parser.add_argument("--sweep", action="store_true", help="time forms of the kernel, on one GPU")
    add_ranks(parser)
    parser.set_defaults(world_size=1)


def main(arguments: argparse.Namespace) -> None:
    start_ranks(run_rank, arguments)


@torch.no_grad()
def run_rank(arguments: argparse.Namespace) -> None:
    """One rank; the first one prints."""
    on_gpu, size = arguments.device == "cuda", dist.get_world_size()
    bandwidth = copy_bandwidth(arguments.device, arguments.repeats)
    first = dist.get_rank() == 0
    exchanges = ways_of_exchange(arguments) if size > 1 else {}
    if first:
        print(f"copies: {bandwidth / 1e9:.0f} GB/s, read and written", flush=True)
    for batch, tokens in itertools.product(arguments.batches, arguments.tokens):
        torch.manual_seed(0)
        sizes = arguments.heads, arguments.kv_heads, arguments.head_dim, arguments.page_size
        load = DecodeLoad(batch, tokens, *sizes, torch.bfloat16 if on_gpu else torch.float32, arguments.device)
        name = f"{batch:3} x {load.length:7} tokens"
        if arguments.sweep:
            for form, step in forms(load).items():
                print(f"{name}  {form}: {rate(step, load, arguments.repeats) / 1e9:7.1f} GB/s", flush=True)
        elif size == 1:
            steps = contestants(load, arguments.contestants)
            compare(steps)
            found = in_turns(steps | {"copy": copying(load)}, load.device, arguments.repeats)
            rates = {each: load.layers * load.layer_bytes / x for each, x in found.items()}
            alike = rates.pop("copy")
            text = f"{name}   copy {alike / 1e9:7.1f} GB/s"
            for each, x in rates.items():
                text += f"   {each} {x / 1e9:7.1f} GB/s ({x / alike:4.0%}, {x / bandwidth:4.0%})"
            print(text, flush=True)
            if arguments.host:
                times = {each: host(step, load) for each, step in steps.items()}
                print(f"{name}   host" + "".join(f"   {each} {1e6 * x:5.1f} us" for each, x in times.items()), flush=True)
            # what a contestant holds goes before the next one's memory is asked for
            del steps
        else:
            steps = over_ranks(load, exchanges)
            found = in_turns(steps, load.device, arguments.repeats)
            times = [1e6 * x / load.layers for x in slowest(list(found.values()), load.device)]
            if first:
                print(
                    f"{name}   on {size} ranks, us a layer" + "".join(f"   {each} {x:6.1f}" for each, x in zip(steps, times)),
                    flush=True,
                )
            del steps


def contestants(load: DecodeLoad, names: Sequence[str] = _CONTESTANTS[:4]) -> dict[str, Step]:
    """What decodes a token of each sequence in every layer, by name. All have the same keys and values."""
    q, layers = load.queries(), load.layers
    cache, batch = filled(load, None)
    torch.nn.init.normal_(cache.pool.k)
    torch.nn.init.normal_(cache.pool.v)
    scatter(cache, batch)
    whole = [[gathered(pool[layer], batch) for layer in range(layers)] for pool in (cache.pool.k, cache.pool.v)]
    steps = {"pages": decoding(q, cache, batch, layers)}
    sizes = {"in order": load.page_size, "one page": min(1 << (load.length - 1).bit_length(), _LARGEST_PAGE)}
    for name, page_size in sizes.items():
        if name in names:
            ordered, table = filled(replace(load, page_size=max(16, page_size)), None)
            for pool, kept in zip((ordered.pool.k, ordered.pool.v), whole):
                for layer in range(layers):
                    put(pool[layer], table, kept[layer])
            steps[name] = decoding(q, ordered, table, layers)
    return {name: step for name, step in (steps | peers(load, q, whole, names)).items() if name in names}


def peers(load: DecodeLoad, q: torch.Tensor, whole: list[list[torch.Tensor]], names: Sequence[str]) -> dict[str, Step]:
    """The same by torch, over contiguous keys and values."""
    queries, options = q.transpose(1, 2), dict(enable_gqa=load.heads != load.kv_heads)

    def over(attend: Callable[..., torch.Tensor]) -> Step:
        return lambda: [attend(queries, k, v, **options).transpose(1, 2) for k, v in zip(*whole)]

    def by(backend: SDPBackend) -> Step:
        step = over(scaled_dot_product_attention)

        def run() -> list[torch.Tensor]:
            with sdpa_kernel(backend):
                return step()

        return run

    found = {"SDPA": over(scaled_dot_product_attention)}
    found |= {"cuDNN": by(SDPBackend.CUDNN_ATTENTION), "flash": by(SDPBackend.FLASH_ATTENTION)}
    if "Flex" in names:
        from torch.nn.attention.flex_attention import flex_attention

        # each load compiles again, and dynamo compiles one function only so many times
        torch._dynamo.reset()
        found["Flex"] = over(torch.compile(flex_attention, dynamic=False))
    return found


def copying(load: DecodeLoad) -> Step:
    """What moves as many bytes in each layer, half of them read and half written, by kernels: a graph would copy by other means."""
    pairs = [torch.zeros(2, load.layer_bytes // 8, dtype=torch.int32, device=load.device) for _ in range(load.layers)]
    return lambda: [torch.bitwise_not(pair[0], out=pair[1]) for pair in pairs]


def ways_of_exchange(arguments: argparse.Namespace) -> dict[str, Any]:
    """What may exchange the partials of all ranks, by name."""
    ranks = group_of(dist.get_world_size(), arguments)
    return {"default": ranks.group, "all-gather": ranks.transports[""], "none": SilentTransport(dist.get_rank(), ranks.size)}


def over_ranks(load: DecodeLoad, exchanges: dict[str, Any]) -> dict[str, Step]:
    """A step of all ranks by each way of exchanging partials."""
    q = load.queries()
    return {name: decoding(q, *filled(load, group), load.layers) for name, group in exchanges.items()}


def forms(load: DecodeLoad) -> dict[str, Step]:
    """The kernel with other numbers of programs, warps and stages, with and without the copy engine."""

    from ringattn_kernels.paged import PagedConfig, attend_pages

    cache, batch = filled(load, None)
    scatter(cache, batch)
    q, found = load.queries(), {}
    for keys, programs, warps, stages in itertools.product((32, 64), (1, 2, 3, 4), (2, 4, 8), (3, 4, 5)):
        config = PagedConfig(64, min(keys, load.page_size), programs, warps, stages)

        def step(config: PagedConfig = config) -> list[torch.Tensor]:
            options = dict(softmax_scale=load.head_dim**-0.5, config=config)
            return [attend_pages(q, cache.pool.k[n], cache.pool.v[n], batch.table, **options)[0] for n in range(load.layers)]

        try:
            step()
        except Exception as error:
            print(f"{config}: {type(error).__name__}")
            continue
        found[f"{config.keys} keys, {programs} programs, {warps} warps, {stages} stages"] = step
    return found


def filled(load: DecodeLoad, group: object) -> tuple[ra.PagedCache, ra.CacheBatch]:
    """A cache of these sequences, and their batch. The keys are zeros."""
    ranks = 1 if group is None else dist.get_world_size()
    pages = load.batch * (-(-load.length // (load.page_size * ranks)) + 1)
    sizes = dict(kv_heads=load.kv_heads, head_dim=load.head_dim, layers=load.layers, page_size=load.page_size)
    cache = ra.PagedCache(pages=pages, **sizes, dtype=load.dtype, device=load.device, group=group)
    sequences = [cache.add() for _ in range(load.batch)]
    cache.extend(sequences, load.length)
    return cache, cache.extend(sequences, 0)


def scatter(cache: ra.PagedCache, batch: ra.CacheBatch) -> None:
    """Give the sequences their pages in random order, as those of a busy cache come to lie."""
    pages = batch.table.pages
    order = torch.randperm(cache.pool.k.shape[1] - 1, device=pages.device)[: pages.numel()]
    used = -(-int(batch.table.lengths[0]) // cache.pool.page_size)
    pages[:, :used] = order[: len(pages) * used].view(len(pages), used).to(pages.dtype)


def gathered(pool: torch.Tensor, batch: ra.CacheBatch) -> torch.Tensor:
    """(b, hk, s, d): the rows of each sequence, contiguous."""
    length = int(batch.table.lengths[0])
    used = -(-length // pool.shape[2])
    rows = pool[batch.table.pages[:, :used].long()]  # (b, n, hk, page_size, d)
    return rows.transpose(1, 2).flatten(2, 3)[:, :, :length].contiguous()


def put(pool: torch.Tensor, batch: ra.CacheBatch, rows: torch.Tensor) -> None:
    """The inverse of `gathered`."""
    b, hk, length, d = rows.shape
    used = -(-length // pool.shape[2])
    padded = rows.new_zeros(b, hk, used * pool.shape[2], d)
    padded[:, :, :length] = rows
    pool[batch.table.pages[:, :used].long()] = padded.unflatten(2, (used, -1)).transpose(1, 2)


def decoding(q: torch.Tensor, cache: ra.PagedCache, batch: ra.CacheBatch, layers: int) -> Step:
    return lambda: [ra.decode(q, cache, batch, layer=layer) for layer in range(layers)]


def compare(steps: dict[str, Step]) -> None:
    """Stop unless all contestants compute the same."""
    (first, results), *others = [(name, step()) for name, step in steps.items()]
    for name, found in others:
        if not all(torch.allclose(x.float(), y.float(), atol=2e-2, rtol=2e-2) for x, y in zip(results, found)):
            raise SystemExit(f"{name} does not compute what {first} does")


def rate(step: Step, load: DecodeLoad, repeats: int) -> float:
    """Bytes of keys and values that a step reads in a second."""
    return load.layers * load.layer_bytes / timed(step, load.device, repeats)


def copy_bandwidth(device: str, repeats: int) -> float:
    """Bytes that are read and written in a second by a copy from tensor to tensor."""
    x = torch.zeros(_COPIED if device == "cuda" else 1 << 20, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    # not as a graph, which would copy by other means
    return 2 * x.numel() / timed(lambda: [y.copy_(x)], device, repeats, graph=False)


def in_turns(steps: dict[str, Step], device: str, repeats: int) -> dict[str, float]:
    """Seconds of each step, on a GPU as a graph; the least median of three rounds in which the steps take turns."""
    graphs = {name: graph_of(step) if device == "cuda" else step for name, step in steps.items()}
    rounds = [{name: timed(graph, device, repeats, graph=False) for name, graph in graphs.items()} for _ in range(3)]
    return {name: min(found[name] for found in rounds) for name in steps}


def host(step: Step, load: DecodeLoad) -> float:
    """Seconds that the host takes to queue the call of one layer, while the device is busy; the median."""
    times = []
    for _ in range(5):
        if load.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(_BUSY)
        began = time.perf_counter()
        for _ in range(max(1, _AHEAD // load.layers)):
            step()
        times.append((time.perf_counter() - began) / (max(1, _AHEAD // load.layers) * load.layers))
    return median(times)


def timed(step: Callable[[], Any], device: str, repeats: int, graph: bool = True) -> float:
    """Seconds of a step; the median. On a GPU between events of the device, as a `graph` or as it is."""
    if device != "cuda":
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
        return median(times)
    replay = graph_of(step) if graph else step
    events = []
    for _ in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return median([begin.elapsed_time(end) for begin, end in events[2:]]) * 1e-3


def graph_of(step: Step) -> Callable[[], None]:
    """A CUDA graph of a step, to be replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
