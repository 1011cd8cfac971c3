"""Times short sequences, many of them, on one GPU: whole calls of ours, of cuDNN, of FlashAttention-2 and of plain torch in one run.

Each contestant is measured forward + backward with autograd in three ways: what the host takes to queue a call while the GPU is behind
(forward alone, too), one call at a time with nothing queued ahead, and in a stream of calls. Peak is the memory that a call takes on top of
its inputs. `eager` makes the whole matrix of scores; what a GPU's memory does not hold is left out. `--shapes`:

    models  FlashAttention's GPT-2 medium, and models that people start with
    grid    batches of 65,536 tokens, 16 heads of 64 and 128, of 512 to 4,096 tokens, and the same with a dead tail of an eighth: a mask for
            us, while peers get the live rows alone
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ringattn as ra

_BUSY = 60_000_000  # clock cycles, about thirty milliseconds
_AHEAD = 10  # calls that are queued while the GPU is busy


@dataclass(frozen=True)
class Shape:
    """A causal call: `batch` sequences of `tokens`, query heads, K/V heads, the head dim and the dtype. tail: tokens at the end that are
    padding."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    tail: int = 0

    @property
    def live(self) -> int:
        return self.tokens - self.tail

    def __str__(self) -> str:
        name, tail = str(self.dtype).removeprefix("torch."), f", the last {self.tail} dead" if self.tail else ""
        return f"{self.batch} x {self.tokens}{tail}, heads {self.heads}:{self.kv_heads}, D {self.head_dim}, {name}"


MODELS = (
    Shape(64, 1024, 16, 16, 64, torch.float16),
    Shape(16, 4096, 16, 16, 64, torch.float16),
    Shape(1, 1920, 32, 32, 64, torch.float16),
    Shape(1, 2048, 16, 16, 128, torch.float16),
    Shape(1, 2048, 32, 8, 128, torch.bfloat16),
    Shape(1, 4096, 32, 8, 128, torch.bfloat16),
)
GRID = tuple(
    Shape(65536 // tokens, tokens, 16, 16, d, torch.float16, tokens // 8 * tail)
    for d in (64, 128)
    for tokens in (128, 256, 512, 1024, 2048, 4096)
    for tail in (0, 1)
)
SHAPES = {"models": MODELS, "grid": GRID}
NAMES = ("cuDNN", "FlashAttention-2", "eager")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["models"], help="(default: models)")
    parser.add_argument("--contestants", nargs="+", choices=NAMES, default=NAMES, help="who takes part beside ours (default: all)")
    parser.add_argument("--calls", type=int, default=40, help="calls of each kind (default: %(default)s)")


def main(arguments: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("short sequences are timed on a GPU, and there is none here")
    print("host forward and both in microseconds; one by one and in a stream in milliseconds; peak in MiB")
    for shape in [shape for name in arguments.shapes for shape in SHAPES[name]]:
        print(shape)
        for name, (call, leaves, dout) in contestants(shape, names=arguments.contestants).items():
            both = lambda call=call, leaves=leaves, dout=dout: torch.autograd.grad(call(), leaves, dout)  # noqa: E731
            peak = peak_of(both)
            hosts = host(call, arguments.calls), host(both, arguments.calls)
            rates = f"one by one {alone(both, arguments.calls):6.3f}   stream {stream(both, arguments.calls):6.3f}"
            print(f"    {name:18} host {hosts[0]:4.0f} {hosts[1]:5.0f}   {rates}   peak {peak:5.0f}", flush=True)


Contestant = tuple[Callable[[], torch.Tensor], list[torch.Tensor], torch.Tensor]


def contestants(shape: Shape, device: str = "cuda", names: Sequence[str] = NAMES) -> dict[str, Contestant]:
    """By name: a call, its leaves, and the gradient of its result. Results are compared first, on the live rows.

    names: who takes part beside ours. cuDNN and FlashAttention-2 need a GPU.
    """
    torch.manual_seed(0)
    b, s, h, hk, d, live = shape.batch, shape.tokens, shape.heads, shape.kv_heads, shape.head_dim, shape.live
    leaves = [torch.randn(b, s, heads, d, device=device, dtype=shape.dtype, requires_grad=True) for heads in (h, hk, hk)]
    dout = torch.randn(b, s, h, d, device=device, dtype=shape.dtype)
    dout[:, live:] = 0
    mask = ra.documents(lengths=[live]) if shape.tail else ra.causal()

    def heads_first() -> list[torch.Tensor]:
        return [x[:, :live].transpose(1, 2) for x in leaves]

    def torch_by(backend: SDPBackend) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*heads_first(), is_causal=True, enable_gqa=h != hk).transpose(1, 2)

        return call

    def eager() -> torch.Tensor:
        q, k, v = heads_first()
        k, v = (x.repeat_interleave(h // hk, dim=1) for x in (k, v))
        later = torch.ones(live, live, dtype=torch.bool, device=device).triu(1)
        scores = (q @ k.transpose(2, 3) * d**-0.5).masked_fill(later, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2)

    calls = {"ringattn": lambda: ra.ring_attention(*leaves, mask=mask)}
    if device == "cuda":
        calls |= {"cuDNN": torch_by(SDPBackend.CUDNN_ATTENTION), "FlashAttention-2": torch_by(SDPBackend.FLASH_ATTENTION)}
    calls["eager"] = eager
    found: dict[str, Contestant] = {}
    for name, call in calls.items():
        if name not in ("ringattn", *names):
            continue
        try:
            out = call().detach()
        except torch.OutOfMemoryError:
            continue
        found[name] = call, leaves, dout[:, : out.shape[1]]
        if name == "ringattn":
            ours = out[:, :live]
        elif not torch.allclose(ours, out, atol=2e-2, rtol=2e-2):
            raise SystemExit(f"{shape}: {name} does not compute what we do")
    return found


def host(call: Callable[[], object], calls: int) -> float:
    """Microseconds of the host for a call while the GPU is behind; the median."""
    times = []
    for i in range(calls):
        if i % _AHEAD == 0:
            torch.cuda.synchronize()
            torch.cuda._sleep(_BUSY)
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return median(times) * 1e6


def alone(call: Callable[[], object], calls: int) -> float:
    """Milliseconds of a call, with nothing queued ahead, until the GPU has done it; the median."""
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return median(times) * 1e3


def stream(call: Callable[[], object], calls: int) -> float:
    """Milliseconds a call, one right after the other."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls


def peak_of(call: Callable[[], object]) -> float:
    """MiB that a call takes on top of what is there, after calls of its kind."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
