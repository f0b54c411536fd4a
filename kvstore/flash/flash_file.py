"""Files on flash, written and read past the page cache: what they hold is kept in warm memory, and not twice.

O_DIRECT does that where the file system has it, with less work for the CPU than a copy through the page cache. It
wants offsets, lengths and memory to be multiples of the medium's block, so bytes pass through a page-aligned buffer a
thread. Elsewhere pages go through the cache and are dropped from it, written ones once they are on the medium.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

PAGE = 4096
"""What offsets and lengths of direct transfers are multiples of; no medium in use has larger blocks."""

_LONGEST = 4 << 20  # bytes of one transfer, as long as the buffer that a thread keeps

_HUGE = 2 << 20  # bytes of a huge page, or a multiple

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_buffers = threading.local()


def write(path: str | os.PathLike[str], pieces: Sequence[bytes | memoryview]) -> os.stat_result:
    """Write a new file of `pieces`, one after the other, in all a multiple of PAGE long. Raises OSError.

    It is durable only after a `sync`.
    """
    fd, direct = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        append(fd, pieces)
        if not direct:
            _forget(fd)  # starts writing, so that less is left to do for `sync`
        return os.fstat(fd)
    finally:
        os.close(fd)


def sync(path: str | os.PathLike[str]) -> None:
    """Force a file to the medium, and out of the page cache. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        _forget(fd)
    finally:
        os.close(fd)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Force the names in a folder to the medium. Raises OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class FlashReader:
    """Reads one file. Raises OSError. Several threads may read at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._fd, self._direct = open_file(path, os.O_RDONLY)

    def status(self) -> os.stat_result:
        return os.fstat(self._fd)

    def read(self, pieces: Sequence[NDArray[np.uint8]], offset: int) -> int:
        """Fill `pieces` (uint8, contiguous) from `offset` on; how many bytes there were. One read, if below 4 MiB."""
        if not self._direct:
            return os.preadv(self._fd, [piece.data for piece in pieces], offset)
        pending = [piece for piece in pieces if len(piece)]
        count = 0
        for have in self.chunks(offset, sum(len(piece) for piece in pieces)):
            count += len(have)
            while len(have):
                part = min(len(pending[0]), len(have))
                pending[0][:part] = have[:part]
                have, rest = have[part:], pending[0][part:]
                pending[:1] = [rest] if len(rest) else []
        return count

    def chunks(self, offset: int, length: int) -> Iterator[NDArray[np.uint8]]:
        """At most `length` bytes from `offset` on, where they were read to: good until this thread reads again."""
        at, end = offset, offset + length
        while at < end:
            start = at // PAGE * PAGE if self._direct else at
            buffer = _buffer()[: round_up(end - start)]
            try:
                got = os.preadv(self._fd, [buffer.data], start)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = _through_cache(self._fd)
                continue
            chunk = buffer[at - start : min(got, end - start)]
            if not len(chunk):  # the end of the file
                return
            yield chunk
            at += len(chunk)

    def close(self) -> None:
        if self._fd >= 0:
            if not self._direct:
                _forget(self._fd)
            os.close(self._fd)
            self._fd = -1


def open_file(path: str | os.PathLike[str], flags: int) -> tuple[int, bool]:
    """Open past the page cache: (descriptor, whether transfers have to be aligned)."""
    if _O_DIRECT:
        try:
            return os.open(path, flags | os.O_CLOEXEC | _O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # said by file systems that cannot
                raise
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    if (no_cache := getattr(fcntl, "F_NOCACHE", None)) is not None:  # macOS
        fcntl.fcntl(fd, no_cache, 1)
    return fd, False


def _through_cache(fd: int) -> bool:
    """Give direct transfers up; returns False, which says so."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_O_DIRECT)
    return False


def append(fd: int, pieces: Sequence[bytes | memoryview]) -> None:
    """Write `pieces` at the position of a file that `open_file` gave, in all a multiple of PAGE. Raises OSError."""
    buffer = _buffer()
    filled = 0
    for piece in pieces:
        rest = np.frombuffer(piece, np.uint8)
        while len(rest):
            part = min(len(rest), len(buffer) - filled)
            buffer[filled : filled + part] = rest[:part]
            filled, rest = filled + part, rest[part:]
            if filled == len(buffer):
                _write_all(fd, buffer.data)
                filled = 0
    _write_all(fd, buffer[:filled].data)


def _write_all(fd: int, view: memoryview) -> None:
    while len(view):
        try:
            view = view[os.write(fd, view) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not fcntl.fcntl(fd, fcntl.F_GETFL) & _O_DIRECT:
                raise
            _through_cache(fd)


def _forget(fd: int) -> None:
    """Ask the page cache to drop what it holds of a file, as far as that is on the medium."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _buffer() -> NDArray[np.uint8]:
    """This thread's buffer, _LONGEST bytes long. What of it was never used takes no memory."""
    held: NDArray[np.uint8] | None = getattr(_buffers, "held", None)
    if held is None:
        held = _buffers.held = aligned(_LONGEST)
    return held


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """Zeros for direct transfers: in huge pages where there are any.

    A device is told where each page of memory lies, so with small ones a transfer goes in more pieces: reads of 2 MiB
    were measured to take 2.8 times as long.
    """
    memory = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _HUGE
    return whole[start : start + nbytes]


def round_up(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
