"""Few waits between streams that keep the order of a list of calls.

Whoever lists a pass says, at each place, what must come before what. Much of that is said several times, or follows from the rest. What
counts is the order of the calls: each stream runs its own one after another, and a wait puts a call behind a point of another stream, and
so behind all that this point is behind. `ordered` keeps this relation between any two calls of the list, and that of each with what the
caller's stream was given before the list and is given after it. It keeps the sequence of the calls, too: a device that runs all streams as
one runs them as they were listed.

A call waits only for what neither its stream nor another of its waits is behind (the transitive reduction: Aho, Garey and Ullman 1972).
Where several streams wait for the same points of several others, one stream may wait for all of them, and the others for that stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Stream = Hashable


class Do(NamedTuple):
    """A call that does something on a stream."""

    stream: Stream
    call: Any


class Mark(NamedTuple):
    """The point after all that a stream has been given so far, under a name."""

    stream: Stream
    name: Hashable


class After(NamedTuple):
    """What a stream does next comes after a mark."""

    stream: Stream
    name: Hashable


class Point(NamedTuple):
    """After so many calls of a stream, counted with the stops at which it only waits; 0 of the caller's: before the list."""

    stream: Stream
    calls: int


class _Stop(NamedTuple):
    """Where a stream waits for points, and then does a call, or nothing."""

    stream: Stream
    waits: Sequence[Point]
    call: Do | None


# how many calls of each stream come before something
_Before = dict[Stream, int]


@dataclass
class _Track:
    """Of a stream: what came before each of its points, and what comes before its next one."""

    points: list[_Before]
    next: _Before


def ordered(listed: Sequence[Do | Mark | After], caller: Stream) -> list[Do | Mark | After]:
    """The same calls, with the marks and waits that they need. Names of marks are then `Point`s."""
    last = {x.stream: number for number, x in enumerate(listed) if isinstance(x, Do)} | {caller: len(listed)}
    followers = Counter(x.name for x in listed if isinstance(x, After))
    order = _Precedence(caller)
    for number, x in enumerate(listed):
        if isinstance(x, Do):
            order.add(x.stream, x)
        elif isinstance(x, After):
            order.follow(x.stream, x.name)
        else:
            m, n = len(order.missing(x.stream)), followers[x.name]
            # the stream waits here and its followers for it, if it has to wait anyway, or that takes fewer waits
            if n and m > 1 and (number < last.get(x.stream, -1) or m * n > m + n + 1):
                order.add(x.stream, None)
            order.mark(x.stream, x.name)
    order.add(caller, None)
    return _written(order.stops)


class _Precedence:
    """What comes before what, in a list of which calls, marks and waits are told one after another."""

    def __init__(self, caller: Stream) -> None:
        self.stops: list[_Stop] = []
        self._tracks: dict[Stream, _Track] = {caller: _Track([{caller: 0}], {caller: 0})}
        self._marks: dict[Hashable, _Before] = {}

    def add(self, stream: Stream, call: Do | None) -> None:
        """The stream waits for all that it has to wait for, and does a call, or nothing."""
        self.stops.append(_Stop(stream, self.missing(stream), call))
        track = self._track(stream)
        track.next[stream] = len(track.points)
        track.points.append(dict(track.next))

    def mark(self, stream: Stream, name: Hashable) -> None:
        self._marks[name] = dict(self._track(stream).next)

    def follow(self, stream: Stream, name: Hashable) -> None:
        before = self._track(stream).next
        for other, calls in self._marks[name].items():
            before[other] = max(calls, before.get(other, -1))

    def missing(self, stream: Stream) -> list[Point]:
        """What the stream still has to wait for: neither its last call nor another of these points comes after it."""
        track = self._track(stream)
        points = [Point(*point) for point in track.next.items() if point[1] > track.points[-1].get(point[0], -1)]
        before = [self._tracks[other].points[calls] for other, calls in points]
        return [
            point
            for i, point in enumerate(points)
            if not any(i != j and others.get(point.stream, -1) >= point.calls for j, others in enumerate(before))
        ]

    def _track(self, stream: Stream) -> _Track:
        found = self._tracks.get(stream)
        if found is None:
            # what the stream was given before the list counts for its own calls alone
            found = self._tracks[stream] = _Track([{}], {})
        return found


def _written(stops: Sequence[_Stop]) -> list[Do | Mark | After]:
    """Stops as a list, in which each point that is waited for is marked as soon as it is reached."""
    awaited = dict.fromkeys(point for stop in stops for point in stop.waits)
    written: list[Do | Mark | After] = [Mark(point.stream, point) for point in awaited if not point.calls]
    calls: Counter[Stream] = Counter()
    for stream, waits, call in stops:
        written += [After(stream, point) for point in waits]
        written += [] if call is None else [call]
        calls[stream] += 1
        point = Point(stream, calls[stream])
        if point in awaited:
            written.append(Mark(stream, point))
    return written
