"""What computes a rank's own segments: `torch_kernels()`, in plain torch, or `fla_kernels()`, the Triton kernels of flash-linear-attention.

Both compute the recurrence of `chunks.py`, from a state that each sequence begins with to the one that it ends with. Plain torch works
everywhere, in fp32 or wider, and is what fla is tested against. fla (Yang and Zhang 2024, https://github.com/fla-org/flash-linear-attention)
works on GPUs, in the dtype of q, k and v: it multiplies matrices in that dtype, and sums in fp32. It has a function for each kind:

    decay             without beta        with beta
    none, a number    chunk_simple_gla    chunk_gated_delta_rule
    a vector          chunk_gla           chunk_kda

On Hopper GPUs with Triton 3.4 to 3.7.0, the backward pass of chunk_simple_gla and chunk_gated_delta_rule is wrong with decays
(fla 0.6 refuses it): there a number a head runs as a vector of equal numbers.

They take logarithms of decays, betas after their sigmoid, tensors (b, s, h, d) and states (n, h, d_k, d_v). Sequences of several lengths
come as one row of tokens with their bounds (`cu_seqlens`).

Shapes: b batch, s tokens, hk heads of q and k, h heads of v, m sequences.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from .chunks import Chunks

_log = logging.getLogger(__name__)

_FUNCTIONS = {  # by whether the decay is a vector, and whether there is a beta
    (False, False): ("fla.ops.simple_gla", "chunk_simple_gla"),
    (True, False): ("fla.ops.gla", "chunk_gla"),
    (False, True): ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    (True, True): ("fla.ops.kda", "chunk_kda"),
}
_ARGUMENTS = {"q", "k", "v", "scale", "initial_state", "output_final_state", "cu_seqlens"}  # that all of them must take
HALF = (torch.bfloat16, torch.float16)
_MULTIPLE, _MOST = 16, 256  # of head dims: what a product of matrices needs, and what fla takes
_ERASES = -80.0  # its exponential is 2e-35: fla would subtract one -inf from another


@dataclass(frozen=True, eq=False)
class Recurred:
    """Some sequences that have been run: the states after them, (m, b, h, d_k, d_v), and a function that gives out (b, s, h, d_v)."""

    finals: torch.Tensor
    read: Callable[[], torch.Tensor]


class RecurrenceKernels(ABC):
    """What computes the recurrences of a rank's own tokens. Make one with `torch_kernels()` or `fla_kernels()`.

    graphs_are_small: whether what `run` keeps for the backward pass is about as large as its input.
    """

    graphs_are_small = False

    @abstractmethod
    def refusal(self, q: torch.Tensor, v: torch.Tensor, decay: torch.Tensor | None, beta: torch.Tensor | None) -> str | None:
        """Why these kernels cannot compute a call; None if they can."""

    @abstractmethod
    def dtype(self, q: torch.Tensor) -> torch.dtype:
        """Of outputs, and of what is multiplied with states."""

    @abstractmethod
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor | None,
        beta: torch.Tensor | None,
        initial: torch.Tensor,
        lengths: Sequence[int],
        scale: float,
    ) -> Recurred:
        """Run m sequences of these lengths, at least 1 each, that lie one after the other in s. Differentiable.

        q, k: (b, s, hk, d_k); v: (b, s, h, d_v), of one dtype. decay: (b, s, h), (b, s, h, d_k) or None; beta: (b, s, h) or None; initial:
        (m, b, h, d_k, d_v), all of fp32 or wider.
        """


@dataclass(frozen=True)
class TorchKernels(RecurrenceKernels):
    """Plain torch: `torch_kernels()`."""

    def refusal(self, q: torch.Tensor, v: torch.Tensor, decay: torch.Tensor | None, beta: torch.Tensor | None) -> str | None:
        return None

    def dtype(self, q: torch.Tensor) -> torch.dtype:
        return torch.promote_types(q.dtype, torch.float32)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor | None,
        beta: torch.Tensor | None,
        initial: torch.Tensor,
        lengths: Sequence[int],
        scale: float,
    ) -> Recurred:
        wide = self.dtype(q)
        q, k, v = q.to(wide) * scale, k.to(wide), v.to(wide)
        q, k = (repeated(x, v.shape[2]) for x in (q, k))
        chunks = Chunks(k, v, decay, beta, initial, lengths)
        return Recurred(chunks.finals, lambda: chunks.read(q))

    def __repr__(self) -> str:
        return "torch_kernels()"


@dataclass(frozen=True)
class FlaKernels(RecurrenceKernels):
    """The kernels of flash-linear-attention: `fla_kernels()`."""

    graphs_are_small = True

    def refusal(self, q: torch.Tensor, v: torch.Tensor, decay: torch.Tensor | None, beta: torch.Tensor | None) -> str | None:
        if q.device.type != "cuda":
            return f"fla computes on GPUs, but q is on {q.device}"
        if q.shape[3] % _MULTIPLE or v.shape[3] % _MULTIPLE or max(q.shape[3], v.shape[3]) > _MOST:
            return f"fla needs head dims that are multiples of {_MULTIPLE} up to {_MOST}, but q has {q.shape[3]} and v has {v.shape[3]}"
        if q.dtype == torch.float64:
            return "fla does not compute in float64"
        found = _function(runs_vectors(decay, beta, q.device), beta is not None)
        return found if isinstance(found, str) else None

    def dtype(self, q: torch.Tensor) -> torch.dtype:
        return q.dtype

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor | None,
        beta: torch.Tensor | None,
        initial: torch.Tensor,
        lengths: Sequence[int],
        scale: float,
    ) -> Recurred:
        if not lengths:
            return Recurred(initial, lambda: v)
        (b, s, h, _), m = v.shape, len(lengths)
        vectors = runs_vectors(decay, beta, q.device)
        function = _function(vectors, beta is not None)
        assert not isinstance(function, str), function
        options: dict[str, Any] = {}
        if beta is None:
            q, k = (repeated(x, h) for x in (q, k))  # its delta rules alone share heads of q and k
        else:
            options["beta"] = beta
        if decay is None and beta is not None:
            decay = torch.zeros_like(beta)
        if decay is not None:
            decay = decay.clamp(min=_ERASES)
            options["g"] = decay[..., None].expand(*decay.shape, q.shape[3]) if vectors and decay.dim() == 3 else decay
        rows = {"q": q, "k": k, "v": v, **options}
        state = initial.transpose(0, 1).flatten(0, 1)  # (b m, h, d_k, d_v)
        bounds = None
        if m > 1:
            # one row of tokens, the sequences of each row of the batch after those of the row before
            rows = {name: x.flatten(0, 1)[None] for name, x in rows.items()}
            bounds = bounds_of_rows(tuple(lengths) * b, v.device)
        out, final = function(**rows, scale=scale, initial_state=state, output_final_state=True, cu_seqlens=bounds)
        return Recurred(final.unflatten(0, (b, m)).transpose(0, 1), lambda: out.reshape(b, s, h, -1))

    def __repr__(self) -> str:
        return "fla_kernels()"


def torch_kernels() -> TorchKernels:
    """Compute a rank's own tokens of a recurrence in plain torch: in fp32, or fp64 for fp64 input, on every device.

    >>> import torch, ringattn as ra
    >>> q, k, v = torch.randn(3, 1, 16, 2, 8).unbind()
    >>> ra.linear_attention(q, k, v, kernels=ra.torch_kernels()).shape
    torch.Size([1, 16, 2, 8])
    """
    return TorchKernels()


def fla_kernels() -> FlaKernels:
    """Compute a rank's own tokens of a recurrence by flash-linear-attention, on GPUs (https://github.com/fla-org/flash-linear-attention).

    The package `fla-core` is enough, from 0.6 on. Head dims are multiples of 16, at most 256. Products of matrices have the dtype of q,
    fp32 in TF32, and sums are fp32. What passes between ranks is fp32 in any case. A decay below -80, also -inf, counts as -80, a factor of
    2e-35.

    A call raises ValueError, on every rank, if its tensors do not fit, or if fla is not installed or lacks what the call needs.
    """
    return FlaKernels()


def choose_kernels(q: torch.Tensor, v: torch.Tensor, decay: torch.Tensor | None, beta: torch.Tensor | None) -> RecurrenceKernels:
    """The kernels of a call that names none: fla's for bf16 and fp16, where they can compute it; else plain torch."""
    if q.dtype not in HALF:
        return TorchKernels()
    refusal = FlaKernels().refusal(q, v, decay, beta)
    _say("fla_kernels()" if refusal is None else "torch_kernels()", refusal or "fla is installed, and q is on a GPU")
    return FlaKernels() if refusal is None else TorchKernels()


def check_kernels(kernels: RecurrenceKernels, q: torch.Tensor, v: torch.Tensor, decay: torch.Tensor | None, beta: Any) -> None:
    """Raise ValueError if kernels that a user named cannot compute a call."""
    if not isinstance(kernels, RecurrenceKernels):
        raise ValueError(f"kernels is {kernels!r}, but must be torch_kernels(), fla_kernels() or None")
    refusal = kernels.refusal(q, v, decay, beta)
    if refusal is not None:
        raise ValueError(f"kernels is {kernels!r}, but {refusal}: pass kernels=torch_kernels(), or None to choose by what is there")


def runs_vectors(decay: torch.Tensor | None, beta: torch.Tensor | None, device: torch.device) -> bool:
    """Whether fla runs a call by its functions for decays that are vectors."""
    if decay is not None and decay.dim() == 4:
        return True
    return (decay is not None or beta is not None) and device.type == "cuda" and _lacks_numbers(device)


def repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(b, s, hk, d) to (b, s, heads, d): each head serves as many."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


@functools.lru_cache(64)
def bounds_of_rows(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Cumulative lengths on the device, for fla. Kept, as fla keeps what it derives from the same tensor."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int64, device=device)


@functools.cache
def _lacks_numbers(device: torch.device) -> bool:
    """Whether fla's functions for a number a head have no backward pass, or a wrong one."""
    try:
        import triton
    except ImportError:  # so fla's functions cannot be imported either, which says why
        return False
    version = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:3])
    return torch.cuda.get_device_capability(device)[0] == 9 and (3, 4, 0) <= version < (3, 7, 1)


@functools.cache
def _function(vector: bool, delta: bool) -> Callable[..., tuple[torch.Tensor, torch.Tensor]] | str:
    """fla's function of a kind, or why there is none."""
    module, name = _FUNCTIONS[vector, delta]
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        return f"fla, flash-linear-attention, cannot be imported ({error})"
    version = getattr(importlib.import_module("fla"), "__version__", "of an unknown version")
    needed = _ARGUMENTS | ({"g"} if vector or delta else set()) | ({"beta"} if delta else set())
    missing = sorted(needed if function is None else needed - set(inspect.signature(function).parameters))
    if function is None:
        return f"fla {version} has no {module}.{name}, as 0.6 has"
    if missing:
        return f"{module}.{name} of fla {version} takes no {' and no '.join(missing)}, as that of 0.6 does"
    return function


@functools.cache
def _say(name: str, reason: str) -> None:
    """Log a choice, and why, once."""
    _log.info("recurrences of half precision run with %s: %s", name, reason)
