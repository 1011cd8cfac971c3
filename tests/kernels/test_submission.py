"""Lists of driver calls: what the driver is given, in which order, with which numbers; on a driver that notes its calls."""

import ctypes
import struct
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from ringattn_kernels import native, submission
from ringattn_kernels.submission import Functions, Number, Submission

ADDRESS, INT, SIZE = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t
SIGNATURES = {
    "launch": (ADDRESS, ADDRESS, ctypes.POINTER(ADDRESS), ADDRESS),
    "mark": (ADDRESS, ADDRESS),
    "after": (ADDRESS, ADDRESS, INT),
    "operate": (ADDRESS, INT, ADDRESS, INT),
    "copy": (ADDRESS, ADDRESS, ADDRESS, SIZE, ADDRESS, ADDRESS, SIZE, ADDRESS, ADDRESS),
    "replace_address": (ADDRESS, ADDRESS),
}


class Driver:
    """Notes calls in `calls`, and the attributes of each launch; `failing` gives an error for calls of one function."""

    def __init__(self):
        self.calls, self.failing, self.parameters, self.attributes = [], None, (), []
        self._callbacks = [
            ctypes.CFUNCTYPE(ctypes.c_int, *types)(lambda *given, name=name: self._called(name, given))
            for name, types in SIGNATURES.items()
        ]
        addresses = [ctypes.cast(callback, ADDRESS).value for callback in self._callbacks]
        self.functions = Functions((*addresses, 101, 102, 103), self)

    def _called(self, name, given):
        if name == "launch":
            config = struct.unpack("7I", ctypes.string_at(given[0], 28))
            stream, attributes, count = struct.unpack("QQI", ctypes.string_at(given[0] + 32, 20))
            # each is a kind and, behind 4 bytes, a value of 64
            self.attributes.append([struct.unpack("I4xi", ctypes.string_at(attributes + 72 * i, 12)) for i in range(count)])
            values = [ctypes.string_at(given[2][i], size) for i, size in enumerate(self.parameters)]
            given = given[1], config, stream, *values
        elif name == "operate":
            given = given[0], ctypes.string_at(given[2], 48 * given[1])
        elif name == "copy":
            columns = [list(struct.unpack(f"{given[3]}Q", ctypes.string_at(x, 8 * given[3]))) for x in given[:3]]
            given = *columns, *given[3:]
        elif name == "replace_address":
            ctypes.memmove(given[0], struct.pack("Q", given[1]), 8)
            assert given[0] % 64 == 0
            given = (given[1],)
        self.calls.append((name, *given))
        return 700 if name == self.failing else 0


@pytest.fixture
def driver(monkeypatch):
    class Event:
        made = 0

        def __init__(self):
            Event.made += 1
            self.cuda_event = 900 + Event.made

        def record(self, stream):
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: 0)
    return Driver()


def listed(driver, numbers):
    module = native.submission()
    assert module is not None, "submission.c does not compile"
    return Submission(module, driver.functions, numbers, caller=7)


def run(calls, numbers, later=()):
    calls.begin(numbers)
    calls.finish([*numbers, *later])


class Argument(NamedTuple):
    kind: str
    value: Any
    number: Number | None = None


def launch(calls, arguments, stream, early=False):
    kinds = tuple(x.kind for x in arguments)
    direct = SimpleNamespace(function=5, grid=(6, 1, 2), sizes=(128, 4096), early=early, kinds=kinds)
    numbers = {place: x.number for place, x in enumerate(arguments) if x.number is not None}
    calls.launch(direct, [x.value for x in arguments], numbers, stream)


def operation(kind, address, value):
    return struct.pack("=I4xQQI20x", kind, address, value, 0)


def test_calls_come_in_order_with_the_numbers_of_each_run(driver):
    calls = listed(driver, 2)
    mark = calls.mark(7)
    calls.after(8, mark)
    offset, count = calls.more_numbers(2)
    calls.operate(8, 1, [(1 << 47, count), (4096 + offset, 3)])
    calls.copy(9, [(Number(0, 16), 1 << 46, 100), (64, Number(1, 3) + 5, 200)])
    for numbers in ([1 << 45, 2000, 512, 6], [1 << 44, 3000, 1024, (1 << 32) + 7]):
        driver.calls.clear()
        run(calls, numbers[:2], numbers[2:])
        words = operation(1, 1 << 47, numbers[3] % 2**32) + operation(1, 4096 + numbers[2], 3)
        copies = [numbers[0] + 16, 64], [1 << 46, numbers[1] + 8], [100, 200]
        assert driver.calls == [
            ("mark", 901, 7),
            ("after", 8, 901, 0),
            ("operate", 8, words),
            ("copy", *copies, 2, 101, 102, 1, 103, 9),
        ]


def names_of(driver):
    """The driver's calls, each with its stream."""
    stream = {"launch": 3, "mark": 2, "after": 1, "operate": 1, "copy": -1}
    return [(call[0], call[stream[call[0]]]) for call in driver.calls]


def test_only_what_is_waited_for_is_marked_and_only_once(driver):
    calls = listed(driver, 0)
    for _ in range(2):
        begin = calls.mark(7)
        calls.after(8, begin)
    calls.copy(8, [(1, 2, 3)])
    calls.mark(8)
    calls.after(7, calls.mark(8))
    calls.mark(7)
    calls.after(9, calls.mark(7))
    run(calls, [])
    assert names_of(driver) == [("mark", 7), ("after", 8), ("copy", 8), ("mark", 8), ("after", 7)]


def test_memory_operations_that_follow_each_other_are_one_call(driver):
    calls = listed(driver, 1)
    calls.operate(8, 2, [(64, Number(0))])
    calls.operate(8, 1, [(128, Number(0, 1)), (192, 5)])
    calls.operate(9, 1, [(256, 6)])
    calls.operate(8, 1, [(320, 7)])
    run(calls, [3])
    words = [operation(2, 64, 3) + operation(1, 128, 4) + operation(1, 192, 5), operation(1, 256, 6), operation(1, 320, 7)]
    assert driver.calls == [("operate", stream, word) for stream, word in zip((8, 9, 8), words)]


def test_memory_operations_whose_arguments_lie_apart_are_not_joined(driver):
    calls = listed(driver, 0)
    calls.operate(8, 2, [(64, 1)])
    mark = calls.mark(8)
    calls.after(8, mark)
    calls._room(8)
    calls.operate(8, 2, [(128, 1)])
    for _ in range(300):
        calls.operate(9, 2, [(64, 1)])
    run(calls, [])
    assert [len(call[2]) // 48 for call in driver.calls] == [1, 1, 256, 44]


def test_memory_operations_with_a_point_between_them_are_apart(driver):
    """Whoever waits for the first must not wait for the second; and what the second waits for must not hold up the first."""
    calls = listed(driver, 0)
    calls.operate(8, 2, [(64, 1)])
    mark = calls.mark(8)
    calls.operate(8, 1, [(128, 1)])
    calls.after(9, mark)
    calls.copy(9, [(1, 2, 3)])
    calls.operate(9, 2, [(64, 1)])
    calls.after(9, calls.mark(8))
    calls.operate(9, 1, [(64, 1)])
    run(calls, [])
    wanted = [("operate", 8), ("mark", 8), ("operate", 8), ("mark", 8), ("after", 9), ("copy", 9), ("operate", 9)]
    assert names_of(driver) == [*wanted, ("after", 9), ("operate", 9)]


def test_a_launch_has_its_parameters_as_the_kernel_reads_them(driver):
    arguments = [
        Argument("*fp32", 1 << 47),
        Argument("constexpr", None),
        Argument("*bf16", 1 << 46, Number(0, 256)),
        Argument("i32", -5),
        Argument("i64", 1 << 40),
        Argument("fp32", 0.5),
        Argument("u1", True),
        Argument("*fp32", None),
    ]
    calls = listed(driver, 1)
    launch(calls, arguments, 7)
    driver.parameters = 8, 8, 4, 8, 4, 1, 8, 8, 8
    run(calls, [1 << 45])
    values = [struct.pack("Q", 1 << 47), struct.pack("Q", (1 << 45) + 256), struct.pack("i", -5), struct.pack("q", 1 << 40)]
    values += [struct.pack("f", 0.5), b"\1", bytes(8), bytes(8), bytes(8)]
    assert driver.calls == [("launch", 5, (6, 1, 2, 128, 1, 1, 4096), 7, *values)]


def test_a_launch_may_begin_while_the_one_before_it_ends(driver):
    calls = listed(driver, 0)
    for early in (False, True, False):
        launch(calls, [], 7, early)
    run(calls, [])
    # the driver's number of programmatic stream serialization
    assert driver.attributes == [[], [(6, 1)], []]


def test_a_descriptor_gets_the_address_of_each_run(driver, monkeypatch):
    monkeypatch.setattr(submission, "_descriptor", lambda value: bytes(range(128)))
    calls = listed(driver, 1)
    launch(calls, [Argument("nvTmaDesc", None, Number(0, 64)), Argument("i32", 3)], 7)
    driver.parameters = 128, 4, 8, 8
    for address in (1 << 45, 1 << 44):
        driver.calls.clear()
        run(calls, [address])
        replaced, queued = driver.calls
        assert replaced == ("replace_address", address + 64)
        assert queued[4:6] == (struct.pack("Q", address + 64) + bytes(range(8, 128)), struct.pack("i", 3))


def test_an_object_that_holds_no_descriptor_is_refused():
    with pytest.raises(ValueError, match="holds its descriptor elsewhere"):
        submission._descriptor(object())


@pytest.mark.parametrize("argument", [Argument("fp16", 1.0), Argument("i32", (1, 2))], ids=["type", "tuple"])
def test_arguments_of_unknown_types_are_not_listed(driver, argument):
    with pytest.raises(ValueError):
        launch(listed(driver, 0), [argument], 7)


def test_launches_that_wait_for_nothing_are_queued_before_anything_else(driver):
    """They keep their order, and marks of the caller's stream before and between them stay where they were in that stream."""
    calls = listed(driver, 1)
    (later,) = calls.more_numbers(1)
    begun = calls.mark(7)
    calls.after(8, begun)
    calls.copy(8, [(later, 2, 3)])
    launch(calls, [Argument("*fp32", None, Number(0))], 7)
    halfway = calls.mark(7)
    launch(calls, [Argument("i32", 5)], 7)
    calls.after(9, halfway)
    launch(calls, [Argument("i32", 6)], 9)
    come = calls.mark(8)
    calls.after(7, come)
    launch(calls, [Argument("i32", 7)], 7)
    driver.parameters = (8,)
    calls.begin([1 << 45])
    early = [("mark", 7), ("launch", 7), ("mark", 7), ("launch", 7)]
    assert names_of(driver) == early
    calls.finish([1 << 45, 1 << 46])
    others = [("after", 8), ("copy", 8), ("mark", 8), ("after", 9), ("launch", 9), ("after", 7), ("launch", 7)]
    assert names_of(driver)[4:] == others
    values = [call[4] for call in driver.calls if call[0] == "launch"]
    assert values[0] == struct.pack("Q", 1 << 45) and [value[:4] for value in values[1:]] == [
        struct.pack("i", x) for x in (5, 6, 7)
    ]
    assert driver.calls[5][1] == [1 << 46]


def test_a_launch_is_queued_as_soon_as_its_stream_has_what_it_waits_for(driver):
    """Behind what other ranks may wait for, and before what its stream does not wait for."""
    calls = listed(driver, 0)
    begun = calls.mark(7)
    calls.after(8, begun)
    calls.copy(8, [(1, 2, 3)])
    copied = calls.mark(8)
    calls.operate(8, 2, [(64, 1)])
    calls.after(7, copied)
    calls.after(9, begun)
    calls.operate(9, 1, [(128, 1)])
    calls.copy(9, [(4, 5, 6)])
    launch(calls, [], 7)
    launch(calls, [], 7)
    run(calls, [])
    stage = [("mark", 7), ("after", 8), ("copy", 8), ("mark", 8), ("operate", 8)]
    assert names_of(driver) == [*stage, ("after", 7), ("launch", 7), ("launch", 7), ("after", 9), ("operate", 9), ("copy", 9)]


def test_a_launch_whose_numbers_come_later_is_not_early(driver):
    calls = listed(driver, 1)
    (later,) = calls.more_numbers(1)
    launch(calls, [Argument("*fp32", None, Number(0))], 7)
    launch(calls, [Argument("*fp32", None, later)], 7)
    launch(calls, [Argument("*fp32", None, Number(0))], 7)
    driver.parameters = (8,)
    calls.begin([64])
    assert [call[4] for call in driver.calls] == [struct.pack("Q", 64)]
    calls.finish([64, 128])
    assert [call[4] for call in driver.calls] == [struct.pack("Q", x) for x in (64, 128, 64)]


@pytest.mark.parametrize("kind", ["operate", "copy"])
def test_nothing_is_early_behind_what_the_caller_moves(driver, kind):
    calls = listed(driver, 0)
    calls.operate(7, 1, [(64, 1)]) if kind == "operate" else calls.copy(7, [(1, 2, 3)])
    launch(calls, [], 7)
    calls.begin([])
    assert driver.calls == []
    calls.finish([])
    assert names_of(driver) == [(kind, 7), ("launch", 7)]


def test_tensors_stand_for_their_addresses(driver):
    calls, x, y = listed(driver, 3), torch.empty(4), torch.empty(4)
    calls.copy(9, [(Number(0, 16), Number(1), 100), (64, Number(2), 200)])
    run(calls, [x, 1 << 45, y])
    assert driver.calls[0][1:3] == ([x.data_ptr() + 16, 64], [1 << 45, y.data_ptr()])


def test_a_refused_call_is_an_error_and_ends_the_run(driver):
    calls = listed(driver, 0)
    calls.operate(7, 1, [(64, 1)])
    calls.copy(7, [(1, 2, 3)])
    calls.operate(7, 1, [(64, 1)])
    driver.failing = "copy"
    with pytest.raises(RuntimeError, match="the CUDA driver refused call 1 of a recorded pass with error 700"):
        run(calls, [])
    assert [name for name, *_ in driver.calls] == ["operate", "copy"]


def test_calls_are_counted_from_the_first_part_on(driver):
    calls = listed(driver, 0)
    launch(calls, [], 7)
    calls.copy(8, [(1, 2, 3)])
    driver.failing = "copy"
    with pytest.raises(RuntimeError, match="refused call 1 of"):
        run(calls, [])
