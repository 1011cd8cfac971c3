"""Passes that are recorded once and replayed: what they allocate and queue, without the Python that led there.

A pass over the same kinds of tensors queues the same launches, copies and waits each time, with other addresses. Finding them costs the
host several times as long as queueing them. So the first call of a kind runs as it is, and builds what is kept; the second one is recorded;
the others are replayed: one allocation for all tensors that live inside the pass, one for each result, and one `Submission`.

A recording holds only if it explains all that happened: nothing but allocations, views, and steps that were noted (`recorder.py`), whose
tensors are inputs, results, allocations of the pass, or tensors that were there before. Otherwise the pass runs as it is for good.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.runtime import driver

from . import submission
from .direct import hooked
from .launches import RecordedLaunch
from .recorder import recorder
from .submission import Number, Submission

if TYPE_CHECKING:
    from .recorder import Later, Step

Tensors = tuple[torch.Tensor, ...]

_KEPT = 64  # recordings of one owner
_ALIGNED = 512  # bytes, as torch's allocator aligns
# bytes inside a pass, at most: larger passes hide the host's time, and need the memory that they let go of on the way
_MOST = 512 << 20
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_VIEWS = {"alias", "as_strided", "detach", "expand", "permute", "select", "slice", "t", "transpose", "unbind", "unsqueeze", "view"}
_QUESTIONS = {"promote_types"}  # of no tensor


def replay(found: dict[tuple, Any], facts: tuple, inputs: Tensors, work: Callable[[], Tensors]) -> Tensors:
    """`work()`, which computes tensors from the inputs on the current CUDA stream, or its replay.

    found: the recordings of one owner, who gives the same `facts` only to passes that do the same with such tensors.
    """
    now = state()
    if now is None:
        return work()
    addresses = [x.data_ptr() for x in inputs]
    key = _key(facts, now, inputs, addresses)
    # calls of many layers are alike, and comparing keys costs less than hashing them
    latest = found.get(facts)
    known = latest[1] if latest is not None and latest[0] == key else found.get(key, _NEW)
    # inputs that begin at one address, such as one tensor given twice, would be taken for one another
    if known is None or len(set(addresses)) < len(addresses):
        return work()
    if isinstance(known, Recording):
        found[facts] = key, known
        return known(addresses)
    if len(found) >= _KEPT:
        found.clear()
    if known is _NEW:
        found[key] = _SEEN
        return work()
    results, found[key] = _record(inputs, addresses, work)
    return results


def recorded(found: dict[tuple, Any], facts: tuple, inputs: Tensors) -> Recording | None:
    """The recording that `replay` would run now for such inputs, if they begin at different addresses; None if there is none.

    It holds while `state()` is the same, for inputs of the same shapes, strides, dtypes and devices, aligned alike.
    """
    now = state()
    known = None if now is None else found.get(_key(facts, now, inputs, [x.data_ptr() for x in inputs]))
    return known if isinstance(known, Recording) else None


def state() -> tuple | None:
    """What recordings depend on besides their inputs: the device, its stream, determinism; None where nothing may be replayed."""
    if torch.cuda.is_current_stream_capturing() or hooked():
        return None
    active = driver.active
    device = active.get_current_device()
    return device, active.get_current_stream(device), torch.are_deterministic_algorithms_enabled()


# a function, its argument if it is not None, and what it must return
Question = tuple[Callable[..., Any], Any, Any]


class InputKinds:
    """What a recording is for: a state of the device, and inputs of the same classes, shapes, strides, dtypes, devices and alignment.

    now: the `state()` of now. questions: what else must be so. Raises ValueError for tensors that have no memory, or no strides.
    """

    def __init__(self, now: tuple, inputs: Tensors, questions: tuple[Question, ...] = ()) -> None:
        try:
            self._kinds = tuple([(type(x), x.shape, x.stride(), x.dtype, x.device, not x.data_ptr() % 16) for x in inputs])
        except (AttributeError, RuntimeError, TypeError) as error:
            raise ValueError("these are no plain tensors") from error
        self._now, self._hash = now, hash((now, *self._kinds))
        active, (device, stream, deterministic) = driver.active, now
        self._questions = (
            *questions,
            (torch.cuda.is_current_stream_capturing, None, False),
            (hooked, None, False),
            (active.get_current_stream, device, stream),
            (active.get_current_device, None, device),
            (torch.are_deterministic_algorithms_enabled, None, deterministic),
        )
        module = submission.load()
        self._same: Callable[..., list[int] | None] = same if module is None else module.same

    def addresses(self, inputs: Tensors) -> list[int] | None:
        """Those of other inputs, if they and the device are now like these, and no two begin at one address; else None."""
        return self._same(self._questions, self._kinds, inputs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InputKinds) and (self._now, self._kinds) == (other._now, other._kinds)

    def __hash__(self) -> int:
        return self._hash


def same(questions: tuple[Question, ...], kinds: tuple, inputs: Tensors) -> list[int] | None:
    """The addresses of tensors of these kinds, if no two are equal, and all questions are answered so; else None. As in `submission.c`."""
    if not all((ask() if x is None else ask(x)) == answer for ask, x, answer in questions):
        return None
    try:
        addresses = [x.data_ptr() for x in inputs]
        found = tuple([(type(x), x.shape, x.stride(), x.dtype, x.device, not a % 16) for x, a in zip(inputs, addresses)])
    except (AttributeError, RuntimeError, TypeError):
        return None
    return addresses if found == kinds and len(set(addresses)) == len(addresses) else None


def quick_swap() -> Callable[..., list[bytes] | None] | None:
    """`swap` of `submission.c`; None where that is not compiled."""
    module = submission.load()
    return None if module is None else module.swap


def _key(facts: tuple, now: tuple, inputs: Tensors, addresses: list[int]) -> tuple:
    # streams of two devices may have one number
    where = now, inputs[0].device
    return facts, where, *[(x.shape, x.stride(), x.dtype, not address % 16) for x, address in zip(inputs, addresses)]


_NEW, _SEEN = object(), object()


class Recording:
    """A pass as allocations and a submission. Its numbers: addresses of inputs, of results, of the memory inside; then those of steps."""

    def __init__(self, device: torch.device, results: Tensors, nbytes: int, listed: Submission, later: list[Later]) -> None:
        self._submission, self._later = listed, later
        kinds = [(tuple(x.shape), x.stride(), x.dtype) for x in results]
        # one function for all, whose code is then at hand; memory of which nothing is used has no address
        *self._results, self._inside = [
            partial(torch.empty_strided, *sizes, dtype=dtype, device=device)
            for *sizes, dtype in [*kinds, ((nbytes,), (1,), torch.uint8)]
        ]
        if not nbytes:
            self._inside = int
        self._one_thread = threading.Lock()

    def __call__(self, addresses: list[int]) -> Tensors:
        results = tuple([make() for make in self._results])
        numbers = [*addresses, *results, self._inside()]
        with self._one_thread:
            for later in self._later:
                numbers += later()
            self._submission(numbers)
        return results


class _Witness(TorchDispatchMode):
    """Keeps what is allocated, by the address of its memory, and notes whether anything else happens than allocations and views."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: dict[int, torch.Tensor] = {}
        self.plain = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would wrap what follows for torch.compile, and import a second's worth of modules in the first recorded pass."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _ALLOCATIONS:
            self.allocated[result.untyped_storage().data_ptr()] = result
        elif name not in _VIEWS | _QUESTIONS:
            self.plain = False
        return result


def _record(inputs: Tensors, addresses: list[int], work: Callable[[], Tensors]) -> tuple[Tensors, Recording | None]:
    """The results of `work`, and its recording if that explains it."""
    counted = 0

    def count(metadata: Any) -> None:
        nonlocal counted
        counted += 1

    watch, hook = _Witness(), knobs.runtime.launch_enter_hook
    module, functions = submission.load(), submission.driver_functions()
    if module is None or functions is None or not hasattr(hook, "add") or recorder.steps is not None:
        return work(), None
    steps: list[Step] = []
    device = driver.active.get_current_device()
    hook.add(count)
    recorder.steps = steps
    try:
        with watch:
            results = work()
    finally:
        recorder.steps = None
        hook.remove(count)
    if not watch.plain or counted != sum(isinstance(step, RecordedLaunch) for step in steps):
        return results, None
    try:
        places = _Places(inputs, addresses, results, watch.allocated)
        listed = Submission(module, functions, len(inputs) + len(results) + 1, driver.active.get_current_stream(device))
        later = [step(listed, places.find) for step in steps]
    except ValueError:
        return results, None
    listed.keep(places.before)
    return results, Recording(inputs[0].device, results, places.nbytes, listed, [x for x in later if x is not None])


class _Places:
    """Where the tensors of a pass are: in an input, a result, the memory inside the pass, or `before` it. Raises ValueError if unclear."""

    def __init__(self, inputs: Tensors, addresses: list[int], results: Tensors, allocated: dict[int, torch.Tensor]) -> None:
        self.before: list[torch.Tensor] = []
        self._bases = dict(zip(addresses + [x.data_ptr() for x in results], range(len(addresses) + len(results))))
        self._own = {x.untyped_storage().data_ptr() for x in results}
        self._inputs = {x.untyped_storage().data_ptr() for x in inputs}
        self._extents = [_extent(x) for x in inputs]
        # each result is memory of its own, from its beginning on
        if len(self._bases) < len(inputs) + len(results) or self._own != {x.data_ptr() for x in results}:
            raise ValueError("results share memory")
        if not self._own <= allocated.keys():
            raise ValueError("a result was there before")
        self._inside, self._memory, self.nbytes = len(self._bases), dict[int, int](), 0
        for address, x in allocated.items():
            if address not in self._own and x.untyped_storage().nbytes():
                self._memory[address] = self.nbytes
                self.nbytes += -(-x.untyped_storage().nbytes() // _ALIGNED) * _ALIGNED
        if self.nbytes > _MOST:
            raise ValueError("the pass needs much memory")

    def find(self, x: torch.Tensor) -> Number | None:
        """The number of a tensor's address, None if the tensor was there before."""
        begin, address = x.untyped_storage().data_ptr(), x.data_ptr()
        if address in self._bases:
            return Number(self._bases[address])
        if begin in self._memory:
            return Number(self._inside, self._memory[begin] + address - begin)
        if begin in self._own:
            return Number(self._bases[begin], address - begin)
        if begin in self._inputs:
            # rows of an input; of two that lie between each other, such as parts of one projection, it might be either's
            (index,) = [index for index, (first, last) in enumerate(self._extents) if first <= address < last]
            return Number(index, address - self._extents[index][0])
        self.before.append(x)
        return None


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's memory begins and ends."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
