"""Instructions: what one rank does in a pass, as an ordered list.

`program.py` compiles a schedule into these lists. `runtime/passes.py` runs a list, `memory.py` counts its bytes,
`predict/simulation.py` times it, and `predict/timeline.py` draws it.

A list holds every step of the pass in order. All ranks number the steps alike, so that each instruction says which step it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from ringattn_kernels.table import TileTable

from ..geometry.rows import Rows


class Holds(Enum):
    """What the rows of a buffer are."""

    KV = "K and V, in the dtype of the input"
    SUMS = "sums of dK and dV, in fp32 (fp64 for fp64)"


class Stream(Enum):
    """Where an instruction runs on the device. On a device without streams, and by default, all three are the caller's stream."""

    CALLER = "the stream that was current when the pass began"
    LAUNCHES = "two streams that take turns, so that a launch may begin before the last one has ended"
    EXCHANGES = "messages, and the sums of what they bring"


@dataclass(frozen=True, eq=False)
class Buffer:
    """Rows that a rank holds during a pass: its own K/V or sums, those of other ranks, or a staging buffer for sums on their way."""

    rows: int
    holds: Holds


class Message(NamedTuple):
    """Rows of a buffer that go to a peer, or come from it. `whole`: these are all rows of the buffer, in order."""

    peer: int
    buffer: Buffer
    rows: Rows
    whole: bool


@dataclass(frozen=True, eq=False)
class Open:
    """A buffer begins to fill. It takes the memory of `reuse`, a buffer of the same size that ends here, or new memory."""

    step: int
    buffer: Buffer
    reuse: Buffer | None = None


@dataclass(frozen=True, eq=False)
class Close:
    """Nothing reads or writes these buffers any more: let go of their memory."""

    step: int
    buffers: tuple[Buffer, ...]


@dataclass(frozen=True, eq=False)
class Zero:
    """Set rows [begin, end) of a buffer to zero."""

    step: int
    buffer: Buffer
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class Exchange:
    """Start the messages of a step, on the stream of exchanges. `at_rest`: see `Transport.exchange`."""

    step: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    at_rest: bool = False


@dataclass(frozen=True, eq=False)
class Wait:
    """What the stream of exchanges does next comes after the messages of the exchange under way."""

    step: int


@dataclass(frozen=True, eq=False)
class Launch:
    """Attend from the rank's queries to rows [begin, end) of `keys`, on the streams of launches.

    In the backward pass `sums` are those of the dK/dV of `keys`: rows [begin, end) are added to with `add`, and written otherwise (with
    zeros, if there is no live pair). `last`: no launch of the pass follows.
    """

    step: int
    keys: Buffer
    begin: int
    end: int
    pairs: int  # live (query, key) pairs
    make_tiles: Callable[[], TileTable]
    sums: Buffer | None = None
    add: bool = False
    last: bool = False

    @cached_property
    def tiles(self) -> TileTable:
        """The live pairs. They are made at their first use, because counting does not need them."""
        return self.make_tiles()

    @property
    def made(self) -> TileTable | None:
        """The live pairs, if they have been made."""
        return self.__dict__.get("tiles")


@dataclass(frozen=True, eq=False)
class Add:
    """Add the sums in a staging buffer to rows of another buffer, on a stream."""

    step: int
    staging: Buffer
    buffer: Buffer
    rows: Rows
    stream: Stream = Stream.EXCHANGES


@dataclass(frozen=True, eq=False)
class Fence:
    """What `stream` does next comes after all that the others have been given so far. The caller's stream waits for both others.

    Exchanges of a pass with a `far` launch come after that launch alone.
    """

    step: int
    stream: Stream


Instruction = Open | Close | Zero | Exchange | Wait | Launch | Add | Fence
