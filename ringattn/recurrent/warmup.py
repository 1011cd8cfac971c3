"""`python -m ringattn warm --recurrent` compiles fla's kernels ahead of time, and lets Triton's tuner choose among their configurations.

fla has up to 48 configurations of a kernel. Triton compiles and times them one after another when a call first needs the kernel, which
takes minutes for each kind of layer. Here many processes compile them at the same time, into Triton's cache, without running them. One
process then makes the calls: nothing is left to compile, and the tuner takes 20 instead of 100 milliseconds for each configuration. fla
keeps what the tuner chose in Triton's cache (`FLA_CACHE_RESULTS=0` prevents it), so later processes neither compile nor tune.

Shapes: h heads of values with states (d_k, d_v), hk heads of queries and keys.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

from ..check import integer
from ..geometry.layout import Layout, contiguous, zigzag
from ..transport import Alone, SilentTransport, Transport
from .convolution import causal_conv1d
from .kernels import fla_kernels
from .linear_attention import linear_attention

KINDS = {  # the words of `plan --recurrent`: whether the decay is none, a number or a vector, and whether there is a beta
    "none": ("none", False),
    "number": ("number", False),
    "vector": ("vector", False),
    "delta": ("number", True),
    "delta-vector": ("vector", True),
}
_COMPILED_TOKENS = 2048  # of calls that are compiled and not run: kernels are the same for all multiples of 1,024
_WIDTH = 4  # of convolutions
_MOST_PROCESSES = 32
_TUNING = 20  # milliseconds that the tuner runs a configuration


@dataclass(frozen=True)
class RecurrentLayer:
    """What kernels are compiled for. `text` is KIND:HEADS:D_K:D_V, or with the heads of queries and keys KIND:HEADS:D_K:D_V:KEY_HEADS."""

    text: str
    decay: str
    delta: bool
    h: int
    d_k: int
    d_v: int
    hk: int

    @classmethod
    def parse(cls, text: str) -> RecurrentLayer:
        """Raises ValueError for another form."""
        kind, *sizes = text.split(":")
        if kind not in KINDS or len(sizes) not in (3, 4) or not all(size.isdecimal() and int(size) for size in sizes):
            raise ValueError(
                f"--recurrent is {text!r}, but takes KIND:HEADS:D_K:D_V or KIND:HEADS:D_K:D_V:KEY_HEADS, where KIND is one of "
                f"{', '.join(KINDS)}: delta:32:128:128:16"
            )
        h, d_k, d_v, hk = (*map(int, sizes), int(sizes[0]))[:4]
        return cls(text, *KINDS[kind], h, d_k, d_v, hk)

    def run(self, tokens: int, group: Transport, layout: Layout, dtype: torch.dtype, device: str) -> None:
        """One forward and one backward pass of a rank that holds `tokens`: of the convolution and of the recurrence."""

        def random(*shape: int, **options: Any) -> torch.Tensor:
            options.setdefault("dtype", dtype)
            return torch.randn(1, tokens, *shape, device=device, **options)

        convolved = random(2 * self.hk * self.d_k + self.h * self.d_v).requires_grad_()
        weight = torch.randn(convolved.shape[2], _WIDTH, device=device, dtype=dtype, requires_grad=True)
        out = causal_conv1d(convolved, weight, layout=layout, group=group)
        torch.autograd.grad(out, (convolved, weight), torch.ones_like(out))
        q, k = (torch.nn.functional.normalize(random(self.hk, self.d_k), dim=3).requires_grad_() for _ in range(2))
        v = random(self.h, self.d_v).requires_grad_()
        shape = {"none": None, "number": (self.h,), "vector": (self.h, self.d_k)}[self.decay]
        # so slow that a state reaches all rows
        decay = None if shape is None else (-1e-4 * random(*shape, dtype=torch.float32).abs()).requires_grad_()
        beta = random(self.h, dtype=torch.float32).sigmoid().requires_grad_() if self.delta else None
        leaves = [x for x in (q, k, v, decay, beta) if x is not None]
        out = linear_attention(q, k, v, decay=decay, beta=beta, layout=layout, group=group, kernels=fla_kernels())
        torch.autograd.grad(out, leaves, torch.ones_like(out))


def warm_recurrent(
    texts: Sequence[str],
    *,
    ranks: int = 3,
    tokens: int = 16384,
    dtype: torch.dtype = torch.bfloat16,
    processes: int | None = None,
) -> tuple[float, float]:
    """Compile fla's kernels of layers, and let the tuner choose, as calls on up to `ranks` ranks need them.

    texts: of `RecurrentLayer`. tokens: of a rank, in the calls that are timed. From three ranks on, `zigzag` gives a rank two
    segments that follow others. processes: how many compile, by default one for each core, at most 32.

    Returns the seconds that compiling took, and those of tuning. Raises ValueError for layers that fla cannot compute here.
    """
    layers = [RecurrentLayer.parse(text) for text in texts]
    integer("--ranks", ranks, least=1)
    integer("--tokens", tokens, least=1)
    if not torch.cuda.is_available():
        raise ValueError("warm compiles kernels for this machine's GPU, but it has none: run it where layers will run")
    count = min(_MOST_PROCESSES, os.cpu_count() or 1) if processes is None else integer("--processes", processes, least=1)
    began = time.perf_counter()
    start_processes(_compile_share_and_end, (count, layers, ranks, dtype), count, start_method="spawn")
    compiled = time.perf_counter()
    with tuning_briefly():
        _run_all(layers, ranks, tokens, dtype)
    torch.cuda.synchronize()
    return compiled - began, time.perf_counter() - compiled


def _compile_share_and_end(*options: Any) -> None:
    """In a process of its own, which ends at once: at an orderly end, threads of libraries that still run abort it."""
    _compile_share(*options)
    os._exit(0)


def _compile_share(share: int, of: int, layers: Sequence[RecurrentLayer], ranks: int, dtype: torch.dtype) -> None:
    with compiling_only(share, of):
        _run_all(layers, ranks, _COMPILED_TOKENS, dtype)


def _run_all(layers: Sequence[RecurrentLayer], ranks: int, tokens: int, dtype: torch.dtype) -> None:
    """A rank with one segment that begins the sequence, one with another that follows others, and one with two that follow others."""
    calls: list[tuple[Transport, Layout]] = [(Alone(), contiguous(tokens, 1))]
    if ranks > 1:
        calls.append((SilentTransport(0, 2), zigzag(2 * tokens, 2)))
    if ranks > 2:
        calls.append((SilentTransport(1, 3), zigzag(3 * tokens, 3)))
    for layer in layers:
        for group, layout in calls:
            layer.run(layout.lengths[group.rank], group, layout, dtype, "cuda")


@contextlib.contextmanager
def compiling_only(share: int = 0, of: int = 1) -> Iterator[None]:
    """Within the block Triton's kernels are compiled and not run: of the configurations of kernels that are tuned, one of `of` shares."""
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources, PTXASError
    from triton.runtime.jit import JITFunction

    run, run_tuned = JITFunction.run, Autotuner.run
    firsts: dict[Autotuner, int] = {}  # a number for each kernel's first configuration, the same in all processes
    counted = 0

    def compile_one(kernel: Any, *args: Any, **options: Any) -> Any:
        return run(kernel, *args, **{**options, "warmup": True})

    def compile_share(tuner: Any, *args: Any, **options: Any) -> None:
        nonlocal counted
        tuner.nargs = dict(zip(tuner.arg_names, args))
        configs = tuner.prune_configs(options)
        if tuner not in firsts:
            firsts[tuner] = counted
            counted += len(configs)
        for number, config in enumerate(configs, firsts[tuner]):
            if number % of == share:
                # the tuner leaves out what cannot be compiled
                with contextlib.suppress(OutOfResources, CompileTimeAssertionFailure, PTXASError):
                    tuner.fn.run(*args, **{**options, **config.all_kwargs()})

    JITFunction.run, Autotuner.run = compile_one, compile_share
    try:
        yield
    finally:
        JITFunction.run, Autotuner.run = run, run_tuned


@contextlib.contextmanager
def tuning_briefly() -> Iterator[None]:
    """Within the block Triton's tuner takes a fifth of its usual time for a configuration: the median of at least five runs."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    before = Autotuner.do_bench

    def brief(kernel_call: Any, quantiles: Any) -> Any:
        return do_bench(kernel_call, warmup=1, rep=_TUNING, quantiles=quantiles)

    Autotuner.do_bench = property(lambda tuner: brief)  # pyrefly: ignore[bad-assignment]
    try:
        yield
    finally:
        Autotuner.do_bench = before
