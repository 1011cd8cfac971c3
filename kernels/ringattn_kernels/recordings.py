"""Passes that are recorded once and replayed: what they allocate and queue, without the Python that led there.

A pass over the same kinds of tensors queues the same launches, copies and waits each time, with other addresses. Finding them costs the
host several times as long as queueing them. So the first call of a kind runs as it is, the second one is recorded, and the others are
replayed: one allocation for all tensors that live inside the pass, one for each result, and one `Submission`. Where passes of other kinds
came again (`repeats.py`), the first call is recorded. A pass can be recorded before its first call, too: in a rehearsal it gets tensors
without memory (`stand_ins.py`), and nothing is queued.

A recording holds only if it explains all that happened: nothing but allocations, views, and steps that were noted (`recorder.py`), whose
tensors are inputs, results, allocations of the pass, or tensors that were there before. Otherwise the pass runs as it is for good.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver

from . import native, submission
from .direct import hooked
from .recorder import Unexplained, recorder
from .stand_ins import StandIns
from .submission import Number, Submission

if TYPE_CHECKING:
    from .recorder import Later, Step
    from .repeats import Replays

Tensors = tuple[torch.Tensor, ...]
Words = Mapping[str, int]  # integers of a pass by the names under which its launches take them
Kind = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # a tensor's shape, strides and dtype

_KEPT = 64  # recordings of one owner
_ALIGNED = 512  # bytes, as torch's allocator aligns
# bytes inside a pass, at most: larger passes hide the host's time, and need the memory that they let go of on the way
_MOST = 1 << 30
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_VIEWS = {"alias", "as_strided", "detach", "expand", "permute", "select", "slice", "t", "transpose", "unbind", "unsqueeze", "view"}
_NOWHERE = torch.device("meta")
_HARMLESS = {*_VIEWS, "promote_types"}
# what torch's own function calls, which is one in Python
_is_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


def replay(found: Replays, facts: tuple, inputs: Tensors, work: Callable[..., Tensors], words: Words | None = None) -> Tensors:
    """`work(*inputs)`, which computes tensors on the current CUDA stream, or its replay.

    found: the recordings of one owner, who gives the same `facts` only to passes that do the same with such tensors. words: what `work`
    has that differs between such passes.
    """
    now = state()
    if now is None:
        return work(*inputs)
    addresses = [x.data_ptr() for x in inputs]
    key = _key(facts, now, inputs, addresses)
    # calls of many layers are alike, and comparing keys costs less than hashing them
    latest = found.get(facts)
    known = latest[1] if latest is not None and latest[0] == key else found.get(key, _NEW)
    # inputs that begin at one address, such as one tensor given twice, would be taken for one another
    if known is None or len(set(addresses)) < len(addresses):
        return work(*inputs)
    if known is _SEEN:
        found.repeats.again()
    if isinstance(known, Recording):
        found[facts] = key, known
        return known(addresses, words=words.values() if words else ())
    if len(found) >= _KEPT:
        found.clear()
    if known is _NEW:
        nbytes = sum(x.nbytes for x in inputs)
        if not found.repeats.expected(facts, nbytes):
            # recording costs as much as it saves in one call: a call that is never repeated goes without it
            found[key] = _SEEN
            return work(*inputs)
        results, recording = _record(inputs, addresses, work, words=words)
        if recording is None:
            found.repeats.failed(facts, nbytes)
        # a first call may do what later ones need not: the second is tried, too
        found[key] = recording or _SEEN
        return results
    results, found[key] = _record(inputs, addresses, work, words=words)
    return results


def rehearse(
    found: Replays, facts: tuple, kinds: Sequence[Kind], device: torch.device, work: Callable[..., Tensors]
) -> tuple[Kind, ...]:
    """Record what `replay` would record in a call with aligned tensors of these kinds, and do none of it.

    Returns the kinds of the pass's results; none for a pass that cannot be recorded this way. What it makes once, such as tables, is made.
    """
    now = state()
    if now is None:
        return ()
    stand_ins = StandIns(device)
    inputs = tuple([stand_ins.make(shape, strides, dtype) for shape, strides, dtype in kinds])
    addresses = [x.data_ptr() for x in inputs]
    key = _key(facts, now, inputs, addresses)
    if found.get(key, _SEEN) is _SEEN:
        if len(found) >= _KEPT:
            found.clear()
        try:
            found[key] = recording = _record(inputs, addresses, work, stand_ins)[1]
        except Unexplained:
            return ()
        if recording is not None:
            recording.complete()
    known = found[key]
    return () if known is None else tuple(known.kinds)


def recorded(found: Replays, facts: tuple, inputs: Tensors) -> Recording | None:
    """The recording that `replay` would run now for such inputs, if they begin at different addresses; None if there is none.

    It holds while `state()` is the same, for inputs of the same shapes, strides, dtypes and devices, aligned alike.
    """
    now = state()
    known = None if now is None else found.get(_key(facts, now, inputs, [x.data_ptr() for x in inputs]))
    return known if isinstance(known, Recording) else None


def state() -> tuple | None:
    """What recordings depend on besides their inputs: the device, its stream, determinism; None where nothing may be replayed."""
    if _is_capturing() or hooked():
        return None
    active = driver.active
    device = active.get_current_device()
    return device, active.get_current_stream(device), torch.are_deterministic_algorithms_enabled()


# a function, its argument if it is not None, and what it must return
Question = tuple[Callable[..., Any], Any, Any]


class InputKinds:
    """What a recording is for: a state of the device, and inputs of the same classes, shapes, strides, dtypes, devices and alignment, of
    which the same need gradients.

    now: the `state()` of now. questions: what else must be so. Raises ValueError for tensors that have no memory, or no strides, and for
    views that negate.

    `addresses(inputs)`: those of other inputs, as a list, if they and the device are now like these, and no two begin at one address;
    else None.
    """

    def __init__(self, now: tuple, inputs: Tensors, questions: tuple[Question, ...] = ()) -> None:
        try:
            self._kinds = tuple([_kind(x) for x in inputs])
        except (AttributeError, RuntimeError, TypeError) as error:
            raise ValueError("these are no plain tensors") from error
        if any(x.is_neg() for x in inputs):
            raise ValueError("what lies at the address of a view that negates is not its values")
        self._now, self._hash = now, hash((now, *self._kinds))
        device, stream, deterministic = now
        questions = (
            *questions,
            (_is_capturing, None, False),
            (hooked, None, False),
            (driver.active.get_current_stream, device, stream),
            (driver.active.get_current_device, None, device),
            (torch._C._get_deterministic_algorithms, None, deterministic),
        )
        module, check = native.submission(), _check_of(inputs)
        self.addresses: Callable[[Tensors], list[int] | None]
        if module is None or check is None:
            self.addresses = partial(same, questions, self._kinds)
        else:
            # in C; one function for all calls, without one in Python around it
            self.addresses = partial(module.same, questions, check, tuple([kind[-1] for kind in self._kinds]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InputKinds) and (self._now, self._kinds) == (other._now, other._kinds)

    def __hash__(self) -> int:
        return self._hash


def _kind(x: torch.Tensor) -> tuple:
    """All of a tensor but its values and its address; last, whether that is a multiple of 16."""
    return type(x), x.is_neg(), x.shape, x.stride(), x.dtype, x.device, x.requires_grad, not x.data_ptr() % 16


def _check_of(inputs: Tensors) -> Callable[..., bool] | None:
    """A function of torch in C++ that says whether tensors are of the kinds of these, without their alignment; None where torch has none.

    Dynamo guards graphs by it. It sees keys of dispatch too, and so views that negate, and modes such as autocast.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes, strides = [list(x.shape) for x in inputs], [list(x.stride()) for x in inputs]
        check = TensorGuards(*inputs, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return check if check(*inputs) is True else None
    except (ImportError, RuntimeError, TypeError, ValueError):
        return None


def same(questions: tuple[Question, ...], kinds: tuple, inputs: Tensors) -> list[int] | None:
    """The addresses of tensors of these kinds, if no two are equal, and all questions are answered so; else None. As in `submission.c`."""
    if not all((ask() if x is None else ask(x)) == answer for ask, x, answer in questions):
        return None
    try:
        addresses = [x.data_ptr() for x in inputs]
        found = tuple([_kind(x) for x in inputs])
    except (AttributeError, RuntimeError, TypeError):
        return None
    return addresses if found == kinds and len(set(addresses)) == len(addresses) else None


def quick_records() -> Any:
    """What has `post` and `swap` of `submission.c`; None where that is not compiled."""
    return native.submission()


def _key(facts: tuple, now: tuple, inputs: Tensors, addresses: list[int]) -> tuple:
    # streams of two devices may have one number
    where = now, inputs[0].device
    return facts, where, *[(x.shape, x.stride(), x.dtype, not address % 16) for x, address in zip(inputs, addresses)]


_NEW, _SEEN = object(), object()


class Recording:
    """A pass as allocations and a submission. Its numbers: addresses of inputs, of results, of the memory inside; words; those of steps.

    contiguous: whether its first result is.
    """

    def __init__(self, device: torch.device, results: Tensors, nbytes: int, listed: Submission, later: list[Later]) -> None:
        self._submission, self._later = listed, later
        self.kinds = [(tuple(x.shape), x.stride(), x.dtype) for x in results]  # of the results
        self.contiguous = results[0].is_contiguous()
        # one function for all, whose code is then at hand; memory of which nothing is used has no address
        *self._results, self._inside = [_maker(device, kind) for kind in [*self.kinds, ((nbytes,), (1,), torch.uint8)]]
        if not nbytes:
            self._inside = int
        self._one_thread = threading.Lock()

    def complete(self) -> None:
        """Do all that the first run would do once."""
        with self._one_thread:
            self._submission.complete()

    def __call__(self, addresses: list[int], agreed: Callable[[], object] | None = None, words: Iterable[int] = ()) -> Tensors:
        """The results. agreed: called once all is queued that moves nothing to other ranks; if it raises, nothing moves. words: in the
        order of those that it was recorded with."""
        results = tuple([make() for make in self._results])
        numbers = [*addresses, *results, self._inside(), *words]
        with self._one_thread:
            self._submission.begin(numbers)
            if agreed is not None:
                agreed()
            for later in self._later:
                numbers += later()
            self._submission.finish(numbers)
        return results


def _maker(device: torch.device, kind: Kind) -> Callable[[], torch.Tensor]:
    """Makes tensors of a kind; on the current device, as in each replay, without all that `torch.empty_strided` asks on the way."""
    shape, strides, dtype = kind
    if device.type == "cuda" and device.index == torch.cuda.current_device():
        with suppress(ImportError):
            # of Inductor's compiled code
            from torch._C._dynamo.guards import _empty_strided_cuda

            return partial(_empty_strided_cuda, shape, strides, dtype)
    return partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


class _Witness(TorchDispatchMode):
    """Keeps what is allocated, by the address of its memory; says so to the recorder if anything else happens than allocations and views.

    With stand-ins it allocates these. Of a pass that allocates more than `most` bytes it keeps nothing: memory that such a pass lets go of
    on the way is needed.
    """

    def __init__(self, stand_ins: StandIns | None, most: int) -> None:
        super().__init__()
        self.allocated: dict[int, torch.Tensor] = {}
        self._stand_ins, self._room = stand_ins, most

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would wrap what follows for torch.compile, and import a second's worth of modules in the first recorded pass."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _HARMLESS:
            return func(*args, **kwargs)
        if name in _ALLOCATIONS:
            result = func(*args, **kwargs) if self._stand_ins is None else self._stand_in(func, args, kwargs)
            self._keep(result)
            return result
        recorder.cannot_note(name)
        return func(*args, **kwargs)

    def _keep(self, x: torch.Tensor) -> None:
        if not recorder.explained:
            return
        self._room -= x.untyped_storage().nbytes()
        if self._room < 0:
            self.allocated.clear()
            recorder.cannot_note("the pass needs much memory")
        else:
            self.allocated[x.untyped_storage().data_ptr()] = x

    def _stand_in(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        assert self._stand_ins is not None
        like = func(*args, **kwargs | {"device": _NOWHERE})
        return self._stand_ins.make(like.shape, like.stride(), like.dtype)


def _record(
    inputs: Tensors,
    addresses: list[int],
    work: Callable[..., Tensors],
    stand_ins: StandIns | None = None,
    words: Words | None = None,
) -> tuple[Tensors, Recording | None]:
    """The results of `work`, and its recording if that explains it. With stand-ins, it is a rehearsal."""
    module, functions = native.submission(), submission.driver_functions()
    if module is None or functions is None or recorder.steps is not None:
        if stand_ins is not None:
            raise Unexplained("nothing can be listed here")
        return work(*inputs), None
    # results take about as much memory as inputs
    watch = _Witness(stand_ins, _MOST + sum(x.nbytes for x in inputs))
    steps: list[Step] = []
    device = driver.active.get_current_device()
    recorder.steps, recorder.explained, recorder.rehearses = steps, True, stand_ins is not None
    try:
        with watch:
            results = work(*inputs)
        explained = recorder.explained
    finally:
        recorder.steps, recorder.explained, recorder.rehearses = None, True, False
    if not explained:
        return results, None
    try:
        places = _Places(inputs, addresses, results, watch.allocated, words or {})
        listed = Submission(
            module, functions, len(inputs) + len(results) + 1 + len(words or ()), driver.active.get_current_stream(device)
        )
        later = [step(listed, places.find) for step in steps]
    except ValueError:
        return results, None
    listed.keep(places.before)
    return results, Recording(inputs[0].device, results, places.nbytes, listed, [x for x in later if x is not None])


class _Places:
    """Where the tensors of a pass are: in an input, a result, the memory inside the pass, or `before` it. Raises ValueError if unclear."""

    def __init__(
        self, inputs: Tensors, addresses: list[int], results: Tensors, allocated: dict[int, torch.Tensor], words: Words
    ) -> None:
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
        self._words = dict(zip(words, range(self._inside + 1, self._inside + 1 + len(words))))
        for address, x in allocated.items():
            if address not in self._own and x.untyped_storage().nbytes():
                self._memory[address] = self.nbytes
                self.nbytes += -(-x.untyped_storage().nbytes() // _ALIGNED) * _ALIGNED
        if self.nbytes > _MOST:
            raise ValueError("the pass needs much memory")

    def find(self, x: torch.Tensor | str) -> Number | None:
        """The number of a tensor's address, None if the tensor was there before; or of a word."""
        if isinstance(x, str):
            if x not in self._words:
                raise ValueError(f"another pass may have another {x}")
            return Number(self._words[x])
        address = x.data_ptr()
        if address in self._bases:
            return Number(self._bases[address])
        begin = x.untyped_storage().data_ptr()
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
