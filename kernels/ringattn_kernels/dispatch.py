"""Which kernels run, and why: the one place where that is chosen.

    choice = choose_backward(q, k, v, dout, table)      # Choice(kernels=<Kernels.HOPPER: 'Gluon, for Hopper'>, reason='sm_90')
    backward(..., kernels=Kernels.PLAIN)                # overrides it, as it does for forward

Each choice is logged once, at debug level, by the logger of this module.
"""

import enum
import functools
import logging
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
    if kernels is not None:
        choice = Choice(kernels, "the caller's wish")
    else:
        arch = architecture(q.device)
        obstacle = hopper_forward.obstacle(q, k, v, softmax_scale) if arch == "sm_90" else f"{arch} is not sm_90"
        choice = Choice(Kernels.PLAIN, obstacle) if obstacle else Choice(Kernels.HOPPER, arch)
    _log("forward", choice)
    return choice


def choose_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, table: TileTable, kernels: Kernels | None = None
) -> Choice:
    """The kernels for one call of `backward`; `kernels`, if given, is what the caller wants."""
    if kernels is not None:
        choice = Choice(kernels, "the caller's wish")
    else:
        arch = architecture(q.device)
        obstacle = hopper_backward.obstacle(q, k, v, dout, table) if arch == "sm_90" else f"{arch} is not sm_90"
        choice = Choice(Kernels.PLAIN, obstacle) if obstacle else Choice(Kernels.HOPPER, arch)
    _log("backward", choice)
    return choice


@functools.cache
def _log(what: str, choice: Choice) -> None:
    logger.debug("%s runs %s: %s", what, choice.kernels.value, choice.reason)
