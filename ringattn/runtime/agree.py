"""Ranks agree on what they compute before they exchange anything, so that a mismatch is an error on every rank and not a hang.

In each call, and in its backward pass, all ranks swap a short record over the control channel between the hosts: a hash of all facts that
must be equal, this rank's token count, which call it is, and whether this rank refused its own input. If records do not fit, or a
rank refused, the ranks swap the facts themselves, and every rank raises the same error.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from functools import cached_property, partial
from types import TracebackType

import numpy as np
from torch._C._functorch import peek_interpreter_stack

from .. import check
from ..digest import Digested
from ..transport import Ranks
from .order import FACTS, UNKNOWN, CallOrder, Label

_TEXT_BYTES = 2048
_SHORT = 80  # characters of a text that messages always show whole
_PATIENCE = 10.0  # seconds that a rank with bad input waits until the others have its record

# 1 byte: whether this rank refused; 8: its tokens; 16: the hash of all facts; 8: the call's number; 1 + 8: its label
_RECORD = struct.Struct("<?q16sqB8s")
_FORWARD = "its forward pass"
_HEADS = {"number of query heads", "number of key/value heads"}
_OF_ORDER = {"function", _FORWARD, *FACTS.values()}

# by the name of a fact: its value as a text, and the digest that is compared instead, unless it is empty
_Texts = dict[str, tuple[str, str]]
# see `Ranks.posting`
Post = Callable[[bytes], Callable[[], list[bytes]]]


class Facts:
    """What must be equal on all ranks, under the names that users know: as texts, and the hash of these.

    Layouts and masks are compared by their whole digests: equal ones may have different names, and different ones may look alike.
    """

    def __init__(self, facts: Mapping[str, object]) -> None:
        self._facts = facts
        self.texts = {name: _text(value) for name, value in facts.items()}
        compared = {name: digest or text for name, (text, digest) in self.texts.items()}
        self.hash = hashlib.blake2b(json.dumps(compared).encode(), digest_size=16).digest()

    @cached_property
    def backward(self) -> Facts:
        """The facts of the backward pass of a call with these facts."""
        return Facts({**self._facts, "function": f"the backward pass of {self._facts['function']}"})

    def with_fact(self, name: str, value: object) -> Facts:
        """These facts and one more."""
        return Facts({**self._facts, name: value})


def agree(ranks: Ranks, facts: Facts, tokens: int, label: Label = UNKNOWN) -> tuple[tuple[int, ...], int]:
    """The number of tokens of each rank, and the call's number.

    Raises ValueError, on every rank and with the names of the odd ranks, if a fact or the label differs or a rank refused its input.
    """
    return Agreement(ranks, facts, tokens, label, _at_once(ranks))()


class OtherShards(Exception):
    """The ranks have agreed, but hold other shards than before. agreed: what they agreed on."""

    def __init__(self, agreed: tuple[tuple[int, ...], int]) -> None:
        self.agreed = agreed


class Agreement:
    """`agree` in two parts: making it posts this rank's record, where no transform of torch's runs; calling it waits for the others'.

    known: each rank's tokens; with others, calling it raises `OtherShards`. place: the call's number, once the ranks have agreed.
    """

    __slots__ = ("_collect", "_facts", "_known", "_label", "_ranks", "_record", "_tokens", "place")

    def __init__(
        self, ranks: Ranks, facts: Facts, tokens: int, label: Label, post: Post, known: tuple[int, ...] | None = None
    ) -> None:
        self._ranks, self._facts, self._tokens, self._label, self._known = ranks, facts, tokens, label, known
        order: CallOrder = ranks.order
        self._record = _RECORD.pack(False, tokens, facts.hash, order.latest + 1, label.kind, label.digest)
        self._collect = post(self._record)

    def __call__(self) -> tuple[tuple[int, ...], int]:
        ranks = self._ranks
        records = self._collect()
        if records.count(self._record) == ranks.size:
            tokens, place = (self._tokens,) * ranks.size, ranks.order.latest + 1
            ranks.order.add(place, self._label)
        else:
            tokens, place = self._compared(records)
        self.place = place
        if self._known is not None and tokens != self._known:
            raise OtherShards((tokens, place))
        return tokens, place

    def _compared(self, records: list[bytes]) -> tuple[tuple[int, ...], int]:
        """The tokens of each rank, and the call's number, of records that differ. Raises ValueError if they may not."""
        ranks, label = self._ranks, self._label
        refused, counts, hashes, numbers, kinds, labels = zip(*map(_RECORD.unpack, records))
        # all numbers are equal, unless ranks were in different calls before, in vain
        number = max(numbers)
        ranks.order.add(number, label)
        # without a name, a rank that runs compiled code does not know its line
        same_label = len(set(labels)) == 1 or len(set(kinds)) > 1 or label.kind == UNKNOWN.kind
        if any(refused) or len(set(hashes)) > 1 or not same_label:
            known = {} if label.kind == UNKNOWN.kind else {FACTS[label.kind]: _text(label.text)}
            _raise(ranks, refused, self._facts.texts | known)
        return counts, number


def agree_backward(ranks: Ranks, facts: Facts, number: int) -> None:
    """Raises ValueError, on every rank, unless all ranks begin the backward pass of the call with this number."""
    agreeing_backward(ranks, facts, number, _at_once(ranks))()


def agreeing_backward(ranks: Ranks, facts: Facts, number: int, post: Post) -> Callable[[], None]:
    """`agree_backward` in two parts, as `Agreement`."""
    facts = facts.backward
    record = _RECORD.pack(False, 0, facts.hash, number, *UNKNOWN[:2])
    return partial(_agreed_backward, ranks, facts, number, record, post(record))


def _agreed_backward(ranks: Ranks, facts: Facts, number: int, record: bytes, collect: Callable[[], list[bytes]]) -> None:
    records = collect()
    if records.count(record) < ranks.size:
        order: CallOrder = ranks.order
        refused, _, _, numbers, *_ = zip(*map(_RECORD.unpack, records))
        order.latest = max(order.latest, *numbers)
        _raise(ranks, refused, facts.texts | {_FORWARD: _text(order.describe(number))})


def gather_integers(ranks: Ranks, facts: Facts, values: np.ndarray) -> list[np.ndarray]:
    """The int64 values of each rank, of which each may have any number. Raises ValueError, on every rank, if a fact differs."""
    if ranks.size == 1:
        return [values]
    counts, _ = agree(ranks, facts, len(values))
    records = _all_gather(ranks, values.astype("<i8").tobytes().ljust(8 * max(counts), b"\0"), None)
    assert records is not None
    return [np.frombuffer(record, dtype="<i8")[:count] for record, count in zip(records, counts, strict=True)]


class refusing:
    """`with refusing(ranks):` around checks of this rank's input: if one raises ValueError, all other ranks raise an error too.

    It is a class because a generator of contextlib takes longer to enter and leave, and every call of attention does so.
    """

    __slots__ = ("ranks",)

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and isinstance(error, ValueError) and self.ranks.size > 1:
            order: CallOrder | None = self.ranks.order
            with nullcontext() if order is None else order:
                _refuse(self.ranks, error)


def _refuse(ranks: Ranks, error: ValueError) -> None:
    """Tell the other ranks of an error in this rank's input."""
    # this rank's own error counts, even if the others cannot be told because one of them has ended
    with suppress(RuntimeError):
        records = _all_gather(ranks, _RECORD.pack(True, 0, b"", 0, *UNKNOWN[:2]), _PATIENCE)
        # ranks that come later still find both records, so do not wait for them again
        _swap_texts(ranks, {"error": (str(error), "")}, 0 if records is None else _PATIENCE)


def _at_once(ranks: Ranks) -> Post:
    """Posts nothing before it waits, and so leaves out transforms of torch's."""
    return lambda record: partial(_swap, ranks, record)


def _swap(ranks: Ranks, record: bytes) -> list[bytes]:
    records = _all_gather(ranks, record, None)
    assert records is not None
    return records


def _all_gather(ranks: Ranks, record: bytes, patience: float | None) -> list[bytes] | None:
    if peek_interpreter_stack() is None:
        return ranks.all_gather_control(record, patience)
    # torch.func would wrap the tensors by which channels move records
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        return ranks.all_gather_control(record, patience)


def _raise(ranks: Ranks, refused: tuple[bool, ...], mine: _Texts) -> None:
    texts = _swap_texts(ranks, mine, None)
    assert texts is not None
    raise ValueError(_describe([rank for rank, has_refused in enumerate(refused) if has_refused], texts))


def _swap_texts(ranks: Ranks, facts: _Texts, patience: float | None) -> list[_Texts] | None:
    texts = _all_gather(ranks, _encoded(facts).ljust(_TEXT_BYTES), patience)
    return None if texts is None else [json.loads(text) for text in texts]


def _encoded(facts: _Texts) -> bytes:
    """The facts in at most `_TEXT_BYTES`; long texts lose their middle, digests nothing."""
    room = _TEXT_BYTES
    while True:
        text = json.dumps({name: (_shortened(value, room), digest) for name, (value, digest) in facts.items()}).encode()
        if len(text) <= _TEXT_BYTES:
            return text
        room = room * 3 // 4


def _shortened(value: str, room: int) -> str:
    return value if len(value) <= room else f"{value[: room // 2]} ... {value[-(room // 2) :]}"


def _text(value: object) -> tuple[str, str]:
    if isinstance(value, Digested):
        return repr(value), value.digest
    text = str(value)
    return text, hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest() if len(text) > _SHORT else ""


def _describe(refused: list[int], texts: list[_Texts]) -> str:
    if refused:
        reasons = "; ".join(f"rank {rank}: {texts[rank]['error'][0]}" for rank in refused)
        return f"{_ranks(refused)} refused the input: {reasons}"
    lines = {}
    # ranks that call different functions have different facts: compare those that all have
    for name in [name for name in texts[0] if all(name in facts for facts in texts)]:
        holders: defaultdict[str, list[int]] = defaultdict(list)
        for rank, facts in enumerate(texts):
            text, digest = facts[name]
            holders[digest or text].append(rank)
        if len(holders) > 1:
            rarest_first = sorted(holders.values(), key=len)
            values = (f"{_shown(*texts[ranks[0]][name], holders)} on {_ranks(ranks)}" for ranks in rarest_first)
            lines[name] = f"{name} is " + ", but ".join(values)
    advice = "make the same calls in the same order on every rank" if lines.keys() & _OF_ORDER else "pass the same on every rank"
    if lines.keys() == {FACTS[1]}:
        advice += "; if different lines make one call, pass the same name= in each"
    if lines.keys() >= _HEADS:  # what would be tokens, of which ranks may have different numbers
        advice += f"; {check.SWAPPED}"
    return "ranks disagree: " + "; ".join(lines.values()) + f": {advice}"


def _shown(text: str, digest: str, others: Iterable[str]) -> str:
    """A text, with as much of its digest as tells it from the others."""
    if not digest:
        return text
    length = next(n for n in range(8, len(digest) + 1) if sum(other.startswith(digest[:n]) for other in others) == 1)
    return f"{text} ({digest[:length]})"


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
