"""Records between processes of one host, through memory that all of them map: in microseconds, where sockets take hundreds."""

from __future__ import annotations

import mmap
import os
import struct
import sys
import tempfile
import threading
import time
import zlib
from datetime import timedelta

if sys.platform != "win32":  # which has no _FOLDER either
    import fcntl

_FOLDER = "/dev/shm"
_SLOT = 1024  # bytes of a piece of a record, with its header
_HEADER = struct.Struct("<QIII")  # the piece's number, bytes of the whole record, bytes of the piece, checksum
_PIECE = _SLOT - _HEADER.size
# pieces of each rank that stay in the file: a rank that gives up waiting leaves its record for ranks that come later
_KEPT = 64
_TOKEN = 16  # bytes at the file's start that identify it
KEY = _TOKEN + 64  # bytes: the token and the path
_ALIVE_EVERY = 0.25  # seconds between checks that an awaited rank's process is alive


class SharedRecords:
    """A file that rank 0 creates and all ranks map. Each rank writes pieces of records into its own part and reads those of the others.

    A piece is valid if its number and checksum are right; the checksum is needed because another processor may see the bytes in any
    order. Each rank locks one byte of the file. The system unlocks it when the process ends, so that nobody waits for a dead rank.
    """

    def __init__(self, file: int, rank: int, size: int) -> None:
        self._file = file
        self._rank = rank
        self._size = size
        self._memory = mmap.mmap(file, _bytes(size))
        self._lock(rank)
        self._next = 1
        self._numbers = threading.Lock()

    def __del__(self) -> None:
        if hasattr(self, "_memory"):
            self._memory.close()
        os.close(self._file)

    def all_gather(self, record: bytes, patience: float | None, timeout: timedelta) -> list[bytes] | None:
        """Every rank's record, all of one length; None after `patience` seconds.

        Raises RuntimeError if a rank has ended, has a record of another length, or does not write its record within `timeout`.
        """
        pieces = [record[begin : begin + _PIECE] for begin in range(0, len(record), _PIECE)] or [b""]
        with self._numbers:
            first = self._next
            self._next += len(pieces)
        began = time.monotonic()
        until = began + (timeout.total_seconds() if patience is None else patience)
        found: list[list[bytes]] | None = [[] for _ in range(self._size)]
        for number, piece in enumerate(pieces, first):
            self._write(number, len(record), piece)
            for rank in range(self._size):
                if found is not None:
                    other = piece if rank == self._rank else self._wait(rank, number, len(record), until)
                    if other is not None:
                        found[rank].append(other)
                    elif patience is not None:
                        found = None
                    else:
                        raise RuntimeError(f"rank {rank} has not made this call within {timeout}: find out where it hangs")
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
                        raise RuntimeError(
                            f"ranks are in different calls: rank {rank} has a record of {total} bytes, not {length}: make the same calls "
                            "in the same order on all ranks"
                        )
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
                if not self._alive(rank):
                    raise RuntimeError(f"rank {rank} has ended, and this rank waits for it: look at the output of rank {rank}")

    def _lock(self, rank: int) -> None:
        """Lock a rank's byte. Raises OSError if another process holds it."""
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    def _alive(self, rank: int) -> bool:
        try:
            self._lock(rank)
        except OSError:
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return False

    def _place(self, rank: int, number: int) -> int:
        return _SLOT * (1 + rank * _KEPT + number % _KEPT)


def create(size: int) -> tuple[int, bytes]:
    """A file for `size` ranks, and its key for `find`. Raises OSError if /dev/shm has no room or does not exist."""
    file, path = tempfile.mkstemp(prefix="ringattn-", dir=_FOLDER)
    token = os.urandom(_TOKEN)
    try:
        os.posix_fallocate(file, 0, _bytes(size))
        os.pwrite(file, token, 0)
    except OSError:
        os.close(file)
        os.unlink(path)
        raise
    return file, (token + path.encode()).ljust(KEY, b"\0")


def find(key: bytes, size: int) -> int:
    """The file that another rank has created. Raises OSError if it is not on this host."""
    file = os.open(_path(key), os.O_RDWR)
    if os.pread(file, _TOKEN, 0) != key[:_TOKEN] or os.fstat(file).st_size != _bytes(size):
        os.close(file)
        raise FileNotFoundError(_path(key))
    return file


def forget(key: bytes) -> None:
    """Remove the file's name; the file lives on while a rank has it open."""
    os.unlink(_path(key))


def _path(key: bytes) -> bytes:
    return key[_TOKEN:].rstrip(b"\0")


def _bytes(size: int) -> int:
    return _SLOT * (1 + size * _KEPT)


def _checksum(number: int, length: int, piece: bytes) -> int:
    return zlib.crc32(piece, (number * 0x9E3779B1 + length) & 0xFFFFFFFF)
