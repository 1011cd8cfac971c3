"""Fills ranks with parts of documents, each to its share of tokens and of work, so that few rows of K/V move.

Cutting a causal document at its row m makes the later part need the K/V of m rows from elsewhere, so what moves is the sum of all cuts'
rows. Two kinds of cuts suffice:

- a *tail*, the last rows of a long document, has much work in few tokens: it fills a rank that has room for work;
- a *head*, the first rows of a document, has little work in many tokens and moves few rows: it fills a rank that has room for tokens.

Ranks are filled one after another. A share is the mean, over the ranks still to be filled, of the tokens and of the work that are left.
A rank takes the longest documents that fit, as long as the rest of its room can still be filled: from the shortest documents without too
much work, from tails of the longest with enough. Where no document fits, a tail of x rows, the shortest documents and a head fill the
room exactly. Such an x exists: with x = 0 these rows have the least work, with the largest x the most, and the share lies between. As
every share is the mean of what is left, errors do not add up.

Work is counted in live pairs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate, islice
from typing import NamedTuple

# what a rank's first documents may use of its slack; the rest is for rounding
_SLACK = 0.9
# documents of up to this share of a rank's room are taken many at a time
_SMALL = 1 / 2


class DocumentPart(NamedTuple):
    """Rows [begin, end) of a document of `length` rows at `start`, whose row q sees the rows k with `lo <= q - k <= hi` of it."""

    start: int
    length: int
    lo: int
    hi: int
    begin: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.begin

    def cut(self, begin: int, end: int) -> DocumentPart:
        return DocumentPart(*self[:4], begin, end)

    def head(self, rows: int) -> int:
        """Work of the first rows: their live pairs."""
        return self._before(self.begin + rows) - self._before(self.begin)

    def tail(self, rows: int) -> int:
        """Work of the last rows."""
        return self._before(self.end) - self._before(self.end - rows)

    def _before(self, row: int) -> int:
        """Live pairs of the rows before one: row i sees min(i - lo, length - 1) - max(i - hi, 0) + 1 rows."""
        below, above = row - self.length - self.lo, row - 1 - self.hi
        pairs = row * (row + 1) // 2 - self.lo * row
        if below > 0:
            pairs -= below * (below + 1) // 2
        return pairs - above * (above + 1) // 2 if above > 0 else pairs


class Pool:
    """Parts that no rank holds yet, those with the least work a token first: the order of lengths, if documents are whole."""

    def __init__(self, parts: list[DocumentPart], rows: list[int], work: list[int]) -> None:
        self.parts, self.rows, self.work = parts, rows, work
        self.density = [work / rows for work, rows in zip(work, rows)]
        self.all_rows, self.all_work = sum(rows), sum(work)

    def take(self, begin: int, end: int) -> tuple[list[DocumentPart], int, int]:
        """Remove the parts [begin, end). Returns them, their rows and their work."""
        some = slice(begin, end)
        found = self.parts[some], sum(self.rows[some]), sum(self.work[some])
        for column in (self.parts, self.work, self.rows, self.density):
            del column[some]
        self.all_rows -= found[1]
        self.all_work -= found[2]
        return found

    def put(self, part: DocumentPart) -> None:
        rows = part.rows
        if rows:
            work = part.head(rows)
            at = bisect_left(self.density, work / rows)
            self.parts.insert(at, part)
            self.rows.insert(at, rows)
            self.work.insert(at, work)
            self.density.insert(at, work / rows)
            self.all_rows += rows
            self.all_work += work

    def first(self, rows: int) -> tuple[list[int], list[int]]:
        """Running sums of rows and of work, over the first parts, until they have more than `rows`."""
        count = 32
        while True:
            sums = list(accumulate(islice(self.rows, count)))
            if count >= len(self.rows) or sums[-1] > rows:
                return sums, list(accumulate(islice(self.work, count)))
            count *= 4

    def has(self, work: float, rows: int) -> bool:
        """Whether so many rows of the last parts' tails have that much work."""
        for part, density in zip(reversed(self.parts), reversed(self.density)):
            # a tail has more work a token than the whole part
            if work <= 0 or (rows <= part.rows and density * rows >= work):
                return True
            some = min(rows, part.rows)
            work -= part.tail(some)
            rows -= some
            if rows <= 0:
                break
        return work <= 0


class Room:
    """What a rank may still take, rows and work, the slack of both, and the parts that it has taken."""

    def __init__(self, rows: float, work: float, row_slack: float, work_slack: float) -> None:
        self.rows, self.work, self.row_slack, self.work_slack = rows, work, row_slack, work_slack
        self.parts: list[DocumentPart] = []

    def add(self, parts: list[DocumentPart], rows: int, work: int) -> None:
        self.parts += parts
        self.rows -= rows
        self.work -= work


def fill_ranks(pool: Pool, world_size: int, most_rows: float, most_work: float, whole: bool) -> list[list[DocumentPart]]:
    """The parts of each rank. `whole`: ranks take whole documents first."""
    shards = []
    for left in range(world_size, 1, -1):
        rows, work = pool.all_rows / left, pool.all_work / left
        room = Room(rows, work, _SLACK * max(0, most_rows - rows), _SLACK * max(0, most_work - work))
        cut = whole and _take_whole(pool, room)
        while pool.parts and room.rows > room.row_slack and room.rows > 0.5:
            _fill(pool, room, cut)
        shards.append(room.parts)
    # later parts of a document need the earlier ones: let these come from the ranks just before
    return [pool.parts, *reversed(shards)]


def _take_whole(pool: Pool, room: Room) -> bool:
    """Take the longest documents that fit. Returns whether the longest of all does not, so that it must be cut."""
    rows_before, work_before = pool.first(int(room.rows))
    rows_of, work_of, density = pool.rows, pool.work, pool.density

    def least(rows: float) -> float:
        """Work of so many rows of the shortest documents."""
        if rows <= 0:
            return 0
        count = bisect_right(rows_before, rows)
        if not count:
            return rows * density[0]
        return work_before[count - 1] + (rows - rows_before[count - 1]) * density[count if count < len(density) else -1]

    def least_with(at: int) -> float:
        return work_of[at] + least(room.rows - rows_of[at])

    while pool.parts and room.rows > room.row_slack:
        most_rows, most_work = room.rows + room.row_slack, room.work + room.work_slack
        at = bisect_right(pool.rows, most_rows) - 1
        if at >= 0 and least_with(at) > most_work:
            at = bisect_right(range(at), most_work, key=least_with) - 1
        while at >= 0 and (pool.rows[at] > most_rows or least_with(at) > most_work):  # what is left of a cut document
            at -= 1
        if not room.parts and at < len(pool.parts) - 1:
            return True
        if at < 0:
            break
        begin, end = _some(pool, room, at) if pool.rows[at] < _SMALL * room.rows else (at, at + 1)
        rows, work = sum(pool.rows[begin:end]), sum(pool.work[begin:end])
        if begin == end or work + least(room.rows - rows) > room.work + room.work_slack / 2:
            begin, end, rows, work = at, at + 1, pool.rows[at], pool.work[at]
        if not pool.has(room.work - room.work_slack - work, int(room.rows - rows)):
            break
        room.add(*pool.take(begin, end))
    return False


def _some(pool: Pool, room: Room, at: int) -> tuple[int, int]:
    """Neighbours in the pool, up to the part `at`, that nearly fill the room with about as much work a token as it has."""
    middle = min(bisect_left(pool.density, room.work / room.rows), at)
    begin = max(0, middle - int(room.rows / pool.rows[middle]) // 2)
    sums = list(accumulate(pool.rows[begin : at + 1]))
    return begin, begin + bisect_right(sums, room.rows)


def _fill(pool: Pool, room: Room, cut: bool) -> None:
    """Fill the room with the shortest documents, a head, and a tail of the shortest document that has work enough (`cut`: of the last)."""
    rows, last = round(room.rows), len(pool.parts) - 1
    at = last
    if not cut:
        at = min(last, bisect_left(range(last), room.work, key=lambda i: pool.parts[i].tail(min(rows, pool.rows[i]))))
    (long,), long_rows, long_work = pool.take(at, at + 1)
    rows_before, work_before = pool.first(rows)

    def rest(tail: int) -> tuple[int, int, int, bool]:
        """The rows with the least work beside a tail: (work, whole parts, rows of a head, whether it is the long part's)."""
        left, own = rows - tail, long_rows - tail
        count = bisect_right(rows_before, left)
        beyond, work = (left - rows_before[count - 1], work_before[count - 1]) if count else (left, 0)
        choices = []
        if count < len(pool.parts):
            choices.append((work + pool.parts[count].head(beyond), count, beyond, False))
        if beyond <= own:
            choices.append((work + long.head(beyond), count, beyond, True))
        if left <= own:
            choices.append((long.head(left), 0, left, True))
        return min(choices)

    def work_with(tail: int) -> int:
        return long.tail(tail) + rest(tail)[0]

    most, tail = min(rows, long_rows), 0
    if work_with(0) < room.work - room.work_slack:
        if most == long_rows and work_with(most) < room.work:
            room.add([long], long_rows, long_work)
            return
        tail = max(0, bisect_right(range(most + 1), room.work, key=work_with) - 1)
    work, count, head, own = rest(tail)
    parts, _, _ = pool.take(0, count)
    if tail:
        parts.append(long.cut(long.end - tail, long.end))
    other = None if own or not head else pool.take(0, 1)[0][0]
    if other is not None:
        parts.append(other.cut(other.begin, other.begin + head))
        pool.put(other.cut(other.begin + head, other.end))
        head = 0
    elif head:
        parts.append(long.cut(long.begin, long.begin + head))
    pool.put(long.cut(long.begin + head, long.end - tail))
    room.add(parts, rows, long.tail(tail) + work)
