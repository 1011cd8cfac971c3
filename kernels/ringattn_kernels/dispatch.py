"""Which kernels run, and why: the one place that chooses.

    choice = choose_backward(q, k, v, dout, table)      # of kernels <Kernels.HOPPER_FUSED: ...>, for the reason 'sm_90'
    backward(..., kernels=Kernels.PLAIN)                # overrides the choice; forward takes the same argument
    backward(..., deterministic=True)                   # leaves HOPPER_FUSED out; the default follows torch.use_deterministic_algorithms

The logger of this module logs each choice once, at debug level. If the version of Triton, or TRITON_OVERRIDE_ARCH, rules out the kernels
made for this GPU, it logs a warning instead.
"""

import enum
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from . import hopper
from .config import architecture, overridden
from .modifiers import Modifiers
from .queries import Queries
from .score_arguments import facts_of, hopper_obstacle
from .table import TileTable, kind

logger = logging.getLogger(__name__)


class Kernels(enum.Enum):
    """The sets of kernels. Those in one pass have a backward only."""

    PLAIN = "plain Triton"
    HOPPER = "Gluon, for Hopper"
    HOPPER_ORDERED = "Gluon, for Hopper, in one pass that adds dq in a fixed order"
    HOPPER_FUSED = "Gluon, for Hopper, in one pass that adds dq in no fixed order"


@dataclass(frozen=True)
class Choice:
    """The kernels to run, and the reason in a few words. is_odd: users of such a GPU would expect others."""

    kernels: Kernels
    reason: str
    is_odd: bool = False


def choose_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    kernels: Kernels | None = None,
    modified: str | None = None,
) -> Choice:
    """The kernels for one call of `forward`; `kernels`, if given, is the caller's wish.

    modified: why Hopper kernels do not do to scores what is asked for, empty where they do; None if nothing is asked for.
    """
    if kernels in (Kernels.HOPPER_FUSED, Kernels.HOPPER_ORDERED):
        raise ValueError(f"{kernels} has no forward: pass {Kernels.HOPPER} or {Kernels.PLAIN}")
    _check_wish(kernels, modified)

    def on_hopper() -> Choice:
        obstacle = hopper.forward.obstacle(q, k, v, softmax_scale) or modified or ""
        return Choice(Kernels.PLAIN, obstacle) if obstacle else Choice(Kernels.HOPPER, "sm_90")

    return _choose("forward", q.device, kernels, on_hopper)


def choose_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    table: TileTable,
    kernels: Kernels | None = None,
    deterministic: bool | None = None,
    modified: Mapping[Kernels, str] | None = None,
) -> Choice:
    """The kernels for one call of `backward`; `kernels`, if given, is the caller's wish.

    modified: for each set of Hopper kernels what `choose_forward` asks of them all.
    deterministic: whether the same inputs must give the same bits of dq; None follows `torch.are_deterministic_algorithms_enabled()`.
    The bits of dk and dv are the same in any case.
    """
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if kernels == Kernels.HOPPER_FUSED and deterministic:
        raise ValueError(
            f"{kernels} is not deterministic, but deterministic results are asked for: "
            f"pass {Kernels.HOPPER_ORDERED}, {Kernels.HOPPER} or none"
        )
    d, v_dim = q.shape[3], v.shape[3]
    made = () if hopper.obstacle else _made_for(d, v_dim, deterministic)
    if not hopper.obstacle and kernels not in (None, Kernels.PLAIN, *made):
        other = made[0] if made else Kernels.PLAIN
        raise ValueError(f"{kernels} has none for head dims {d} and {v_dim}: pass {other} or none")
    obstacles = {each: modified[each] if modified else "" for each in made}
    _check_wish(kernels, obstacles.get(kernels))
    able = [each for each in made if not obstacles[each]]

    def on_hopper() -> Choice:
        obstacle = hopper.backward.obstacle(q, k, v, dout, table)
        if obstacle or not able:
            no_others = f"there are no others for head dims {d} and {v_dim}"
            return Choice(Kernels.PLAIN, obstacle or next(iter(obstacles.values()), no_others))
        if able[0] == Kernels.HOPPER_ORDERED and not hopper.fused.has_items_for_turns(k, table):
            return Choice((*able, Kernels.PLAIN)[1], "sm_90, and too few items to take turns")
        return Choice(able[0], "sm_90")

    return _choose("backward", q.device, kernels, on_hopper)


def forward_kernels(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: TileTable,
    softmax_scale: float,
    kernels: Kernels | None,
    modifiers: Modifiers | None = None,
) -> Kernels:
    """The kernels that `choose_forward` chooses, kept with the table."""
    key = ("forward kernels", kind(q), kind(k), kind(v), q.device, softmax_scale, kernels, *facts_of(modifiers))

    def choose() -> Kernels:
        modified = None if modifiers is None else hopper_obstacle(modifiers, table, softmax_scale)
        return choose_forward(q, k, v, softmax_scale, kernels, modified).kernels

    return table.derived(key, choose)


def backward_kernels(
    queries: Queries,
    k: torch.Tensor,
    v: torch.Tensor,
    table: TileTable,
    softmax_scale: float,
    kernels: Kernels | None = None,
    deterministic: bool | None = None,
    modifiers: Modifiers | None = None,
    sums: bool = False,
) -> Kernels:
    """The kernels that `choose_backward` chooses, kept with the table. sums: whether gradients of modifiers are asked for."""
    q, dout = queries.q, queries.dout
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    kinds = kind(q), kind(k), kind(v), kind(dout), q.device
    key = ("backward kernels", *kinds, softmax_scale > 0, kernels, deterministic, sums, *facts_of(modifiers))

    def choose() -> Kernels:
        modified = None
        if modifiers is not None:
            obstacle = hopper_obstacle(modifiers, table, softmax_scale)
            in_one = obstacle or hopper.fused.modified_obstacle(q, v, modifiers, sums, deterministic)
            in_two = obstacle or hopper.backward.modified_obstacle(modifiers, sums)
            modified = {Kernels.HOPPER: in_two, Kernels.HOPPER_ORDERED: in_one, Kernels.HOPPER_FUSED: in_one}
        return choose_backward(q, k, v, dout, table, kernels, deterministic, modified).kernels

    return table.derived(key, choose)


@functools.cache
def _made_for(d: int, v_dim: int, deterministic: bool) -> tuple[Kernels, ...]:
    """The Hopper kernels that compute head dims d of q and k, and v_dim of v, the fastest first."""
    made = {
        Kernels.HOPPER_FUSED: None if deterministic else hopper.head_dims.in_one(d, v_dim),
        Kernels.HOPPER_ORDERED: hopper.head_dims.in_one(d, v_dim),
        Kernels.HOPPER: hopper.head_dims.in_two(d, v_dim),
    }
    return tuple(kernels for kernels, dims in made.items() if dims is not None)


def _check_wish(kernels: Kernels | None, modified: str | None) -> None:
    if modified and kernels not in (None, Kernels.PLAIN):
        raise ValueError(f"{kernels} is asked for, but {modified}: pass {Kernels.PLAIN} or none")


def _choose(what: str, device: torch.device, wish: Kernels | None, on_hopper: Callable[[], Choice]) -> Choice:
    """The caller's wish; else, on Hopper, the choice of `on_hopper`; else the plain kernels."""
    if wish not in (None, Kernels.PLAIN) and hopper.obstacle:
        raise ValueError(f"{wish} is asked for, but {hopper.obstacle}: install one of these, or pass {Kernels.PLAIN} or none")
    if wish is not None:
        choice = Choice(wish, "the caller's wish")
    elif (arch := architecture(device)) != "sm_90":
        named = overridden()
        reason = f"{arch} is not sm_90" if named is None else f"TRITON_OVERRIDE_ARCH is {named}"
        choice = Choice(Kernels.PLAIN, reason, is_odd=named is not None)
    else:
        choice = Choice(Kernels.PLAIN, hopper.obstacle, is_odd=True) if hopper.obstacle else on_hopper()
    _log(what, choice)
    return choice


@functools.cache
def _log(what: str, choice: Choice) -> None:
    logger.log(logging.WARNING if choice.is_odd else logging.DEBUG, "%s runs %s: %s", what, choice.kernels.value, choice.reason)
