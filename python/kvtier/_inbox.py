"""What a session receives: bytes into frames, and those of blocks to where calls want them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Dict, Optional, Set, Tuple

from . import _wire as wire
from ._calls import Call
from ._dial import PlainStream
from ._errors import DisconnectedError

if TYPE_CHECKING:
    from ._connection import Connection

monotonic = time.monotonic

_AHEAD = 16 << 10  # bytes that are read at once while no call wants data


class Inbox:
    """The receiving side. It keeps the state of the stream between reads, so that whoever
    holds the session's `_step` may read on at any byte; nobody else touches it."""

    def __init__(self, conn: "Connection", stream: PlainStream) -> None:
        self._conn = conn
        self._stream = stream
        self.calls: Dict[int, Call] = {}
        self.landers: Set[int] = set()  # calls that data is for
        self.heard = monotonic()
        self.eof = False  # the server has closed the connection
        self._head = bytearray(wire.HEADER_BYTES)
        self._head_view = memoryview(self._head)
        self._had = 0  # bytes of the next header
        self._target: Optional[memoryview] = None  # of what is missing of a payload
        self._landing: Optional[Call] = None  # whose memory it is
        self._payload: Optional[bytearray] = None  # of a frame that is no data
        self._frame: Tuple[int, int, int, int, int, int] = (0, 0, 0, 0, 0, 0)
        self._scratch = bytearray(0)
        self._ahead = memoryview(bytearray(_AHEAD))

    def let_go(self, call: Call) -> None:
        """From now on nothing lands in a call's memory; the rest of a frame is wasted."""
        if self._landing is call:
            if self._target is not None:  # else its reader was interrupted between two frames
                self._target = self._waste(len(self._target))
            self._landing = None

    def end(self) -> None:
        """Lets go of all memory."""
        self._landing = None
        self._target = None

    def read_once(self) -> None:
        target = self._target
        if target is None and not self._had and not self.landers:
            self._read_ahead()
            return
        if target is not None:
            left = len(target)
            n = self._stream.read(target, self._head_view)
            if n == 0:
                self.eof = True
                raise DisconnectedError("the daemon closed the connection")
            self.heard = monotonic()
            if n < left:
                self._target = target[n:]
                return
            self._had = n - left
            self._target = None
            self._end_frame()
        else:
            n = self._stream.read(self._head_view[self._had :])
            if n == 0:
                self.eof = True
                raise DisconnectedError("the daemon closed the connection")
            self.heard = monotonic()
            self._had += n
        if self._had == wire.HEADER_BYTES:
            self._had = 0
            self._begin_frame()

    def _read_ahead(self) -> None:
        """Reads what there is, in one go, between frames and while no call wants data: there
        is no memory then that bytes could go straight to."""
        ahead = self._ahead
        n = self._stream.read(ahead)
        if n == 0:
            self.eof = True
            raise DisconnectedError("the daemon closed the connection")
        self.heard = monotonic()
        at = 0
        while at < n:
            if n - at < wire.HEADER_BYTES:
                self._had = n - at
                self._head_view[: n - at] = ahead[at:n]
                return
            self._head_view[:] = ahead[at : at + wire.HEADER_BYTES]
            at += wire.HEADER_BYTES
            self._begin_frame()
            target = self._target
            if target is not None:
                more = min(len(target), n - at)
                target[:more] = ahead[at : at + more]
                at += more
                if more < len(target):
                    self._target = target[more:]
                    return
                self._target = None
                self._end_frame()

    def _begin_frame(self) -> None:
        length, kind, flags, _, id, token, offset = wire.HEADER.unpack(self._head)
        if kind == 0 or length > wire.MAX_PAYLOAD.get(kind, wire.MAX_MESSAGE) or kind == wire.HELLO:
            raise wire.WireError(f"a frame of type {kind} and {length} bytes")
        self._frame = (kind, flags, id, token, offset, length)
        if kind == wire.DATA:
            call = self.calls.get(id)
            view = call.land(token, offset, length) if call is not None else None
            if view is not None:
                self._landing = call
            else:
                view = self._waste(length)
        elif kind == wire.MESSAGE and length > self._conn.message:
            view = memoryview(bytearray(length))  # what is in it nobody looks at
        else:
            self._payload = bytearray(length)
            view = memoryview(self._payload)
        if length:
            self._target = view
        else:
            self._end_frame()

    def _waste(self, n: int) -> memoryview:
        """Memory for bytes that nobody wants."""
        if len(self._scratch) < n:
            self._scratch = bytearray(wire.MAX_DATA)
        return memoryview(self._scratch)[:n]

    def _end_frame(self) -> None:
        kind, flags, id, token, offset, length = self._frame
        self._conn.stalled = False
        if kind == wire.DATA:
            call = self._landing
            if call is not None:
                self._landing = None
                call.landed(token, offset, length)
            return
        payload, self._payload = self._payload, None
        if payload is None:
            self._conn.skipped_message(id, length)
            return
        if kind == wire.MESSAGE:
            self._conn.take_message(flags, id, bytes(payload))
        elif kind == wire.PING:
            self._conn.answer(wire.header(wire.PONG, 0, id=id))  # a reader must not wait to send
        elif kind == wire.BYE:
            raise DisconnectedError(f"the daemon says bye: {payload[:256].decode('utf-8', 'replace')}")
