"""One session: frames in and out, and the calls that wait for them.

Whoever waits for a reply reads the socket itself while nobody else does (it *leads*), so
that a call costs no switch between threads; else the pool's I/O thread reads. The state
of the stream is kept between reads, so that the reader may change at any byte. No read
blocks: a reader polls without holding anything, and reads under `_step`. Whoever takes
a call back takes `_step` too, and then nothing lands in the call's memory any more.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
from typing import Callable, Iterator, List, Optional, TypeVar

from . import _wire as wire
from ._calls import Budget, Call, Cancel
from ._dial import Dialled, poller
from ._errors import DeadlineError, DisconnectedError, Error, InternalError, InvalidError, error_of
from ._inbox import Inbox
from ._outbox import LATER, Buffer, Outbox
from ._places import Places

monotonic = time.monotonic

PING_AFTER = 10.0  # seconds of silence
DEAD_AFTER = 30.0
_LOOK = 0.1  # seconds after a call for which the I/O thread looks every LATER
_GRACE = 0.05  # seconds past a call's deadline in which the server may say so itself
_REMOTE_GRACE = 2.0  # the same, for calls in which the daemon moves the bytes
_QUIET = 5.0  # seconds that a server may take to close a connection with regions
_LOOK_UP = 0.5  # seconds after which a reader looks whether the session has ended
_READS = 64  # by the I/O thread before it looks around
_LONG = 3600.0
_FAREWELL = 1.0  # seconds that a server may take to hear that all is given back

T = TypeVar("T")


def _nothing() -> None:
    pass


class Connection:
    """A session, from hello to end. When it has ended, `error` says why, all calls fail,
    and it is of no more use."""

    def __init__(self, d: Dialled, wake: Callable[[], None]) -> None:
        self.welcome = d.welcome
        self.memory = d.memory
        self.passed = d.passed
        self.hints = bool(d.welcome.features & wire.FEATURE_HINTS)
        self._regions = bool(d.welcome.features & wire.FEATURE_REGIONS)
        self._unquiet: List[Call] = []  # calls of regions that the server may still write to
        self.message = min(d.welcome.message, wire.MAX_MESSAGE)  # most bytes of one
        self.keys = min(d.welcome.keys, wire.keys_of(self.message))
        self.budget = Budget(min(d.welcome.calls, 1 << 16), min(d.welcome.bytes, 1 << 62))
        self.error: Optional[DisconnectedError] = None
        # A call ran out while nothing came at all: who asks now is not made to wait.
        self.stalled = False
        self.places = Places(self)
        # Takes the places that the server still holds for this process when the session
        # has ended, since it is not told that nobody writes there any more.
        self.on_leftover: Callable[[List[int]], None] = lambda grants: None

        self._stream = d.stream
        self._fd = d.stream.fileno()
        self.wake_io = wake
        self.io_thread = 0
        self._ids = itertools.count(1)

        # Locks that may be taken again by their holder are those that __del__ takes, which
        # runs anywhere.
        #
        # Reading. _role: who polls the socket. _step: who reads, and changes the inbox.
        self._role = threading.Lock()
        self._step = threading.RLock()
        self._epoll = select.epoll()
        self._epoll.register(self._fd, select.EPOLLIN)
        self._poll = poller(self._fd, select.POLLIN)
        self._in = Inbox(self, d.stream)
        self._calls = self._in.calls
        self._pinged = self._in.heard

        self._out = Outbox(self, d.stream, self._ids)
        self._called = 0.0  # when the last call began
        self._expire_at = monotonic()  # when to look for idle places
        self._end_lock = threading.Lock()

    # Calls

    def begin(self, call: Call) -> None:
        """Puts a call into the table under a new id. DisconnectedError."""
        call.id = next(self._ids)
        call.began = self._called = monotonic()
        if call.lands:
            self._in.landers.add(call.id)
        self._calls[call.id] = call
        if self.error is not None:
            self._calls.pop(call.id, None)
            raise self.lost()

    def trip(
        self, code: int, payload: bytes, deadline: float, call: Optional[Call] = None, cancel: Optional[Cancel] = None
    ) -> bytes:
        """One call from begin to end: its message, and the wait for the reply's payload.
        InvalidError for a message that the session does not take."""
        if len(payload) > self.message:
            raise InvalidError(f"message of {len(payload)} bytes, this session takes at most {self.message}")
        if call is None:
            call = Call(wire.REPLY[code])
        if cancel is None:
            return self._trip(code, payload, deadline, call, cancel)
        try:
            return self._trip(code, payload, deadline, call, cancel)
        finally:
            cancel.leave()

    def _trip(self, code: int, payload: bytes, deadline: float, call: Call, cancel: Optional[Cancel]) -> bytes:
        lead = sent = False

        def let_go() -> None:  # nobody must hinder others from reading while it cannot write
            nonlocal lead
            if lead:
                lead = False
                self._hand_over()

        try:
            self.begin(call)
            if cancel is not None:
                cancel.enter(self, call)
            try:
                lead = self._take_role()
                self.send([wire.message(code, call.id, payload)], deadline, let_go)
                sent = True
                if lead:
                    self._lead(call, deadline + self._grace(call))
            finally:
                let_go()
            return self.wait(call, deadline)
        except BaseException as e:  # whatever it was: nothing lands any more
            if not isinstance(e, Error):
                self.interrupted(e)
            if sent and call.remote and not call.done:
                self._end_remote(call)
            elif self.abandon(call):
                self.cancel_later(call.id)
            raise

    def interrupted(self, e: BaseException) -> None:
        """Ends the session after an exception that may come at any step, from the handler of
        a signal: a lock may be left locked then, or a frame half read."""
        self.end(DisconnectedError(f"connection given up: a call was interrupted by {e!r}"))

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Around steps between which the session is not in order: what they count or hold
        may stay so for ever when they are interrupted."""
        try:
            yield
        except Error:
            raise
        except BaseException as e:
            self.interrupted(e)
            raise

    @contextlib.contextmanager
    def in_flight(self, n: int, deadline: float, cancel: Optional[Cancel] = None) -> Iterator[None]:
        """Around a call and its n bytes: waits for room for them. DeadlineError,
        CancelledError."""
        try:
            taken = self.budget.take(n, deadline, cancel)
            try:
                yield
            finally:
                self.budget.give(taken)
        except Error:
            raise
        except BaseException as e:
            self.interrupted(e)
            raise

    def wait(self, call: Call, deadline: float) -> bytes:
        """Waits for the reply to a call whose message was sent. Raises what it says, or
        DeadlineError, and then nothing of the call's memory is touched any more."""
        deadline += self._grace(call)
        while not call.done:
            left = deadline - monotonic()
            if left <= 0:
                self._overdue(call)
                break
            if self._take_role():
                try:
                    self._lead(call, deadline)
                finally:
                    self._hand_over()
            else:
                # The I/O thread, where it is this one, reads when the present reader leaves.
                reader = threading.get_ident() == self.io_thread
                call.lock.acquire(timeout=min(left, LATER if reader else _LONG))
        if call.error is not None:
            raise call.error
        return call.payload

    def _grace(self, call: Call) -> float:
        return _REMOTE_GRACE if call.remote else _GRACE

    def _overdue(self, call: Call) -> None:
        if call.remote:
            self._end_remote(call)
        if not self.abandon(call, DeadlineError("no answer in time")):
            return
        self.cancel_later(call.id)
        if self._in.heard < call.began:
            self.stalled = True
            self.wake_io()

    def _end_remote(self, call: Call) -> None:
        """Ends the session for a call whose memory is the daemon's until that says otherwise,
        or has closed the connection."""
        self.end(DisconnectedError("connection given up: a call on a region was not answered in time"))
        call.lock.acquire(timeout=_QUIET + 1.0)

    def abandon(self, call: Call, error: Optional[Error] = None) -> bool:
        """Takes a call back: from now on nothing lands in its memory. With an error the
        call has ended with it, unless it was over before: then it is False."""
        with self._step:
            mine = call.id in self._calls
            self._in.let_go(call)
            if mine and error is not None:
                call.finish(error)
            self._calls.pop(call.id, None)
            self._in.landers.discard(call.id)
        return mine

    # Reading

    @contextlib.contextmanager
    def leading(self, wanted: bool) -> Iterator[Callable[[], None]]:
        """Reads on this thread while it does something that takes a while, where what it
        gets is called now and then: so that no other thread has to be woken for answers.
        Nothing in between may wait for the session."""
        lead = wanted and self._take_role()
        try:
            yield self._look if lead else _nothing
        finally:
            if lead:
                self._hand_over()

    def _look(self) -> None:
        if self._poll.poll(0):
            self._read(None, _READS, 0.0)

    def _take_role(self) -> bool:
        """Takes the role of the reader, if it is free: the I/O thread looks away then."""
        if not self._role.acquire(False):
            return False
        if self.error is not None:  # and the socket closed, perhaps
            self._role.release()
            return False
        self._epoll.modify(self._fd, 0)
        return True

    def _hand_over(self) -> None:
        """Gives up the role of the reader."""
        if self.error is None:
            self._epoll.modify(self._fd, select.EPOLLIN)
        self._role.release()
        if self._stream.pending():
            self.wake_io()

    def _lead(self, call: Call, deadline: float) -> None:
        """Reads until a call is over or its time is."""
        while not call.done and self.error is None:
            left = deadline - monotonic()
            if left <= 0:
                return
            if self._stream.pending() or self._poll.poll(min(left, _LOOK_UP) * 1000):
                self._read(call, 1 << 30, deadline)

    def attend(self) -> None:
        """Reads what is there, for the I/O thread, if nobody else does."""
        if self._role.acquire(timeout=0.001):
            try:
                self._read(None, _READS, 0.0)
            finally:
                self._role.release()

    def _read(self, until: Optional[Call], reads: int, deadline: float) -> None:
        """Reads until there is nothing more, or a call is over, or its time."""
        try:
            for _ in range(reads):
                with self._step:
                    if self.error is not None:
                        return
                    self._in.read_once()
                if until is not None and (until.done or self._in.heard > deadline):
                    return
        except BlockingIOError:
            return
        except DisconnectedError as e:
            self.end(e)
        except (OSError, wire.WireError) as e:
            self.end(DisconnectedError(f"connection lost: {e}"))
        except BaseException as e:
            self.interrupted(e)
            raise

    def take_message(self, code: int, id: int, payload: bytes) -> None:
        if code == wire.REVOKE:
            self.places.revoke(wire.read_revoke(payload))
            return
        call = self._calls.get(id)
        if call is None:
            self._late(code, payload)
            return
        if code == wire.FAILED:
            status, text = wire.read_failed(payload)
            self._take(call, error_of(status, text))
            return
        if code != call.want:
            raise wire.WireError(f"code {code} in reply to a call that wants {call.want}")
        if call.stream is not None:
            if not call.stream(payload):
                self._take(call, None)
            return
        call.payload = payload
        self._take(call, None)

    def skipped_message(self, id: int, length: int) -> None:
        """Fails the call whose reply was longer than messages are."""
        call = self._calls.get(id)
        if call is not None:
            self._take(call, InvalidError(f"reply of {length} bytes, this session takes at most {self.message}"))

    def _take(self, call: Call, error: Optional[Error]) -> None:
        if call.id in self._calls:
            call.finish(error)
            self._calls.pop(call.id, None)
            self._in.landers.discard(call.id)

    def _late(self, code: int, payload: bytes) -> None:
        """Takes the reply to a call that is over: what it brings is given back."""
        if code == wire.GOT:
            self.release_later(wire.read_got(payload).lease)
        elif code == wire.MATCHED:
            self.release_later(wire.read_matched(payload).lease)
        elif code == wire.GRANTED:
            for place in wire.read_granted(payload).places:
                self.give_back_later(place.grant)
        elif code == wire.PUT_DONE:
            for place in wire.read_put_done(payload).granted.places:
                self.give_back_later(place.grant)

    # Writing

    def send(
        self, buffers: List[Buffer], deadline: float, before_blocking: Optional[Callable[[], None]] = None
    ) -> None:
        """Sends whole frames. DeadlineError, DisconnectedError."""
        self._out.send(buffers, deadline, before_blocking)

    def release_later(self, lease: int) -> None:
        """Gives a lease back soon. 0 is none."""
        self._out.release(lease)

    def give_back_later(self, grant: int) -> None:
        """Gives a place back, to which nothing of this side writes any more."""
        if not self._out.give_back(grant) and self.passed:
            self.on_leftover([grant])

    def answer(self, frame: bytes) -> None:
        """Sends a frame soon: a reader must not wait to send."""
        self._out.keep(frame)

    def cancel_later(self, id: int) -> None:
        """Tells the server that nobody waits for a call any more."""
        self._out.keep(wire.message(wire.CANCEL, id, b""))

    # The I/O thread

    def serve_for(self, wake_fd: int, most: float) -> bool:
        """Waits for bytes, a wake-up, or at most so many seconds, and does what is due.
        It returns whether it was woken."""
        now = monotonic()
        if self._out.attentive(now - self._called < _LOOK):
            most = min(most, LATER)
        most = min(most, max(0.0, self._expire_at - now))
        due = (PING_AFTER if self._pinged <= self._in.heard else DEAD_AFTER) + self._in.heard
        if self.stalled:
            due = min(due, self._pinged + 1.0)
        woken = False
        for fd, _ in self._epoll.poll(max(0.0, min(most, due - now))):
            if fd == wake_fd:
                woken = True
            elif self.error is None:
                self.attend()
        if self.error is None and self._stream.pending():
            self.attend()
        now = monotonic()
        if now >= self._expire_at:
            self._expire_at = now + self.places.expire(now)
        self._tell()
        self._keep_alive()
        return woken

    def look_by(self, when: float) -> None:
        """Lets the I/O thread look for idle places by then."""
        if self._expire_at > when:
            self._expire_at = when
            self.wake_io()

    def farewell(self) -> None:
        """Gives idle places back before the session is closed: where this side can write
        to them the server has to keep them until the process has ended."""
        idle = self.places.end()
        leases, grants = self._out.drain()
        grants += idle
        try:
            for at in range(0, max(len(leases), len(grants)), self.keys):
                part = slice(at, at + self.keys)
                self.trip(wire.RELEASE, wire.release(leases[part], grants[part]), monotonic() + _FAREWELL)
        except Error:
            if self.passed and grants:
                self.on_leftover(grants)

    def watch(self, fd: int) -> None:
        """Makes this thread the I/O thread; a readable descriptor ends serve_for."""
        self.io_thread = threading.get_ident()
        self._epoll.register(fd, select.EPOLLIN)

    def _tell(self) -> None:
        if self._out.untold() and self.error is None:
            try:
                self.send([], monotonic() + 5.0)
            except Error:
                pass  # a server that takes nothing for so long: the session has ended

    def _keep_alive(self) -> None:
        now = monotonic()
        silent = now - self._in.heard
        if silent >= DEAD_AFTER:
            self.end(DisconnectedError(f"nothing came from the daemon for {silent:.0f} s"))
            return
        ping = silent >= PING_AFTER and self._pinged <= self._in.heard
        if ping or (self.stalled and now - self._pinged >= 1.0):
            self._pinged = now
            self._out.ping()

    # The end

    def end(self, error: DisconnectedError) -> None:
        """Fails all calls. The I/O thread closes the socket then. Who comes later does what
        is left of it: the first one may have been interrupted."""
        with self._end_lock:
            if self.error is None:
                self.error = error
        _, left = self._out.drain()
        # With regions the server says by its own end that it has let go of them.
        quiet = self._in.eof or not self._regions
        try:
            self._stream.sock.shutdown(socket.SHUT_RDWR if quiet else socket.SHUT_WR)
        except OSError:
            quiet = True  # it had ended
        self.budget.end()
        for id, call in list(self._calls.items()):
            if not call.remote or quiet:
                call.finish(self.lost())
            elif call not in self._unquiet:
                self._unquiet.append(call)
            self._calls.pop(id, None)
        left += self.places.end()
        if self.passed and left:
            self.on_leftover(left)
        self.wake_io()

    def lost(self) -> DisconnectedError:
        """The error of a session that has ended, for one caller: it grows where it is raised."""
        return DisconnectedError(str(self.error))

    def close(self) -> None:
        """Frees what the session holds, when nobody is in it any more. For the I/O thread,
        or who has ended that."""
        self.end(DisconnectedError("the session was closed"))
        # Who reads or sends looks up in time. A signal may have left these locked for ever.
        taken = [lock for lock in (self._role, self._out.lock) if lock.acquire(timeout=2 * _LOOK_UP)]
        if self._unquiet:  # without _step: calls take it to end
            self._await_quiet()
        with self._step:
            self._epoll.close()
            self._stream.sock.close()
            self._in.end()
            self._let_go()
        for lock in taken:
            lock.release()

    def _await_quiet(self) -> None:
        """Waits until the server has closed the connection, and so let go of the regions."""
        end = monotonic() + _QUIET
        waste = memoryview(bytearray(wire.MAX_DATA))
        try:
            while self._poll.poll(max(0.0, end - monotonic()) * 1000) and self._stream.read(waste) > 0:
                pass
        except OSError:
            pass  # it has ended
        for call in self._unquiet:
            call.finish(self.lost())
        self._unquiet = []

    def close_in_child(self) -> None:
        """Leaves a session that is the parent's: what its caller still has of it ends, and
        nothing is told to the server. Its locks may be held by threads that are not here."""
        self.passed = False
        self.error = DisconnectedError("the session is the parent's")
        self.wake_io = lambda: None
        self._role, self._step = threading.Lock(), threading.RLock()
        self._out = Outbox(self, self._stream, self._ids)
        self.places = Places(self)
        while self._calls:  # watches of the thread that is here; others wait for none
            self._calls.popitem()[1].finish(self.lost())
        self._epoll.close()
        os.close(self._stream.sock.detach())  # to shut it down would be the parent's end, too
        self._let_go()

    def give_up(self, text: str) -> InternalError:
        """Ends the session after an answer that makes no sense, and returns the error."""
        self.end(DisconnectedError(f"connection given up: {text}"))
        return InternalError(text)

    def decode(self, read: Callable[[bytes], T], payload: bytes) -> T:
        """What a payload says. One that makes no sense is the end of the session."""
        try:
            return read(payload)
        except wire.WireError as e:
            raise self.give_up(str(e)) from e

    def check_count(self, n: int, want: int) -> None:
        """Refuses an answer of another number of keys than were asked about."""
        if n != want:
            raise self.give_up(f"the daemon answered {n} keys of {want}")

    # The store's memory

    def at(self, chunk: int, offset: int, n: int) -> Optional[memoryview]:
        """A place in the store's memory, None when this side could not map it. InternalError
        when there is none."""
        memory = self.memory
        if memory is None and self.error is not None:
            raise self.lost()
        try:
            if memory is None:
                raise KeyError(chunk)
            view = memory.find(chunk)
            if view is None:
                return None
            if offset + n > len(view):
                raise KeyError(chunk)
        except KeyError:
            if self.error is not None:
                raise self.lost() from None
            raise self.give_up(f"the daemon named {n} bytes at {offset} of chunk {chunk}") from None
        return view[offset : offset + n]

    def _let_go(self) -> None:
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.close()
