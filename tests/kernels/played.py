"""Plays the partitions of a Gluon kernel on a CPU: their own source runs, in threads that take turns at random, with numbers left out.

Gluon has no interpreter. What can be found without one is whether partitions wait for one another for ever, and whether a block of shared
memory is overwritten that somebody still reads. Barriers are counted as the hardware does. A copy ends at any time after it was asked for.
A product reads its blocks from its start until a warpgroup has waited for it. Values are replaced by what they were made of: a block is
the corner that was copied to it, scores are the corners of two blocks, and a sum is the list of all scores that went into it.
"""

import itertools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

_MOST_TURNS = 100_000
_CHANGE = 0.02  # how often another partition, or none, comes late
# how far the copy engine is with a store
_ASKED, _READ, _WRITTEN = range(3)


class Nothing:
    """A value that does not matter: whatever is done with it gives nothing."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def _nothing(self, *_, **__):
        return self

    __call__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __lt__ = __ge__ = __and__ = __getitem__ = _nothing
    __rfloordiv__ = _nothing

    def __eq__(self, other):
        return self

    __hash__ = None


NOTHING = Nothing()


class Number(int):
    """An integer of a kernel."""

    def to(self, _dtype):
        return self

    def __add__(self, other):
        return number(super().__add__(other))

    def __mul__(self, other):
        return number(super().__mul__(other))

    def __floordiv__(self, other):
        return number(super().__floordiv__(other))

    def __mod__(self, other):
        return number(super().__mod__(other))

    def __sub__(self, other):
        return number(super().__sub__(other))

    def __and__(self, other):
        return number(super().__and__(other))

    __radd__, __rmul__ = __add__, __mul__


def number(x):
    return Number(x) if isinstance(x, int) else x


@dataclass(frozen=True)
class Pointer:
    """Into an array of integers."""

    array: np.ndarray
    offset: int = 0

    def __add__(self, count):
        return Pointer(self.array, self.offset + count)


class Stopped(BaseException):
    """Ends the thread of a partition after another one has failed."""


@dataclass
class Partition:
    """A thread that goes on when the machine lets it."""

    name: str
    ready: Callable[[], bool] = lambda: True
    done: bool = False
    may_go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    products: list = field(default_factory=list)  # under way
    stores: list = field(default_factory=list)  # how far the copy engine is with each
    unchecked: bool = False  # products are of blocks that nobody waited for, until the next wait


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes are there."""

    def __init__(self, count: int) -> None:
        self.count, self.pending, self.bytes, self.phase = count, count, 0, 0

    def arrive(self, count: int, more_bytes: int = 0) -> None:
        self.pending -= count
        self.bytes += more_bytes
        assert self.pending >= 0, "more arrived than a barrier counts"
        if self.pending == self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


@dataclass
class Block:
    """A block of shared memory. content: what was copied or stored there last."""

    name: str
    content: Any = None
    readers: int = 0
    filling: bool = False

    def fill(self, content) -> None:
        assert not self.readers and not self.filling, f"{self.name} is overwritten while it is read or filled"
        self.content = content

    def release(self) -> None:
        self.readers -= 1

    def load(self, *_) -> Any:
        self.read()
        self.release()
        return NOTHING

    def index(self, _):
        return self

    def slice(self, *_, **__):
        return self

    permute = index

    def read(self) -> Any:
        assert not self.filling and self.content is not None, f"{self.name} is read before it is full"
        self.readers += 1
        return self.content

    store = fill
    type = NOTHING


class Blocks(list):
    """Blocks or barriers of one allocation."""

    dtype = NOTHING
    shape: tuple[int, ...] = ()

    @property
    def type(self):
        return SimpleNamespace(shape=self.shape)

    def index(self, number):
        return self[number]


def blocks(name: str, count: int, *shape: int) -> Blocks:
    """Empty blocks of this shape."""
    found = Blocks(Block(f"{name}[{i}]") for i in range(count))
    found.shape = (count, *shape)
    return found


def barriers(count: int, arrivals: int = 1) -> Blocks:
    """Barriers that count so many arrivals."""
    return Blocks(Barrier(arrivals) for _ in range(count))


@dataclass
class Product:
    """A product under way, of what it reads."""

    blocks: list
    result: Any
    done: bool = False


class Value:
    """What numbers leave as it is."""

    type = NOTHING

    def _same(self, *_):
        return self

    to = __add__ = __sub__ = _same


@dataclass(frozen=True)
class Scores(Value):
    """Of two blocks, each the name of what it is of and a corner (batch, row, head, column)."""

    left: tuple
    right: tuple

    def __mul__(self, other):
        if isinstance(other, Scores):
            for (_, *mine), (_, *others) in zip((self.left, self.right), (other.left, other.right)):
                assert mine[:2] == others[:2], f"{self} meets {other}"
        return self


@dataclass(frozen=True)
class Sum(Value):
    """An accumulator: the scores whose products with further blocks went into it."""

    parts: tuple = ()

    def __mul__(self, _):
        return self


@dataclass(frozen=True)
class Descriptor:
    """Of blocks that the copy engine moves."""

    name: str
    shape: tuple[int, ...]
    dtype = layout = NOTHING

    @property
    def block_type(self):
        return SimpleNamespace(shape=self.shape, nbytes=2 * int(np.prod(self.shape)))


def mask_scores(p, _segments, _segment, row0, start):
    assert (p.left[2], p.right[2]) == (row0, start), "a mask of another block"
    return p


class Machine:
    """Runs partitions until all are done. Asserts that they end, and that blocks are full when read and stay so until then.

    memory: by name and corner, what the copy engine stored there, with what it added.
    """

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        # of the copy engine, which is fast in some runs, and late in others, with what others see of its writes last of all
        self._haste = self._random.choice([0.01, 0.1, 0.5])
        self._partitions: list[Partition] = []
        self._threads: list[threading.Thread] = []
        self._events: list[Callable[[], None]] = []  # of the copy engine, that may happen now: reads, ...
        self._writes: list[Callable[[], None]] = []  # ... and writes to global memory
        self._filling: list[str] = []
        self._turn = threading.Semaphore(0)
        self._here = threading.local()
        self._failure: BaseException | None = None
        self._late: Partition | None = None  # goes on only where no other one can
        self._named: dict[Any, Barrier] = {}
        self.memory: dict[tuple, Sum] = {}

    # what runs

    def add(self, name: str, program: int, function: Callable, *arguments, **constants) -> None:
        """A partition that calls the function."""
        partition = Partition(name)

        def run() -> None:
            self._here.partition, self._here.program = partition, program
            partition.may_go.acquire()
            try:
                if self._failure is None:
                    function(*arguments, **constants)
                    assert not partition.products, "a product is still under way at the end"
                    assert _ASKED not in partition.stores, "a store may read after the end"
            except Stopped:
                pass
            except BaseException as failure:
                self._failure = self._failure or failure
            partition.done = True
            self._turn.release()

        self._partitions.append(partition)
        self._threads.append(threading.Thread(target=run, daemon=True))

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        try:
            for turns in itertools.count():
                if self._failure is not None or all(x.done for x in self._partitions):
                    break
                assert turns < _MOST_TURNS, "no end"
                self._go_on()
        except AssertionError as failure:
            self._failure = failure
        self._failure, failure = self._failure or Stopped(), self._failure
        for partition in self._partitions:
            if not partition.done:
                self._let_go(partition)
        for thread in self._threads:
            thread.join()
        if failure is not None:
            raise failure
        assert not self._filling, f"nobody waited for {self._filling}"
        # a kernel ends when all its stores have
        while self._writes:
            self._writes.pop()()

    def _go_on(self) -> None:
        """One turn of a partition or of the copy engine."""
        able = [x for x in self._partitions if not x.done and x.ready()]
        if self._random.random() < _CHANGE:
            self._late = self._one_of([None, *self._partitions])
        able = [x for x in able if x is not self._late] or able
        soon, seen = self._random.random(2) < self._haste
        copies = next(filter(None, (self._writes, self._events) if seen else (self._events, self._writes)), None)
        if copies and (soon or not able):
            copies.pop(int(self._random.integers(len(copies))))()
        else:
            assert able, "deadlock: " + ", ".join(x.name for x in self._partitions if not x.done)
            self._let_go(self._one_of(able))

    def _one_of(self, found: list) -> Any:
        return found[int(self._random.integers(len(found)))]

    def _let_go(self, partition: Partition) -> None:
        partition.may_go.release()
        self._turn.acquire()

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let others go on, at least until `ready`."""
        here = self._here.partition
        here.ready = ready
        self._turn.release()
        here.may_go.acquire()
        if self._failure is not None:
            raise Stopped

    # barriers

    def wait(self, barrier: Barrier, parity: int, pred: bool = True) -> None:
        self._here.partition.unchecked = not pred
        if pred:
            self.pause(lambda: barrier.phase & 1 != parity)

    def arrive(self, barrier: Barrier, count: int = 1, pred: bool = True) -> None:
        if pred:
            self.pause()
            barrier.arrive(count)

    def expect(self, barrier: Barrier, count: int) -> None:
        barrier.arrive(1, count)

    def named_barrier(self, kind: str, index: int, some: int = 1) -> None:
        """`bar.sync` or `bar.arrive` of two warpgroups."""
        if kind == "sync":
            self._here.partition.unchecked = not some
        if not some:
            return
        barrier = self._named.setdefault((self._here.program, index), Barrier(2))
        phase = barrier.phase
        barrier.arrive(1)
        if kind == "sync":
            self.pause(lambda: barrier.phase != phase)

    # the copy engine

    def async_load(self, descriptor: Descriptor, corner: list[int], barrier: Barrier, block: Block) -> None:
        self.pause()
        block.fill(None)
        block.filling = True
        self._filling.append(block.name)

        def end() -> None:
            block.filling = False
            self._filling.remove(block.name)
            block.fill((descriptor.name, *corner))
            barrier.arrive(0, -descriptor.block_type.nbytes)

        self._events.append(end)

    def async_store(self, descriptor: Descriptor, corner: list[int], block: Block, add: bool = False) -> None:
        stores, number, content = self._here.partition.stores, len(self._here.partition.stores), block.read()
        place = descriptor.name, tuple(corner)

        def read() -> None:
            block.release()
            stores[number] = _READ
            self._writes.append(write)

        def write() -> None:
            stores[number] = _WRITTEN
            before = self.memory.get(place, Sum()) if add else Sum()
            self.memory[place] = before if content is NOTHING else Sum((*before.parts, *content.parts))

        stores.append(_ASKED)
        self._events.append(read)
        self.pause()

    def async_add(self, descriptor: Descriptor, corner: list[int], block: Block) -> None:
        self.async_store(descriptor, corner, block, add=True)

    def store_wait(self, pending: int) -> None:
        self._wait_for_stores(pending, _READ)

    def wait_until_stored(self, pending: int) -> None:
        self._wait_for_stores(pending, _WRITTEN)

    def _wait_for_stores(self, pending: int, far: int) -> None:
        """Until the copy engine is so far with all but the last of them."""
        stores = self._here.partition.stores
        first = len(stores) - pending
        self.pause(lambda: all(x >= far for x in stores[: max(0, first)]))

    # products; those of blocks that nobody waited for are used by nobody

    def start_sum(self, left, right, acc, add: bool) -> Product:
        """Scores of blocks, panel by panel."""
        here = self._here.partition
        # a sum over the columns goes on with the next ones of the same rows
        before = acc.result if isinstance(acc, Product) else None
        if here.unchecked or before is NOTHING:
            product = Product([], NOTHING)
        else:
            found = [[block.read() for block in blocks] for blocks in (left, right)]
            product = Product([*left, *right], Scores(*(blocks[0] for blocks in found)))
            for first, *rest in [(before or product.result).left, *found[0]], [(before or product.result).right, *found[1]]:
                assert all(first[:4] == other[:4] for other in rest), "columns of different rows are multiplied"
        here.products.append(product)
        return product

    def start_each(self, scores, right, accumulators) -> tuple:
        """Scores times the rows of their right block."""
        products = []
        for block, acc in zip(right, accumulators):
            corner = block.read()
            assert corner[1:4] == scores.right[1:4], f"{corner} for scores of {scores.right}"
            products.append(Product([block], Sum((*acc.parts, scores))))
        self._here.partition.products += products
        return tuple(products)

    def start_over(self, blocks: list[Block], result: Callable[..., Any], count: int = 1) -> Product:
        """Whatever so many products, which take the blocks in turns, make of what lies there: the last of them."""
        here = self._here.partition
        if here.unchecked:
            started = [Product([], NOTHING) for _ in range(count)]
        else:
            total = result(*(block.read() for block in blocks))
            started = [Product(blocks[i::count], total) for i in range(count)]
        here.products += started
        return started[-1]

    def wait_for_products(self, outstanding: int, products) -> tuple:
        self.pause()
        here = self._here.partition
        while len(here.products) > outstanding:
            product = here.products.pop(0)
            product.done = True
            for block in product.blocks:
                block.release()
        assert all(product.done for product in products), "a product is used that nobody waited for"
        return tuple(product.result for product in products)

    def wait_for(self, outstanding: int, deps) -> Any:
        """What products come to; of a single one, not a tuple."""
        results = self.wait_for_products(outstanding, deps)
        return results if len(results) > 1 else results[0]

    # memory

    def load(self, pointer, mask: bool = True, other=0):
        if not isinstance(pointer, Pointer):
            return NOTHING
        return Number(pointer.array.flat[pointer.offset]) if mask else Number(other)

    def store(self, pointer, value, mask=True) -> None:
        if isinstance(pointer, Pointer):
            pointer.array.flat[pointer.offset] = value

    def atomic_add(self, pointer: Pointer, value: int, sem: str):
        self.pause()
        old = Number(pointer.array.flat[pointer.offset])
        pointer.array.flat[pointer.offset] += value
        return old

    def names(self, programs: int) -> dict[str, Any]:
        """What a kernel's source calls, as it is played here."""

        here = self._here

        class Language(Nothing):
            load, store, atomic_add = self.load, self.store, self.atomic_add
            static_range, maximum, minimum = range, max, min

            def arange(self, begin, _end, *_):
                return begin

            def to_tensor(self, x):
                return number(x)

            def where(self, condition, x, y):
                return NOTHING if condition is NOTHING else x if condition else y

            def cdiv(self, x, y):
                return -(-x // y)

            def exp2(self, x):
                return x

            def convert_layout(self, x, *_, **__):
                return x

            def num_programs(self, _axis):
                return programs

            def program_id(self, _axis):
                return here.program

        return dict(
            gl=Language(),
            mbarrier=SimpleNamespace(wait=self.wait, arrive=self.arrive, expect=self.expect),
            tma=SimpleNamespace(store_wait=self.store_wait),
            named_barrier=self.named_barrier,
            async_load=self.async_load,
            async_store=self.async_store,
            async_add_shared_to_global=self.async_add,
            wait_until_stored=self.wait_until_stored,
            start_sum=self.start_sum,
            start_each=self.start_each,
            warpgroup_mma_wait=self.wait_for,
            wait_for_products=self.wait_for_products,
            barrier=self.pause,
            fence_async_shared=lambda: None,
            put=lambda places, place, number: places.__setitem__(place, number),
            take=lambda places, place: places[place],
            part_panels=lambda block, count: (block,) * count,
            reinterpret=lambda block, *_: block,
            pin=lambda x: x,
            pin_pairs=lambda x: x,
            hide_uniform=lambda x, _: x,
        )


def source(module: ModuleType, names: dict[str, Any]) -> SimpleNamespace:
    """The functions of a module of kernels, to be called on a CPU: what they call is `names`, else the other functions' source."""
    return SimpleNamespace(**_globals(module, names, {}))


def _globals(module: ModuleType, names: dict[str, Any], made: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Those of the source's functions. made: of modules, by name."""
    if module.__name__ not in made:
        found = made[module.__name__] = dict[str, Any]()
        for name, value in vars(module).items():
            if name in names:
                found[name] = names[name]
            elif isinstance(value, gl.constexpr):
                found[name] = value.value
            elif isinstance(value, JITFunction) and value.fn.__module__ == module.__name__:
                found[name] = FunctionType(value.fn.__code__, found, name, value.fn.__defaults__)
            elif isinstance(value, JITFunction):
                found[name] = _globals(sys.modules[value.fn.__module__], names, made)[value.fn.__name__]
            else:
                found[name] = value
    return made[module.__name__]
