"""Records between processes of one host, through memory that all of them map: in microseconds, where sockets take hundreds."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial
from io import FileIO
from typing import Any

from .roster import Notes, Roster

_SLOT = 1024  # bytes of a piece of a record, with its header
_HEADER = struct.Struct("<QIII")  # the piece's number, bytes of the whole record, bytes of the piece, checksum
_PIECE = _SLOT - _HEADER.size
# pieces of each rank that stay in the file: a rank that gives up waiting leaves its record for ranks that come later
_KEPT = 64
_TOKEN = 16  # bytes at the file's start that identify it
_NAME = "ringattn-records"
_ALIVE_EVERY = 0.25  # seconds between checks that the awaited ranks' processes are alive


class SharedRecords:
    """A file without a name that rank 0 creates and all ranks map, with a part for each rank, who alone writes there.

    A part holds pieces of records. A piece is valid if its number and checksum are right; the checksum is needed because another processor
    may see the bytes in any order. The memory is gone with the last process that maps it, however that process ends.
    """

    def __init__(self, file: FileIO, rank: int, roster: Roster) -> None:
        self._rank = rank
        self._size = len(roster.members)
        self._roster = roster
        self._memory = mmap.mmap(file.fileno(), _bytes(self._size))
        roster.notes = Notes(self._memory, _notes(self._size))
        self._next = 1
        self._numbers = threading.Lock()

    def posting(self, quick: Any = None) -> Callable[[bytes], Callable[[], list[bytes]]]:
        """As `Ranks.posting`. quick: writes a piece, and finds the others' unless something is odd or late; in C."""

        def post(record: bytes) -> Callable[[], list[bytes]]:
            if quick is None or len(record) > _PIECE:
                return partial(self._waited, record)
            number = self._take(1)
            quick.post(self._memory, number, self._rank, self._size, record)
            return partial(self._collect, quick, number, record)

        return post

    def _collect(self, quick: Any, number: int, record: bytes) -> list[bytes]:
        # both ways write this rank's piece once more, as it is
        found = quick.swap(self._memory, number, self._rank, self._size, record)
        if found is None:
            found = self._gather(number, [record], len(record), None)
        assert found is not None
        return found

    def _waited(self, record: bytes) -> list[bytes]:
        found = self.all_gather(record, None)
        assert found is not None
        return found

    def all_gather(self, record: bytes, patience: float | None) -> list[bytes] | None:
        """Every rank's record, all of one length; None after `patience` seconds.

        Raises RuntimeError if a rank has ended, has a record of another length, or does not write its record within the group's timeout.
        """
        pieces = [record[begin : begin + _PIECE] for begin in range(0, len(record), _PIECE)] or [b""]
        return self._gather(self._take(len(pieces)), pieces, len(record), patience)

    def _take(self, count: int) -> int:
        """The first of so many numbers of pieces."""
        with self._numbers:
            self._next += count
            return self._next - count

    def _gather(self, first: int, pieces: list[bytes], length: int, patience: float | None) -> list[bytes] | None:
        """Write the pieces of a record of that length, with numbers from `first` on, and wait for those of the other ranks."""
        until = time.monotonic() + self._roster.seconds(patience)
        found: list[list[bytes]] | None = [[] for _ in range(self._size)]
        for number, piece in enumerate(pieces, first):
            self._write(number, length, piece)
            for rank in range(self._size):
                if found is not None:
                    other = piece if rank == self._rank else self._wait(rank, number, length, until)
                    if other is not None:
                        found[rank].append(other)
                    elif patience is not None:
                        found = None
                    else:
                        raise self._roster.late(self._missing(number))
        return None if found is None else [b"".join(parts) for parts in found]

    def _write(self, number: int, length: int, piece: bytes) -> None:
        begin = self._place(self._rank, number)
        header = _HEADER.pack(number, length, len(piece), _checksum(number, length, piece))
        self._memory[begin : begin + _HEADER.size + len(piece)] = header + piece

    def _wait(self, rank: int, number: int, length: int, until: float) -> bytes | None:
        """A rank's piece, or None if it does not come before the time `until`."""
        begin = self._place(rank, number)
        looks = 0
        alive_at = time.monotonic()
        while True:
            found, total, size, checksum = _HEADER.unpack_from(self._memory, begin)
            if found >= number:
                piece = self._memory[begin + _HEADER.size : begin + _HEADER.size + min(size, _PIECE)]
                if checksum == _checksum(found, total, piece):
                    if found > number:
                        raise RuntimeError(
                            f"rank {rank} has gone on without this rank, by {found - number} records: look at its errors"
                        )
                    if total != length:
                        raise RuntimeError(different(rank, total, length))
                    return piece
            looks += 1
            if looks > 50:
                # let other threads have this processor, or the interpreter
                time.sleep(0 if looks < 500 else 5e-5 if looks < 10_000 else 1e-3)
            now = time.monotonic()
            if now > until:
                return None
            if now > alive_at + _ALIVE_EVERY:
                alive_at = now
                # a rank that waits for one that has ended comes no more, either
                self._roster.check(lambda: self._missing(number))

    def _missing(self, number: int) -> list[int]:
        """The ranks that have not written a piece."""
        return [rank for rank in range(self._size) if _HEADER.unpack_from(self._memory, self._place(rank, number))[0] < number]

    def _place(self, rank: int, number: int) -> int:
        return _SLOT * (1 + rank * _KEPT + number % _KEPT)


def create(size: int) -> tuple[FileIO, str]:
    """A file for `size` ranks, and its key for `find`. Raises OSError if there is no room."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no files without a name")
    file = FileIO(os.memfd_create(_NAME), "r+")
    token = os.urandom(_TOKEN)
    try:
        os.posix_fallocate(file.fileno(), 0, _bytes(size))
        file.write(token)
    except OSError:
        file.close()
        raise
    return file, f"{os.getpid()} {file.fileno()} {token.hex()}"


def find(key: str, size: int) -> FileIO:
    """The file that another process has created and has open. Raises OSError if this process cannot open it."""
    pid, number, token = key.split()
    path = f"/proc/{pid}/fd/{number}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise FileNotFoundError(path)
    file = FileIO(path, "r+")
    try:
        if file.read(_TOKEN) != bytes.fromhex(token) or os.fstat(file.fileno()).st_size != _bytes(size):
            raise FileNotFoundError(path)
    except OSError:
        file.close()
        raise
    return file


def different(rank: int, length: int, own: int) -> str:
    """What to say of a rank whose record has another length."""
    return (
        f"ranks are in different calls: rank {rank} has a record of {length} bytes, not {own}: make the same calls in the same order on "
        "all ranks"
    )


def _notes(size: int) -> int:
    """Where the ranks' notes begin, after all pieces."""
    return _SLOT * (1 + size * _KEPT)


def _bytes(size: int) -> int:
    return _notes(size) + Notes.nbytes(size)


def _checksum(number: int, length: int, piece: bytes) -> int:
    return zlib.crc32(piece, (number * 0x9E3779B1 + length) & 0xFFFFFFFF)
