"""The store's memory in this process: all of it, or those chunks that the daemon passes."""

from __future__ import annotations

import array
import fcntl
import logging
import mmap
import os
import socket
import threading
from typing import Dict, Optional, Sequence, Union

from . import _wire as wire

_log = logging.getLogger("kvtier")

_F_GET_SEALS = 1034
_F_SEAL_SHRINK = 2


class Whole:
    """Memory whose files came with the hello, one for each chunk."""

    def __init__(self, files: Sequence[int], lengths: Sequence[int]) -> None:
        """Maps them, all or none. ValueError, OSError."""
        if len(files) != len(lengths) or not files:
            raise ValueError(f"the daemon passed {len(files)} files and told the lengths of {len(lengths)}")
        self._views = [_map(fd, length, f"chunk {i}") for i, (fd, length) in enumerate(zip(files, lengths))]

    def find(self, chunk: int) -> Optional[memoryview]:
        """The chunk of that number, KeyError when there is none."""
        if chunk >= len(self._views):
            raise KeyError(chunk)
        return self._views[chunk]

    def close(self) -> None:
        """Lets go of the memory: it is unmapped when nobody has a view of it any more."""
        self._views = []


class Chunks:
    """Memory of which the daemon passes chunks, each before it names a place in it. Their
    files lie in a socket until then."""

    def __init__(self, fd: int) -> None:
        """Takes the socket over."""
        self._sock = socket.socket(fileno=fd)
        self._sock.setblocking(False)
        self._lock = threading.Lock()
        self._views: Dict[int, Optional[memoryview]] = {}
        self._last = -1  # highest number that came

    def find(self, chunk: int) -> Optional[memoryview]:
        """The chunk of that number, None when it could not be mapped, or is gone, since the
        caller was held up for longer than a lease lasts. KeyError when it was not passed."""
        with self._lock:
            while chunk not in self._views and self._receive():
                pass
            return self._views.get(chunk) if chunk <= self._last else self._views[chunk]

    def _receive(self) -> bool:
        """Takes the next file out of the socket, if there is one."""
        files = array.array("i")
        try:
            data, ancillary, _, _ = self._sock.recvmsg(wire.MAX_PASSED, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return False  # there is none, or none comes any more
        for level, kind, b in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                files.frombytes(b[: len(b) - len(b) % files.itemsize])
        if not data:
            return False
        try:
            number, length, gone = wire.read_passed(data)
            for n in gone:  # unmapped when nobody has a view of it any more
                self._views.pop(n, None)
            self._views[number] = None
            self._last = max(self._last, number)
            if len(files) != 1:
                raise ValueError(f"{len(files)} files came for chunk {number}")
            self._views[number] = _map(files[0], length, f"chunk {number}")
        except (OSError, ValueError, wire.WireError) as e:
            _log.warning("a chunk of the store's memory is done without: %s", e)
        finally:
            for fd in files:
                os.close(fd)
        return True

    def close(self) -> None:
        """Lets go of the memory, as above, and of the socket."""
        with self._lock:
            self._views = {}
            self._sock.close()


Memory = Union[Whole, Chunks]


def _map(fd: int, length: int, what: str) -> memoryview:
    """Maps a file of the store's memory, for reading only where the daemon passed it so."""
    if not fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK:
        raise ValueError(f"{what} of the store's memory is not sealed against shrinking")
    if os.fstat(fd).st_size < length:
        raise ValueError(f"{what} of the store's memory is shorter than {length} bytes")
    write = mmap.PROT_WRITE if writable(fd) else 0
    return memoryview(mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ | write))


def writable(fd: int) -> bool:
    """Whether a descriptor is open for writing, too."""
    return fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR) == os.O_RDWR
