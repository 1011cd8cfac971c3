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
from math import inf
from typing import NamedTuple

import numpy as np

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
    """Parts that no rank holds yet, those with the least work a token first: the order of lengths, if documents are whole.

    Sums of the first parts, and of the last ones, are kept as far as they have been asked for: ranks ask again after each part that they
    take, and mostly take the last one.

    Parts are numbers: the documents come first, and then what is cut off them. rows, work, density: columns of the parts.
    """

    def __init__(self, documents: np.ndarray, work: np.ndarray, density: np.ndarray) -> None:
        """documents: a (4, n) array of start, length, lo and hi, in the order of parts; work: of each; density: work over rows."""
        self._documents, self._cuts = documents, list[DocumentPart]()
        self._seen: dict[int, DocumentPart] = {}  # documents that somebody has looked at
        self.parts = list(range(len(work)))
        self.rows, self.work, self.density = documents[1].tolist(), work.tolist(), density.tolist()
        self._whole = len(work)
        self.all_rows, self.all_work = sum(self.rows), sum(self.work)
        self._rows_of_first, self._work_of_first = [0], [0]
        # sums of the last parts, among them `_gone` that were taken meanwhile
        self._rows_of_last, self._work_of_last, self._gone = [0], [0], 0

    def part(self, number: int) -> DocumentPart:
        """The part of this number."""
        if number >= self._whole:
            return self._cuts[number - self._whole]
        found = self._seen.get(number)
        if found is None:
            start, length, lo, hi = self._documents[:, number].tolist()
            found = self._seen[number] = DocumentPart(start, length, lo, hi, 0, length)
        return found

    def bounds(self, numbers: list[int], reverse: bool) -> np.ndarray:
        """The positions of parts: (2, n), where each starts and stops. `reverse`: rows count from the end of their document."""
        start, rows = self._documents[:2]
        cuts = [(x.start + x.begin, x.start + x.end) for x in self._cuts]
        if reverse:
            cuts = [(x.start + x.length - x.end, x.start + x.length - x.begin) for x in self._cuts]
        return np.concatenate([[start, start + rows], np.array(cuts, dtype=np.int64).reshape(-1, 2).T], axis=1).take(
            numbers, axis=1
        )

    def cut(self, part: DocumentPart, begin: int, end: int) -> int:
        """The number of a new part: rows [begin, end) of the document of another one."""
        self._cuts.append(DocumentPart(*part[:4], begin, end))
        return self._whole + len(self._cuts) - 1

    def take(self, begin: int, end: int) -> tuple[list[int], int, int]:
        """Remove the parts [begin, end). Returns them, their rows and their work."""
        some = slice(begin, end)
        found = self.parts[some], sum(self.rows[some]), sum(self.work[some])
        self._forget(begin, end, 0)
        for column in (self.parts, self.work, self.rows, self.density):
            del column[some]
        self.all_rows -= found[1]
        self.all_work -= found[2]
        return found

    def take_one(self, at: int) -> tuple[list[int], int, int]:
        """`take` of one part."""
        found = [self.parts[at]], self.rows[at], self.work[at]
        self._forget(at, at + 1, 0)
        del self.parts[at], self.rows[at], self.work[at], self.density[at]
        self.all_rows -= found[1]
        self.all_work -= found[2]
        return found

    def put(self, part: DocumentPart, begin: int, end: int) -> None:
        """Add rows [begin, end) of the document of a part that was taken."""
        rows = end - begin
        if rows:
            number = self.cut(part, begin, end)
            work = self.part(number).head(rows)
            at = bisect_left(self.density, work / rows)
            self._forget(at, at, 1)
            self.parts.insert(at, number)
            self.rows.insert(at, rows)
            self.work.insert(at, work)
            self.density.insert(at, work / rows)
            self.all_rows += rows
            self.all_work += work

    def sums(self, count: int, rows: float) -> tuple[list[int], list[int]]:
        """Rows and work of the first i parts, for i = 0, 1, ... up to `count`, or until they have more than `rows`. Not to be kept."""
        while (known := len(self._rows_of_first)) <= count and self._rows_of_first[-1] <= rows:
            some = slice(known - 1, min(2 * known + 31, count))
            for column, sums in ((self.rows, self._rows_of_first), (self.work, self._work_of_first)):
                sums += islice(accumulate(column[some], initial=sums[-1]), 1, None)
        return self._rows_of_first, self._work_of_first

    def tail(self, at: int, rows: int) -> int:
        """Work of the last so many rows of the part at an index; of all its rows, if it has fewer."""
        return self.work[at] if rows >= self.rows[at] else self.part(self.parts[at]).tail(rows)

    def has(self, work: float, rows: int) -> bool:
        """Whether so many rows of the last parts' tails have that much work."""
        rows_of, work_of, first, parts = self._rows_of_last, self._work_of_last, self._gone, len(self.parts)
        enough_rows, enough_work = rows + rows_of[first], work + work_of[first]
        while (known := len(rows_of) - 1 - first) < parts and rows_of[-1] < enough_rows and work_of[-1] < enough_work:
            some = slice(parts - known - 1, max(0, parts - 2 * known - 32) - 1 if parts > 2 * known + 32 else None, -1)
            for column, sums in ((self.rows, rows_of), (self.work, work_of)):
                sums += islice(accumulate(column[some], initial=sums[-1]), 1, None)
        # whole parts, the last ones, that have fewer rows; the next one has all rows that are left
        end = bisect_left(rows_of, enough_rows, first)
        whole = max(first, end - 1)
        if work_of[whole] >= enough_work:
            return True
        if end == len(rows_of) or not parts:
            return False
        at, rows, work = parts - 1 - whole + first, enough_rows - rows_of[whole], enough_work - work_of[whole]
        # a tail has more work a token than the whole part
        return self.density[at] * rows >= work or self.tail(at, rows) >= work

    def _forget(self, begin: int, end: int, more: int) -> None:
        """The parts [begin, end) are about to be replaced by so many others."""
        del self._rows_of_first[begin + 1 :], self._work_of_first[begin + 1 :]
        after, known = len(self.parts) - end, len(self._rows_of_last) - 1 - self._gone
        if not after and not more and end - begin <= known:
            self._gone += end - begin
        elif after < known:
            del self._rows_of_last[self._gone + after + 1 :], self._work_of_last[self._gone + after + 1 :]


class Room:
    """What a rank may still take, rows and work, the slack of both, and the parts that it has taken."""

    def __init__(self, rows: float, work: float, row_slack: float, work_slack: float) -> None:
        self.rows, self.work, self.row_slack, self.work_slack = rows, work, row_slack, work_slack
        self.parts: list[int] = []

    def add(self, parts: list[int], rows: int, work: int) -> None:
        self.parts += parts
        self.rows -= rows
        self.work -= work


def fill_ranks(pool: Pool, world_size: int, most_rows: float, most_work: float, whole: bool) -> list[list[int]]:
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
    rows_of_first, work_of_first = (sums.copy() for sums in pool.sums(len(pool.parts), room.rows))
    rows_of, work_of, density = pool.rows, pool.work, pool.density

    def least(rows: float) -> float:
        """Work of so many rows of the shortest documents."""
        if rows <= 0:
            return 0
        count = bisect_right(rows_of_first, int(rows)) - 1
        return work_of_first[count] + (rows - rows_of_first[count]) * density[count if count < len(density) else -1]

    def longest(most_work: float, end: int) -> int:
        """The last part before `end` that has at most this work with the least of the rest of the room; -1 if there is none."""
        begin, all_rows, parts = 0, room.rows, len(density)
        while begin < end:
            # `least`, spelled out: packing spends its time here
            middle = (begin + end) // 2
            work, rows = work_of[middle], all_rows - rows_of[middle]
            if rows > 0:
                count = bisect_right(rows_of_first, int(rows)) - 1
                work += work_of_first[count] + (rows - rows_of_first[count]) * density[count if count < parts else -1]
            if work > most_work:
                end = middle
            else:
                begin = middle + 1
        return begin - 1

    while rows_of and room.rows > room.row_slack:
        left, wanted, work_slack = room.rows, room.work, room.work_slack
        most_rows, most_work = left + room.row_slack, wanted + work_slack
        at = bisect_right(rows_of, most_rows) - 1
        if at >= 0 and work_of[at] + least(left - rows_of[at]) > most_work:
            at = longest(most_work, at)
            while at >= 0 and rows_of[at] > most_rows:  # what is left of a cut document
                at -= 1
                while at >= 0 and work_of[at] + least(left - rows_of[at]) > most_work:
                    at -= 1
        if not room.parts and at < len(rows_of) - 1:
            return True
        if at < 0:
            break
        begin, end, rows, work = at, at + 1, rows_of[at], work_of[at]
        if rows < _SMALL * left:
            first, last, some_rows, some_work = _some(pool, room, at)
            if first < last and some_work + least(left - some_rows) <= wanted + work_slack / 2:
                begin, end, rows, work = first, last, some_rows, some_work
        if not pool.has(wanted - work_slack - work, int(left - rows)):
            break
        room.add(*(pool.take_one(begin) if end == begin + 1 else pool.take(begin, end)))
    return False


def _some(pool: Pool, room: Room, at: int) -> tuple[int, int, int, int]:
    """Neighbours in the pool, up to the part `at`, that nearly fill the room with about as much work a token as it has.

    Returns the first, one past the last, their rows and their work.
    """
    middle = min(bisect_left(pool.density, room.work / room.rows), at)
    begin = max(0, middle - int(room.rows / pool.rows[middle]) // 2)
    rows, work = pool.sums(begin, inf)
    most = rows[begin] + int(room.rows)
    if len(rows) <= at + 1 and rows[-1] <= most:
        pool.sums(at + 1, most)
    # one past the last part is at most `at + 1`
    end = bisect_right(rows, most, begin, min(len(rows), at + 2)) - 1
    return begin, end, rows[end] - rows[begin], work[end] - work[begin]


def _fill(pool: Pool, room: Room, cut: bool) -> None:
    """Fill the room with the shortest documents, a head, and a tail of the shortest document that has work enough (`cut`: of the last)."""
    rows, last = round(room.rows), len(pool.parts) - 1
    at = last
    if not cut:
        at = min(last, bisect_left(range(last), room.work, key=lambda i: pool.tail(i, rows)))
    (number,), long_rows, long_work = pool.take(at, at + 1)
    long = pool.part(number)
    rows_of_first, work_of_first = (sums.copy() for sums in pool.sums(len(pool.parts), rows))

    def rest(tail: int) -> tuple[int, int, int, bool]:
        """The rows with the least work beside a tail: (work, whole parts, rows of a head, whether it is the long part's)."""
        left, own = rows - tail, long_rows - tail
        count = bisect_right(rows_of_first, left) - 1
        beyond, work = left - rows_of_first[count], work_of_first[count]
        choices = []
        if count < len(pool.parts):
            choices.append((work + pool.part(pool.parts[count]).head(beyond), count, beyond, False))
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
            room.add([number], long_rows, long_work)
            return
        tail = max(0, bisect_right(range(most + 1), room.work, key=work_with) - 1)
    work, count, head, own = rest(tail)
    parts, _, _ = pool.take(0, count)
    if tail:
        parts.append(pool.cut(long, long.end - tail, long.end))
    if own or not head:
        if head:
            parts.append(pool.cut(long, long.begin, long.begin + head))
        pool.put(long, long.begin + head, long.end - tail)
    else:
        other = pool.part(pool.take(0, 1)[0][0])
        parts.append(pool.cut(other, other.begin, other.begin + head))
        pool.put(other, other.begin + head, other.end)
        pool.put(long, long.begin, long.end - tail)
    room.add(parts, rows, long.tail(tail) + work)
