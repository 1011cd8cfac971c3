"""Which kernels run, and why: the one place where that is chosen.

    choice = choose_backward(q, k, v, dout, table)      # Choice(kernels=<Kernels.HOPPER_FUSED: ...>, reason='sm_90')
    backward(..., kernels=Kernels.PLAIN)                # overrides it, as it does for forward
    backward(..., deterministic=True)                   # leaves HOPPER_FUSED out; by default as torch.use_deterministic_algorithms says

Each choice is logged once, at debug level, by the logger of this module; as a warning where the version of Triton rules out the kernels
that this GPU has.
"""

import enum
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import hopper
from .config import architecture
from .table import TileTable

logger = logging.getLogger(__name__)


class Kernels(enum.Enum):
    """The sets of kernels that there are."""

    PLAIN = "plain Triton"
    HOPPER = "Gluon, for Hopper"
    HOPPER_FUSED = "Gluon, for Hopper, in one pass that adds dq in no fixed order"


@dataclass(frozen=True)
class Choice:
    """The kernels to run, and the reason in a few words."""

    kernels: Kernels
    reason: str


def choose_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, kernels: Kernels | None = None
) -> Choice:
    """The kernels for one call of `forward`; `kernels`, if given, is what the caller wants."""
    if kernels == Kernels.HOPPER_FUSED:
        raise ValueError(f"{kernels} has no forward: pass {Kernels.HOPPER} or {Kernels.PLAIN}")
    return _choose("forward", q.device, kernels, Kernels.HOPPER, lambda: hopper.forward.obstacle(q, k, v, softmax_scale))


def choose_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    table: TileTable,
    kernels: Kernels | None = None,
    deterministic: bool | None = None,
) -> Choice:
    """The kernels for one call of `backward`; `kernels`, if given, is what the caller wants.

    deterministic: whether the same inputs must give the same bits of dq; None follows `torch.are_deterministic_algorithms_enabled()`.
    Those of dk and dv are the same in any case.
    """
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if kernels == Kernels.HOPPER_FUSED and deterministic:
        raise ValueError(f"{kernels} is not deterministic, but deterministic results are asked for: pass {Kernels.HOPPER} or none")

    def obstacle() -> str:
        head_dims = hopper.backward.HEAD_DIMS if deterministic else (*hopper.fused.HEAD_DIMS, *hopper.backward.HEAD_DIMS)
        return hopper.backward.obstacle(q, k, v, dout, table, tuple(dict.fromkeys(head_dims)))

    dims = q.shape[3], v.shape[3]
    fused = not hopper.obstacle and dims in hopper.fused.HEAD_DIMS
    two = not hopper.obstacle and dims in hopper.backward.HEAD_DIMS
    if not hopper.obstacle and ((kernels == Kernels.HOPPER_FUSED and not fused) or (kernels == Kernels.HOPPER and not two)):
        other = Kernels.HOPPER if two else Kernels.PLAIN if deterministic or not fused else Kernels.HOPPER_FUSED
        raise ValueError(f"{kernels} has none for head dims {dims[0]} and {dims[1]}: pass {other} or none")
    fastest = Kernels.HOPPER_FUSED if fused and not deterministic else Kernels.HOPPER
    return _choose("backward", q.device, kernels, fastest, obstacle)


def _choose(what: str, device: torch.device, wish: Kernels | None, fastest: Kernels, obstacle: Callable[[], str]) -> Choice:
    """The caller's wish, or the fastest on Hopper if there is no obstacle to them."""
    if wish in (Kernels.HOPPER, Kernels.HOPPER_FUSED) and hopper.obstacle:
        raise ValueError(f"{wish} is asked for, but {hopper.obstacle}: install one of these, or pass {Kernels.PLAIN} or none")
    if wish is not None:
        choice = Choice(wish, "the caller's wish")
    else:
        arch = architecture(device)
        why_not = hopper.obstacle or obstacle() if arch == "sm_90" else f"{arch} is not sm_90"
        choice = Choice(Kernels.PLAIN, why_not) if why_not else Choice(fastest, arch)
    _log(what, choice)
    return choice


@functools.cache
def _log(what: str, choice: Choice) -> None:
    level = logging.WARNING if choice.reason == hopper.obstacle else logging.DEBUG
    logger.log(level, "%s runs %s: %s", what, choice.kernels.value, choice.reason)
