"""How ranks set something up together, step by step: if a rank fails in a step, all ranks learn of it and none waits for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from torch.distributed.distributed_c10d import Store

from .base import Ranks

_RECORD_BYTES = 4096
_PAYLOAD = b"="  # the first byte of a record within a step; a record of facts is a JSON object


class Meeting:
    """All ranks call the same methods in the same order. A rank that fails in a step skips to the next `swap`."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._left_behind = False  # whether this step ended early because another rank failed in it

    def swap(self, facts: dict) -> list[dict]:
        """Every rank's facts, once all ranks have left their step."""
        text = json.dumps(facts).encode()
        records = self._all_gather(text)
        while any(record.startswith(_PAYLOAD) for record in records):
            records = self._all_gather(text)
        return [json.loads(record) for record in records]

    def take(self, steps: Mapping[str, Callable[[], object]]) -> str | None:
        """Take steps, given under the text that describes their failure.

        Returns None, or a text that is the same on every rank: which rank has failed, in which step, and why.
        """
        for failure, step in steps.items():
            errors = [record["error"] for record in self.swap({"error": self._error(step)})]
            failed = [rank for rank, text in enumerate(errors) if text]
            if failed:
                return f"rank {failed[0]} {failure}: {errors[failed[0]]}"
        return None

    def gather(self, payload: bytes) -> list[bytes]:
        """Within a step, every rank's bytes, of one length. Raises RuntimeError if a rank has left the step."""
        records = self._all_gather(_PAYLOAD + payload)
        gone = [rank for rank, record in enumerate(records) if not record.startswith(_PAYLOAD)]
        if gone:
            self._left_behind = any(json.loads(records[rank])["error"] for rank in gone)
            raise RuntimeError(f"rank {gone[0]} took part in fewer exchanges")
        return [record[len(_PAYLOAD) :][: len(payload)] for record in records]

    def _error(self, step: Callable[[], object]) -> str:
        """The first line of the error with which a step fails on this rank, or an empty text."""
        self._left_behind = False
        try:
            step()
        except RuntimeError as error:
            if not self._left_behind:
                return (str(error).splitlines() or [""])[0][:512] or repr(error)
        return ""

    def _all_gather(self, record: bytes) -> list[bytes]:
        assert len(record) <= _RECORD_BYTES
        records = self._ranks.all_gather_control(record.ljust(_RECORD_BYTES))
        assert records is not None
        return records


class MeetingStore(Store):
    """A store for torch's symmetric memory, which repeatedly sets one value and reads those of all ranks.

    Torch numbers these exchanges by process, not by group. Ranks that were in other groups before would look under other names and wait
    for ever (pytorch/pytorch#196082). This store ignores names: setting a value gathers it from all ranks.
    """

    def __init__(self, meeting: Meeting) -> None:
        super().__init__()
        self._meeting = meeting
        self._values: list[bytes] = []

    def set(self, key: str, value: bytes) -> None:  # pyrefly: ignore[bad-override]
        self._values = self._meeting.gather(value)

    def wait(self, keys: list[str], timeout: object = None) -> None:
        pass

    def get(self, key: str) -> bytes:
        return self._values[int(key.rsplit("/", 1)[1])]
