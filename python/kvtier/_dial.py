"""Opens a session: the connection, the hellos, and the store's memory that comes along."""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import stat
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, List, Optional, Sequence, Tuple, Union

from . import _wire as wire
from ._errors import DeadlineError, DisconnectedError, InvalidError, UnavailableError, error_of
from ._memory import Chunks, Memory, Whole, writable

if TYPE_CHECKING:
    import ssl

_MAX_FILES = 253  # descriptors in one message, the kernel's limit
_UNIX_PATH = 107  # bytes


@dataclass(frozen=True)
class Region:
    """Memory of this process in a file, in which the daemon may move bytes itself.

    Give the open file's descriptor (`fd`; it is not closed, and must stay open while the
    pool is), or the file's absolute `path`, which this user must own. `length` in bytes,
    0: the whole file. With `readonly` the daemon may only read there (puts).
    """

    fd: Optional[int] = None
    path: str = ""
    length: int = 0
    readonly: bool = False

    def size(self) -> int:
        """Bytes of the region. InvalidError when there are not so many."""
        if (self.fd is None) == (not self.path):
            raise InvalidError("region: give either fd or path")
        try:
            st = os.stat(self.path) if self.fd is None else os.fstat(self.fd)
        except OSError as e:
            raise InvalidError(f"region: {e}") from e
        if not stat.S_ISREG(st.st_mode):
            raise InvalidError(f"region: {self.path or self.fd} is no regular file")
        if self.path and not os.path.isabs(self.path):
            raise InvalidError(f"region: path {self.path!r} is not absolute")
        if not 0 <= self.length <= st.st_size or st.st_size == 0:
            raise InvalidError(f"region: length {self.length} of a file of {st.st_size} bytes")
        return self.length or st.st_size


@dataclass(frozen=True)
class Address:
    """Where a daemon serves sessions."""

    text: str
    unix: bool
    host: str  # or path
    port: int

    @staticmethod
    def parse(text: str) -> "Address":
        """Reads unix:PATH or HOST:PORT. InvalidError."""
        if not isinstance(text, str):
            raise TypeError(f"address: {type(text).__name__}, want str")
        if text.startswith("unix:"):
            path = text[5:]
            n = len(os.fsencode(path))
            if "\0" in path:
                raise InvalidError(f"address {text!r}: path with a zero byte")
            if not 1 <= n <= _UNIX_PATH:
                raise InvalidError(f"address {text!r}: path of {n} bytes, want 1 to {_UNIX_PATH}")
            return Address(text, True, path, 0)
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise InvalidError(f"address {text!r}: want unix:PATH or HOST:PORT")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        return Address(text, False, host, int(port))


class PlainStream:
    """A socket that does not block."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    @property
    def owes(self) -> bool:
        """Whether what was refused last must be written before anything else."""
        return False

    def fileno(self) -> int:
        return self.sock.fileno()

    def read(self, into: memoryview, more: Optional[memoryview] = None) -> int:
        """Reads into one view and on into the other; 0 is the end, BlockingIOError when
        there is nothing."""
        if more is None:
            return self.sock.recv_into(into)
        return self.sock.recvmsg_into((into, more))[0]

    def write(self, buffers: Sequence[Union[bytes, memoryview]]) -> int:
        """Writes some of the bytes, and returns how many. BlockingIOError."""
        return self.sock.sendmsg(buffers)

    def pending(self) -> bool:
        """Whether there is something to read of which poll does not know."""
        return False


class TlsStream(PlainStream):
    """The same over TLS. One thread at a time is in it: OpenSSL wants it so."""

    def __init__(self, sock: "ssl.SSLSocket") -> None:
        import ssl

        super().__init__(sock)
        self.tls = sock
        self.lock = threading.Lock()
        self.again = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
        self._owes = False

    @property
    def owes(self) -> bool:
        """Whether bytes were taken that are not sent: OpenSSL must be given them again."""
        return self._owes

    def read(self, into: memoryview, more: Optional[memoryview] = None) -> int:
        with self.lock:
            try:
                return self.tls.recv_into(into)
            except self.again:
                raise BlockingIOError(errno.EAGAIN, "TLS") from None

    def write(self, buffers: Sequence[Union[bytes, memoryview]]) -> int:
        some: List[Union[bytes, memoryview]] = []
        size = 0
        for b in buffers:
            if some and size + len(b) > wire.MAX_DATA + 4096:
                break
            some.append(b)
            size += len(b)
        joined = some[0] if len(some) == 1 else b"".join(some)
        with self.lock:
            try:
                n = self.tls.send(joined)
                self._owes = False
                return n
            except self.again:
                self._owes = True
                raise BlockingIOError(errno.EAGAIN, "TLS") from None

    def pending(self) -> bool:
        with self.lock:
            return self.tls.pending() > 0


@dataclass
class Dialled:
    """A session that was opened."""

    stream: PlainStream
    welcome: wire.Welcome
    memory: Optional[Memory]  # the store's
    passed: bool  # the server has passed its memory to be written to, mapped or not
    warning: str  # why it was not mapped


def dial(
    address: Address,
    token: str,
    name: str,
    tls: Optional["ssl.SSLContext"],
    shared: bool,
    regions: Sequence[Region],
    timeout: float,
) -> Dialled:
    """Connects and says hello. DisconnectedError when nobody answers, DeniedError when the
    token is wrong, and so on: what the server says."""
    end = time.monotonic() + timeout
    sock = _connect(address, tls, timeout)
    try:
        return _greet(sock, address, token, name, tls, shared, regions, end)
    except BaseException:
        sock.close()
        raise


def _connect(address: Address, tls: Optional["ssl.SSLContext"], timeout: float) -> socket.socket:
    try:
        if address.unix:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(timeout)
                sock.connect(address.host)
            except BaseException:
                sock.close()
                raise
        else:
            sock = socket.create_connection((address.host, address.port), timeout)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as e:
        raise DisconnectedError(f"connect to {address.text}: {e}") from e
    if tls is None or address.unix:
        return sock
    try:
        return tls.wrap_socket(sock, server_hostname=address.host)
    except OSError as e:
        sock.close()
        raise DisconnectedError(f"connect to {address.text}: TLS: {e}") from e


def _greet(
    sock: socket.socket,
    address: Address,
    token: str,
    name: str,
    tls: Optional["ssl.SSLContext"],
    shared: bool,
    regions: Sequence[Region],
    end: float,
) -> Dialled:
    wanted = wire.FEATURE_HINTS
    if address.unix:
        if shared:
            wanted |= wire.FEATURE_SHARED | wire.FEATURE_CHUNKS
        if regions:
            wanted |= wire.FEATURE_REGIONS
    elif regions:
        raise InvalidError("regions: only over a unix socket")
    if len(regions) > wire.MAX_REGIONS:
        raise InvalidError(f"regions: {len(regions)}, at most {wire.MAX_REGIONS}")
    told = [(r.size(), 1 if r.readonly else 0, r.path) for r in regions]
    payload = wire.hello(token, name, wanted, regions=told)
    files: List[int] = []
    try:
        sock.settimeout(max(0.001, end - time.monotonic()))
        _send_hello(sock, payload, [r.fd for r in regions if r.fd is not None])
        welcome = wire.read_welcome(_recv_hello(sock, address.unix, files, end))
        if welcome.status != 0:
            raise error_of(welcome.status, f"{address.text}: {welcome.text}")
        _check(welcome, wanted)
        if regions and not welcome.features & wire.FEATURE_REGIONS:
            raise UnavailableError(f"{address.text}: the daemon takes no regions")
        memory: Optional[Memory] = None
        warning = ""
        passed = False
        if welcome.features & wire.FEATURE_SHARED:
            passed = any(writable(fd) for fd in files)
            try:
                memory = Whole(files, welcome.chunks)
            except (OSError, ValueError) as e:
                warning = str(e)
        elif welcome.features & wire.FEATURE_CHUNKS:
            if not files:
                raise wire.WireError("no socket came for the files of memory")
            passed = True
            memory = Chunks(files.pop(0))
    except wire.WireError as e:
        raise InvalidError(f"{address.text} is no kvtier session: {e}") from e
    except (socket.timeout, BlockingIOError) as e:
        raise DeadlineError(f"hello of {address.text}: nothing came in time") from e
    except OSError as e:
        raise DisconnectedError(f"hello of {address.text}: {e}") from e
    finally:
        for fd in files:
            os.close(fd)
    sock.setblocking(False)
    stream: PlainStream
    if tls is None or address.unix:
        stream = PlainStream(sock)
    else:
        from ssl import SSLSocket

        assert isinstance(sock, SSLSocket)
        stream = TlsStream(sock)
    return Dialled(stream, welcome, memory, passed, warning)


def _send_hello(sock: socket.socket, payload: bytes, fds: Sequence[int]) -> None:
    frame = wire.header(wire.HELLO, len(payload)) + payload
    if not fds:
        sock.sendall(frame)
        return
    rights: List[Tuple[int, int, Any]] = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    sent = sock.sendmsg([frame], rights)
    sock.sendall(frame[sent:])


def _recv_hello(sock: socket.socket, unix: bool, files: List[int], end: float) -> bytes:
    """The payload of the server's hello; descriptors go to files."""
    head = b""
    if unix:
        space = socket.CMSG_SPACE(_MAX_FILES * 4)
        head, ancillary, flags, _ = sock.recvmsg(wire.HEADER_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                got = array.array("i")
                got.frombytes(data[: len(data) - len(data) % got.itemsize])
                files.extend(got)
        if flags & socket.MSG_CTRUNC:
            raise wire.WireError("files were cut off")
    head += _recv_all(sock, wire.HEADER_BYTES - len(head), end)
    length, kind = wire.HEADER.unpack(head)[:2]
    if kind not in (wire.HELLO, wire.BYE) or length > wire.MAX_HELLO:
        raise wire.WireError(f"a frame of type {kind} and {length} bytes in place of a hello")
    payload = _recv_all(sock, length, end)
    if kind == wire.BYE:
        raise DisconnectedError(f"the daemon says bye: {payload[:256].decode('utf-8', 'replace')}")
    return payload


def _recv_all(sock: socket.socket, n: int, end: float) -> bytes:
    out = bytearray()
    while len(out) < n:
        sock.settimeout(max(0.001, end - time.monotonic()))  # of all of it, not of each piece
        b = sock.recv(n - len(out))
        if not b:
            raise DisconnectedError("the connection ended in the hello")
        out += b
    return bytes(out)


def _check(w: wire.Welcome, wanted: int) -> None:
    if w.version != wire.VERSION:
        raise UnavailableError(f"the daemon speaks version {w.version}, want {wire.VERSION}")
    if not (w.calls and w.bytes and w.keys and w.grants and w.grant_bytes):
        raise wire.WireError(f"limits of {w.calls} calls, {w.bytes} bytes, {w.keys} keys, {w.grants} grants")
    if not wire.MIN_TOLD <= w.message <= wire.MAX_TOLD:
        raise wire.WireError(f"messages of {w.message} bytes, want {wire.MIN_TOLD} to {wire.MAX_TOLD}")
    if w.features & ~wanted:
        raise wire.WireError(f"features {w.features:#x}, wanted {wanted:#x}")


def poller(fd: int, mask: int) -> select.poll:
    """Waits for one descriptor."""
    p = select.poll()
    p.register(fd, mask)
    return p
