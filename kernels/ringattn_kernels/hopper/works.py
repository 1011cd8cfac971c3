"""Works on the device: the loading partition of a program takes them off a queue, one after another, and hands them to the warpgroups.

The loads of the next work begin while the warpgroups finish the one at hand.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .barriers import look
from .language import barrier
from .tables import FIRST_SEGMENT, LAST_SEGMENT, SPLIT, count_steps, side_by_side


@gluon.jit
def put(places, place, number):
    """Store a number where the warpgroups read it; `barrier` has to follow before another barrier tells them."""
    places.index(place).store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))


@gluon.jit
def hand_out(places, place, number):
    """Store a number where the warpgroups read it, before a barrier tells them."""
    put(places, place, number)
    barrier()


@gluon.jit
def hand_out_all(places, first, numbers, COUNT: gl.constexpr):
    """The same for the first COUNT of some numbers, side by side."""
    for i in gl.static_range(COUNT):
        put(places, first + i, numbers[i])
    barrier()


@gluon.jit
def take(places, place):
    """The number that was stored there."""
    return gl.max(places.index(place).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


class WorkPlaces(NamedTuple):
    """Two places in shared memory for works, with the numbers of a `KeyWork`; barriers: a place is full, K and V are empty."""

    places: gl.tensor
    full: gl.tensor
    keys_empty: gl.tensor


class KeyWorks(NamedTuple):
    """The works of a launch, `count`: each item of each key/value head, in the order of `side_by_side`. A program takes at most `most`.

    drawn_ptr: the number of the next work, how many programs draw no more, and how many works have ended; all are zero before a launch and
    after it.
    """

    items_ptr: gl.tensor
    segments_ptr: gl.tensor
    drawn_ptr: gl.tensor
    count: gl.tensor
    most: gl.tensor
    item_count: gl.tensor
    chunk: gl.tensor
    heads: gl.tensor
    kv_heads: gl.tensor
    group: gl.tensor


class KeyWork(NamedTuple):
    """A block of key rows of one key/value head: steps in all heads of the group, its first row, segments, the head, batch and split.

    There are no more works where steps are less than 0.
    """

    steps: gl.tensor
    block_begin: gl.tensor
    first_segment: gl.tensor
    last_segment: gl.tensor
    head_index: gl.tensor
    batch: gl.tensor
    kv_head: gl.tensor
    split: gl.tensor


NUMBERS = gl.constexpr(len(KeyWork._fields))


@gluon.jit
def load_key_work(works, number, STEP: gl.constexpr):
    """(the work of this number, its item)."""
    item, head_index = side_by_side(number, works.item_count, works.chunk, works.heads)
    ptr = works.items_ptr + item * 4
    block_begin = gl.load(ptr)
    first_segment = gl.load(ptr + FIRST_SEGMENT)
    last_segment = gl.load(ptr + LAST_SEGMENT)
    split = gl.load(ptr + SPLIT)
    steps = count_steps(works.segments_ptr, first_segment, last_segment, STEP, STEP) * works.group
    # a work without a segment is written as zeros: it reads any one segment, and has no step
    first_segment = gl.where(steps > 0, first_segment, 0)
    last_segment = gl.where(steps > 0, last_segment, 0)
    batch, kv_head = head_index // works.kv_heads, head_index % works.kv_heads
    return KeyWork(steps, block_begin, first_segment, last_segment, head_index, batch, kv_head, split), item


@gluon.jit
def keep_pace(works, number, pace):
    """Wait until all works before this one's stretch of `pace` works have ended, so that programs meet the same queries at the same time.

    It waits for works that were drawn earlier, which wait for none that were drawn later.
    """
    if pace > 0:
        before = number // pace * pace
        ended = look(works.drawn_ptr + 2)
        while ended < before:
            ended = look(works.drawn_ptr + 2)


@gluon.jit
def end_work(works, pace):
    """Count a work that ends, where others wait for it."""
    if pace > 0:
        gl.atomic_add(works.drawn_ptr + 2, 1, sem="relaxed")


@gluon.jit
def hand_out_work(of_works, work, taken):
    """Give the warpgroups their next work."""
    hand_out_all(of_works.places, taken % 2 * NUMBERS, work, NUMBERS)
    mbarrier.arrive(of_works.full.index(taken % 2), count=1)


@gluon.jit
def hand_out_end(of_works, taken):
    """Tell the warpgroups that there are no more works."""
    hand_out(of_works.places, taken % 2 * NUMBERS, -1)
    mbarrier.arrive(of_works.full.index(taken % 2), count=1)


@gluon.jit
def take_work(of_works, taken):
    """The work that was handed out."""
    p = of_works.places
    first = taken % 2 * NUMBERS
    return KeyWork(
        take(p, first), take(p, first + 1), take(p, first + 2), take(p, first + 3), take(p, first + 4), take(p, first + 5),
        take(p, first + 6), take(p, first + 7),
    )  # fmt: skip


@gluon.jit
def draw(works, taken):
    """The number of the next work of a program that has taken so many; `works.count` or more if there is none for it.

    Who draws no more says so, and the last one sets the counters back for the next launch.
    """
    number = works.count
    if taken < works.most:
        number = gl.atomic_add(works.drawn_ptr, 1, sem="relaxed")
    if number >= works.count:  # noqa: SIM102, Gluon evaluates both sides of an `and`
        if gl.atomic_add(works.drawn_ptr + 1, 1, sem="relaxed") == gl.num_programs(0) - 1:
            gl.store(works.drawn_ptr, 0)
            gl.store(works.drawn_ptr + 1, 0)
            gl.store(works.drawn_ptr + 2, 0)
    return number
