"""An all-gather of small rows by one kernel on each GPU, which writes into the others' memory and waits for what they write into its own.

Each program has a part of the row, and flags of its own: it writes its part to every rank, raises its flag there to the number of its
turn, waits until the flags of all ranks have come that far, and copies the parts that have come. No program waits for another one of
its GPU. Parts of two turns lie in two halves: a rank writes turn n + 2 only once it has every rank's part of turn n + 1, which that
rank sent after it had read turn n. Turns are counted on the device, so that a CUDA graph can replay a launch.
"""

import torch
import triton
import triton.language as tl

from . import launches

_PROGRAMS = 64
_BLOCK = 1024
_WARPS = 4


def flag_words(size: int) -> int:
    """int32s of all ranks' flags on one rank."""
    return size * _PROGRAMS


@triton.jit(do_not_specialize=["rank"])
def all_gather_kernel(
    rows_ptr, arena_ptr, bases_ptr, turns_ptr, words, rank, room, SIZE: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):
    """rows (SIZE, words) int32, of which this rank has its own. See the module and `all_gather`."""
    program = tl.program_id(0)
    turn = tl.load(turns_ptr + program) + 1
    FLAGS: tl.constexpr = SIZE * PROGRAMS
    half = FLAGS + (turn & 1).to(tl.int64) * SIZE * room
    first, step = program * BLOCK, tl.num_programs(0) * BLOCK
    for begin in range(first, words, step):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(rows_ptr + rank.to(tl.int64) * words + at, mask=at < words)
        for peer in range(SIZE):
            if peer != rank:
                there = tl.load(bases_ptr + peer).to(tl.pointer_type(tl.int32)) + half + rank.to(tl.int64) * room
                there = tl.multiple_of(there, 16)  # rows' places begin at such addresses
                tl.store(there + at, x, mask=at < words)
    # all threads have written before one of them raises the flag, which other GPUs see after what was written
    tl.debug_barrier()
    for peer in range(SIZE):
        if peer != rank:
            flag = tl.load(bases_ptr + peer).to(tl.pointer_type(tl.int32)) + rank * PROGRAMS + program
            tl.atomic_xchg(flag, turn, sem="release", scope="sys")
    for peer in range(SIZE):
        if peer != rank:
            # the difference is right also where turns begin anew
            while tl.atomic_add(arena_ptr + peer * PROGRAMS + program, 0, sem="acquire", scope="sys") - turn < 0:
                pass
    tl.debug_barrier()
    for begin in range(first, words, step):
        at = begin + tl.arange(0, BLOCK)
        for peer in range(SIZE):
            if peer != rank:
                x = tl.load(arena_ptr + half + peer * room + at, mask=at < words, cache_modifier=".cg")
                tl.store(rows_ptr + peer * words + at, x, mask=at < words)
    tl.store(turns_ptr + program, turn)


def all_gather(rows: torch.Tensor, arena: torch.Tensor, bases: torch.Tensor, turns: torch.Tensor, rank: int) -> None:
    """Fill the other ranks' rows of rows (ranks, words), int32 as all the rest.

    arena: this rank's, `flag_words(ranks)` flags that began as zeros, and room for 2 x ranks rows. bases: int64, the addresses of all
    ranks' arenas. turns: (flag_words(1),), zeros at first, the same tensor in every call.
    """
    size, words = rows.shape
    room = (arena.numel() - flag_words(size)) // (2 * size)
    assert rows.is_contiguous() and words <= room
    programs = min(_PROGRAMS, -(-words // _BLOCK))
    moving: dict[str, launches.Moving] = dict(rows_ptr=rows, arena_ptr=arena, bases_ptr=bases, turns_ptr=turns, rank=rank)

    def make() -> tuple[int, dict]:
        return programs, moving | dict(words=words, room=room, SIZE=size, PROGRAMS=_PROGRAMS, BLOCK=_BLOCK)

    launches.launch(all_gather_kernel, None, (size, words, room), moving, make, num_warps=_WARPS)
