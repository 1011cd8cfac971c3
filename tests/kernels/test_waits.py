"""Fewer waits, and the same order: of any two calls, and of each with what lies before and after the list in the caller's stream."""

import random

import pytest

from ringattn_kernels.waits import After, Do, Mark, ordered

CALLER = "caller"


def before(listed):
    """By call: all that comes before it, as names of calls, "begin" (before the list in the caller's stream); "end" is after it there."""
    done = {CALLER: frozenset({"begin"})}  # by stream
    marks, found = {}, {}
    for x in [*listed, Do(CALLER, "end")]:
        now = done.get(x.stream, frozenset())
        if isinstance(x, Do):
            found[x.call] = now
            done[x.stream] = now | {x.call}
        elif isinstance(x, Mark):
            marks[x.name] = now
        else:
            done[x.stream] = now | marks[x.name]
    return found


def calls_of(listed):
    return [x for x in listed if isinstance(x, Do)]


def kinds(listed):
    return [(type(x).__name__.lower(), x.stream) for x in listed]


def some_list(rng):
    """Calls, marks and waits on up to six streams, as passes have them: most marks are waited for at once, by several."""
    streams = [CALLER, *range(rng.randint(0, 5))]
    listed, marks = [], []
    for number in range(rng.randint(0, 60)):
        stream, kind = rng.choice(streams), rng.random()
        if kind < 0.35:
            listed.append(Do(stream, number))
        else:
            if kind < 0.8 or not marks:
                marks.append(number)
                listed.append(Mark(stream, number))
            name = rng.choice(marks[-3:])
            listed += [After(other, name) for other in rng.sample(streams, rng.randint(0, len(streams)))]
    return listed


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_the_same(seed):
    rng = random.Random(seed)
    for _ in range(100):
        listed = some_list(rng)
        found = ordered(listed, CALLER)
        assert calls_of(found) == calls_of(listed)
        assert before(found) == before(listed)
        names = [x.name for x in found if isinstance(x, Mark)]
        waited = {x.name for x in found if isinstance(x, After)}
        assert len(set(names)) == len(names) and set(names) == waited
        assert len(found) <= len(listed)


def test_a_point_that_several_wait_for_is_marked_once():
    listed = [Do(CALLER, 1), Mark(CALLER, "a"), After(1, "a"), Mark(CALLER, "b"), After(2, "b"), Do(1, 2), Do(2, 3)]
    found = ordered(listed, CALLER)
    assert kinds(found) == [
        *(("do", CALLER), ("mark", CALLER), ("after", 1), ("do", 1), ("after", 2), ("do", 2)),
    ]


def test_streams_that_do_nothing_are_passed_over():
    """As one that only joins others, and one that waits after its last call."""
    listed = [Do(1, 1), Mark(1, "a"), After(2, "a"), Mark(2, "b"), After(CALLER, "b"), After(1, "b"), After(3, "b")]
    assert kinds(ordered(listed, CALLER)) == [("do", 1), ("mark", 1), ("after", CALLER)]


def test_many_wait_for_many_through_one():
    listed = [Do(stream, stream) for stream in range(4)]
    listed += [x for stream in range(4) for x in (Mark(stream, stream), After("join", stream))]
    listed += [
        Mark("join", "all"),
        *(After(stream, "all") for stream in range(4, 8)),
        *(Do(stream, stream) for stream in range(4, 8)),
    ]
    found = kinds(ordered(listed, CALLER))
    assert (sum(kind == "mark" for kind, _ in found), sum(kind == "after" for kind, _ in found)) == (5, 8)


@pytest.mark.parametrize("changed", ["wait", "mark"])
def test_a_list_with_less_has_another_order(changed):
    """The test's own notion of order sees a wait that is missing, and a mark in another place."""
    listed = [Do(1, 1), Mark(1, "a"), Do(1, 2), After(CALLER, "a"), Do(CALLER, 3)]
    other = [x for x in listed if not isinstance(x, After)] if changed == "wait" else [Mark(1, "a"), Do(1, 1), *listed[2:]]
    assert before(other) != before(listed)
