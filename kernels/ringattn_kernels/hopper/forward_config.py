"""The configurations of the Hopper forward, and which of them runs."""

import functools
from dataclasses import dataclass

from ..config import padded
from ..modifiers import Modifiers
from ..split_choice import SplitChoice, choice
from ..splits import multiprocessors
from ..table import TileTable
from .forward_softcap import caps_late
from .work_queue import WARPGROUP_ROWS

# (warpgroups that compute, programs of a multiprocessor) -> registers of a thread that computes, and of a thread as a program begins
# (None: all that there are); the rest suffices for the threads that copy
REGISTERS = {(2, 1): (240, None), (3, 1): (160, None), (2, 2): (104, 80)}


@dataclass(frozen=True, eq=False)  # looked up in every launch, by identity
class ForwardConfig:
    """`warpgroups` compute 64 query rows each; `stages` blocks of `step` rows of K, and as many of V, are in shared memory at a time.

    q_stages: query blocks in shared memory. turns: warpgroups start their products one after another, in a fixed order.
    paired: a warpgroup runs the next scores and the values before them at once; else it waits for the values first.
    kept: columns of Q that a warpgroup keeps in registers, if one block holds Q's head dim. ahead: exponentials begin before the maximum
    is known.
    programs: of a multiprocessor, side by side. step_time, work_time: microseconds of an H200 for a step, and of a work beside its steps.
    """

    step: int
    stages: int
    warpgroups: int
    q_stages: int
    turns: bool
    paired: bool = True
    programs: int = 1
    kept: int = 0
    ahead: bool = False
    step_time: float = 1.0
    work_time: float = 0.0

    @property
    def block(self) -> int:
        """Query rows of a program."""
        return self.warpgroups * WARPGROUP_ROWS

    @property
    def out_room(self) -> bool:
        """Whether half of the columns of out have a place of their own in shared memory. Three warpgroups would spill."""
        return self.q_stages == 1 and not self.turns

    @property
    def registers(self) -> int:
        """Of a thread that computes."""
        return REGISTERS[self.warpgroups, self.programs][0]

    @property
    def maxnreg(self) -> int | None:
        """Registers of a thread as a program begins."""
        return REGISTERS[self.warpgroups, self.programs][1]


# (head dim of Q and K, head dim of V), at most -> configurations, measured on an H200; the first is the fastest if all multiprocessors
# have much to do and works are long
CONFIGS = {
    (64, 64): (
        ForwardConfig(step=128, stages=4, warpgroups=3, q_stages=3, turns=True, ahead=True, step_time=1.42, work_time=2.9),
        # where works are short, one program works while the other begins or ends
        ForwardConfig(
            step=64, stages=4, warpgroups=2, q_stages=3, turns=False, paired=False, programs=2, step_time=1.14, work_time=2.0
        ),
    ),
    (96, 96): (
        ForwardConfig(step=128, stages=2, warpgroups=3, q_stages=1, turns=True, paired=False, step_time=2.15, work_time=3.0),
        ForwardConfig(step=128, stages=2, warpgroups=2, q_stages=3, turns=False, step_time=1.92, work_time=0.5),
    ),
    (128, 128): (
        ForwardConfig(step=128, stages=2, warpgroups=3, q_stages=1, turns=True, paired=False, step_time=2.62, work_time=3.15),
        ForwardConfig(step=128, stages=2, warpgroups=2, q_stages=3, turns=False, step_time=1.86, work_time=2.25),
    ),
    (192, 128): (ForwardConfig(step=128, stages=2, warpgroups=2, q_stages=1, turns=False),),
    (256, 256): (ForwardConfig(step=64, stages=2, warpgroups=2, q_stages=1, turns=False, kept=64),),
}
# where more registers are needed than any entry of CONFIGS has
ROOMY = {(64, 64): (ForwardConfig(step=128, stages=4, warpgroups=2, q_stages=3, turns=True),)}
# with so many blocks for each multiprocessor the last round does not matter, nor do a block's start and end with so many steps
MANY, LONG = 16, 16


@functools.cache
def configs_for(d: int, dv: int, registers: int = 0) -> tuple[ForwardConfig, ...]:
    """Those with at least so many registers, of the entry with the smallest head dims that hold both.

    An entry of two panels holds only head dims of two panels.
    """
    dims = next(dims for dims in CONFIGS if d <= dims[0] and dv <= dims[1] and panels(*dims) <= panels(d, dv))
    return tuple(how for how in CONFIGS[dims] if how.registers >= registers) or ROOMY[dims]


def registers_for(modifiers: Modifiers | None) -> int:
    """How many registers a thread needs for what happens to scores: most with dropout, and with a softcap before the maximum."""
    if modifiers is None:
        return 0
    roomy = modifiers.dropout is not None or (modifiers.softcap is not None and not caps_late(modifiers))
    return 240 if roomy else 160


def config_for(
    q, v, table: TileTable, splits: int | None = None, modifiers: Modifiers | None = None, processors: int | None = None
) -> ForwardConfig:
    """The configuration that should finish a table first; `splits` and `modifiers` as in `forward`. processors: by default q's GPU's."""
    dims, heads, processors = (q.shape[3], v.shape[3]), q.shape[0] * q.shape[2], processors or multiprocessors(q.device)
    registers = registers_for(modifiers)
    found = configs_for(*dims, registers)
    if len(found) == 1:
        return found[0]

    def chosen(how: ForwardConfig) -> SplitChoice:
        return choice(table, "q", how.block, how.step, heads, 1, processors * how.programs, splits)

    def time(how: ForwardConfig) -> float:
        blocks = chosen(how)
        return how.step_time * blocks.time + how.work_time * -(-blocks.touched * heads // (processors * how.programs))

    def choose() -> ForwardConfig:
        first = found[0]
        if heads * table.q_rows >= MANY * processors * first.block:
            blocks = chosen(first)
            if blocks.steps >= LONG * blocks.touched:
                return first
        return min(found, key=time)

    return table.derived(("hopper forward launch", dims, heads, processors, splits, registers), choose)


def block_dim(head_dim: int) -> int:
    """Columns of a block that holds a head dim; the copy engine fills the rest with zeros."""
    return max(64, padded(head_dim))


def chunks(head_dim: int) -> int:
    """Blocks side by side that hold Q's and K's head dim: three of 64 where one would hold 256."""
    return 3 if 128 < head_dim <= 192 else 1


def panels(d: int, dv: int) -> int:
    """How many panels products take from a block: one of all columns, or two, 96 columns of 128."""
    return 2 if min(d, dv) > 64 and max(d, dv) <= 96 else 1
