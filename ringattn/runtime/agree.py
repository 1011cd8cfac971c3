"""Ranks agree on what they compute before they exchange anything, so that a mismatch is an error on every rank and not a hang.

In each call all ranks swap a short record over the control channel between the hosts: a hash of all facts that must be equal, this
rank's token count, and whether this rank refused its own input. If hashes differ, or a rank refused, the ranks swap the facts
themselves, and every rank raises the same error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
from collections import defaultdict
from types import TracebackType

from ..transport import Ranks

_TEXT_BYTES = 2048
_PATIENCE = 10.0  # seconds that a rank with bad input waits until the others have its record

# 1 byte: whether this rank refused; 8: its tokens; 16: the hash of all facts
_RECORD = struct.Struct("<?q16s")


class Facts:
    """What must be equal on all ranks, under the names that users know: as texts, and the hash of these."""

    def __init__(self, facts: dict[str, object]) -> None:
        self.texts = {name: str(value) for name, value in facts.items()}
        self.hash = hashlib.blake2b(json.dumps(self.texts).encode(), digest_size=16).digest()


def agree(ranks: Ranks, facts: Facts, tokens: int) -> tuple[int, ...]:
    """The number of tokens of each rank.

    Raises ValueError, on every rank and with the names of the odd ranks, if a fact differs or a rank refused its input.
    """
    records = ranks.all_gather_control(_RECORD.pack(False, tokens, facts.hash))
    assert records is not None
    refused, counts, hashes = zip(*map(_RECORD.unpack, records))
    if any(refused) or len(set(hashes)) > 1:
        texts = _swap_texts(ranks, facts.texts, None)
        assert texts is not None
        raise ValueError(_describe([rank for rank, has_refused in enumerate(refused) if has_refused], texts))
    return counts


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
            _refuse(self.ranks, error)


def _refuse(ranks: Ranks, error: ValueError) -> None:
    """Tell the other ranks of an error in this rank's input."""
    # this rank's own error counts, even if the others cannot be told because one of them has ended
    with contextlib.suppress(RuntimeError):
        records = ranks.all_gather_control(_RECORD.pack(True, 0, b""), patience=_PATIENCE)
        # ranks that come later still find both records, so do not wait for them again
        _swap_texts(ranks, {"error": str(error)}, 0 if records is None else _PATIENCE)


def _swap_texts(ranks: Ranks, facts: dict[str, str], patience: float | None) -> list[dict[str, str]] | None:
    texts = ranks.all_gather_control(_text(facts).ljust(_TEXT_BYTES), patience)
    return None if texts is None else [json.loads(text) for text in texts]


def _text(facts: dict[str, str]) -> bytes:
    """The facts in at most `_TEXT_BYTES`; long facts lose their middle."""
    room = _TEXT_BYTES
    while True:
        text = json.dumps({name: _shortened(value, room) for name, value in facts.items()}).encode()
        if len(text) <= _TEXT_BYTES:
            return text
        room = room * 3 // 4


def _shortened(value: str, room: int) -> str:
    return value if len(value) <= room else f"{value[: room // 2]} ... {value[-(room // 2) :]}"


def _describe(refused: list[int], texts: list[dict[str, str]]) -> str:
    if refused:
        reasons = "; ".join(f"rank {rank}: {texts[rank]['error']}" for rank in refused)
        return f"{_ranks(refused)} refused the input: {reasons}"
    lines = []
    # ranks that call different functions have different facts: compare those that all have
    for name in [name for name in texts[0] if all(name in facts for facts in texts)]:
        holders: defaultdict[str, list[int]] = defaultdict(list)
        for rank, facts in enumerate(texts):
            holders[facts[name]].append(rank)
        if len(holders) > 1:
            rarest_first = sorted(holders.items(), key=lambda item: len(item[1]))
            lines.append(f"{name} is " + ", but ".join(f"{value} on {_ranks(ranks)}" for value, ranks in rarest_first))
    return "ranks disagree: " + "; ".join(lines) + ": pass the same on every rank"


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
