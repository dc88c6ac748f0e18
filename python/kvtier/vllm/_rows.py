"""The rows of an engine's offload memory, and the files that are mapped behind them.

vLLM keeps its primary tier in one mapping of shared memory, cut into rows of equal
length, one row a chunk. Which file that is, or which files, is read from the process's
own list of mappings, not from vLLM's attributes: those differ from version to version,
and a region may be split into files, or unlinked as soon as all workers have it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass

import kvtier

#: The longest block that a namespace can hold. A longer row is kept in parts.
MAX_BLOCK_BYTES = 8 << 20

#: How many regions a session can have.
MAX_REGIONS = 64

_PAGE = 4096


class NotMappedError(Exception):
    """The memory is not, or not wholly, a shared mapping of files that can be opened."""


@dataclass(frozen=True)
class MappedFile:
    """A stretch of memory and the file behind it. fd belongs to whoever asked."""

    start: int  # of the stretch, as an address
    length: int
    fd: int
    offset: int  # of the stretch's first byte, in the file


def files_behind(address: int, length: int) -> list[MappedFile]:
    """Open the files that are mapped, shared, from address on, in order.

    Raises NotMappedError when there is a gap, private memory, a file that cannot be
    opened any more, or one that is shorter than what is mapped of it.
    """
    found: list[MappedFile] = []
    try:
        for start, end, offset, dev, inode, path in _stretches(address, length):
            fd = _open(path, dev, inode, start, end)
            at = max(start, address)
            file = MappedFile(at, min(end, address + length) - at, fd, offset + at - start)
            found.append(file)
            if os.fstat(fd).st_size < file.offset + file.length:
                raise NotMappedError(f"{path} is shorter than what is mapped of it")
        covered = sum(file.length for file in found)
        if covered != length:
            raise NotMappedError(f"files are mapped behind {covered} of {length} bytes")
        if len(found) > MAX_REGIONS:
            raise NotMappedError(f"{len(found)} files, at most {MAX_REGIONS} can be registered")
    except (NotMappedError, OSError) as error:
        for file in found:
            os.close(file.fd)
        if isinstance(error, OSError):
            raise NotMappedError(str(error)) from error
        raise
    return found


def _stretches(address: int, length: int) -> Iterator[tuple[int, int, int, int, int, str]]:
    """Yield the shared file mappings between the addresses, neighbours of one file as one.

    The kernel lists a mapping in several pieces where advice or locks differ.
    """
    last: tuple[int, int, int, int, int, str] | None = None
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            span, flags, offset_text, dev_text, inode_text, *rest = line.rstrip("\n").split(None, 5)
            start, end = (int(x, 16) for x in span.split("-"))
            if end <= address or start >= address + length:
                continue
            if flags[3] != "s" or inode_text == "0":
                raise NotMappedError(f"private memory at {start:x}")
            major, minor = (int(x, 16) for x in dev_text.split(":"))
            dev, inode, offset = os.makedev(major, minor), int(inode_text), int(offset_text, 16)
            path = rest[0] if rest else ""
            if last and last[1] == start and last[3:5] == (dev, inode) and last[2] + start - last[0] == offset:
                last = (last[0], end, *last[2:])
                continue
            if last:
                yield last
            last = (start, end, offset, dev, inode, path)
    if last:
        yield last


def _open(path: str, dev: int, inode: int, start: int, end: int) -> int:
    """Open the file of a mapping: by its name, by a descriptor of this process, or by the mapping.

    What a name leads to need not be what is mapped, so the file is compared.
    """
    candidates = [path]
    candidates += [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    candidates.append(f"/proc/self/map_files/{start:x}-{end:x}")  # only root may
    for candidate in candidates:
        try:
            stat = os.stat(candidate)
            if (stat.st_dev, stat.st_ino) == (dev, inode):
                return os.open(candidate, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
    raise NotMappedError(f"{path or 'a mapped file'} cannot be opened")


class Rows:
    """The rows behind a two-dimensional view of bytes, each in parts that a block can hold.

    When the memory is mapped from files, mapped is true, regions is what a session is
    to register, and segments says where a part is. Otherwise why says what is missing,
    and buffer gives the memory itself.
    """

    def __init__(self, view: memoryview) -> None:
        if view.ndim != 2 or not view.c_contiguous or view.readonly or view.itemsize != 1 or not view.nbytes:
            raise ValueError(f"primary_kv_view: shape {view.shape}, want rows of writable bytes without gaps")
        self.count, self.stride = view.shape
        self.parts = _parts(self.stride)
        self._flat = view.cast("B")
        self.why = ""
        self._files: list[MappedFile] = []
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._flat))
        try:
            self._files = files_behind(self._start, view.nbytes)
        except NotMappedError as error:
            self.why = str(error)

    @property
    def mapped(self) -> bool:
        """Whether a daemon on this host could reach the rows by regions."""
        return bool(self._files)

    def regions(self) -> tuple[kvtier.Region, ...]:
        """Return what to register. The descriptors stay this object's."""
        return tuple(kvtier.Region(fd=file.fd, length=file.offset + file.length) for file in self._files)

    def segments(self, row: int, part: int) -> list[tuple[int, int, int]]:
        """Return where a part of a row is: region, offset, length, one for each file that it touches."""
        at, length = self.parts[part]
        start = self._start + row * self.stride + at
        end = start + length
        return [
            (i, file.offset + max(start, file.start) - file.start, min(end, file.start + file.length) - max(start, file.start))
            for i, file in enumerate(self._files)
            if file.start < end and start < file.start + file.length
        ]

    def buffer(self, row: int, part: int) -> memoryview:
        """Return the memory of a part of a row. Whoever asked releases it."""
        at, length = self.parts[part]
        start = row * self.stride + at
        return self._flat[start : start + length]

    def unmap(self, why: str) -> None:
        """Let the regions be: from now on only buffers are used."""
        self.why = why
        for file in self._files:
            os.close(file.fd)
        self._files = []

    def close(self) -> None:
        """Let go of the engine's memory. Safe twice."""
        self.unmap("closed")
        with contextlib.suppress(BufferError):  # somebody still looks at a row: it goes with them
            self._flat.release()


def _parts(stride: int) -> list[tuple[int, int]]:
    """Cut a row into the fewest parts, of about the same length, that blocks can hold."""
    count = -(-stride // MAX_BLOCK_BYTES)
    length = -(-stride // (count * _PAGE)) * _PAGE
    return [(at, min(length, stride - at)) for at in range(0, stride, length)]
