"""Which kernels run, and why: the one place where that is chosen.

    choice = choose_backward(q, k, v, dout, table)      # Choice(kernels=<Kernels.HOPPER: 'Gluon, for Hopper'>, reason='sm_90')
    backward(..., kernels=Kernels.PLAIN)                # overrides it, as it does for forward

Each choice is logged once, at debug level, by the logger of this module.
"""

import enum
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import hopper_backward, hopper_forward
from .config import architecture
from .table import TileTable

logger = logging.getLogger(__name__)


class Kernels(enum.Enum):
    """The sets of kernels that there are."""

    PLAIN = "plain Triton"
    HOPPER = "Gluon, for Hopper"


@dataclass(frozen=True)
class Choice:
    """The kernels to run, and the reason in a few words."""

    kernels: Kernels
    reason: str


def choose_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, kernels: Kernels | None = None
) -> Choice:
    """The kernels for one call of `forward`; `kernels`, if given, is what the caller wants."""
    return _choose("forward", q.device, kernels, lambda: hopper_forward.obstacle(q, k, v, softmax_scale))


def choose_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, table: TileTable, kernels: Kernels | None = None
) -> Choice:
    """The kernels for one call of `backward`; `kernels`, if given, is what the caller wants."""
    return _choose("backward", q.device, kernels, lambda: hopper_backward.obstacle(q, k, v, dout, table))


def _choose(what: str, device: torch.device, wish: Kernels | None, obstacle: Callable[[], str]) -> Choice:
    """The caller's wish, or Hopper's kernels on Hopper if there is no obstacle to them."""
    if wish is not None:
        choice = Choice(wish, "the caller's wish")
    else:
        arch = architecture(device)
        why_not = obstacle() if arch == "sm_90" else f"{arch} is not sm_90"
        choice = Choice(Kernels.PLAIN, why_not) if why_not else Choice(Kernels.HOPPER, arch)
    _log(what, choice)
    return choice


@functools.cache
def _log(what: str, choice: Choice) -> None:
    logger.debug("%s runs %s: %s", what, choice.kernels.value, choice.reason)
