"""A server that does what it should not, or when it should not."""

import os
import socket
import struct
import threading
import time

import pytest

import kvtier
from conftest import PATIENCE, hashes, pattern, wait_for
from kvtier import _wire as wire
from kvtier._buffers import sum_of


class Fake:
    """A server that does only what its script says."""

    def __init__(self, path):
        self.address = f"unix:{path}"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(8)
        self.listener.settimeout(PATIENCE)
        self.conn = None

    def welcome(self, features=0, incarnation=9, fds=(), chunks=(), **limits):
        """Takes a connection and its hello."""
        self.conn, _ = self.listener.accept()
        self.conn.settimeout(PATIENCE)
        assert self.frame()[0] == wire.HELLO
        lim = {"calls": 8, "bytes": 64 << 20, "keys": 8192, "grants": 8, "grant_bytes": 64 << 20, "message": 1 << 20, **limits}
        p = struct.pack("<4sHHQQQ", b"KVTS", 0, 1, features, 5, incarnation)
        p += struct.pack("<IQIIQ", lim["calls"], lim["bytes"], lim["keys"], lim["grants"], lim["grant_bytes"])
        p += b"\0\0\4\0fake" + struct.pack("<I", len(chunks)) + b"".join(struct.pack("<Q", c) for c in chunks)
        p += struct.pack("<I", lim["message"])
        b = wire.header(wire.HELLO, len(p)) + p
        if fds:
            socket.send_fds(self.conn, [b], list(fds))
        else:
            self.conn.sendall(b)

    def open(self):
        """Answers Open."""
        id, code, _ = self.message(wire.OPEN)
        self.reply(id, wire.OPENED, struct.pack("<IQBIQQQ", 1, 2, 0, 0, 0, 0, 4 << 20))

    def exactly(self, n):
        b = b""
        while len(b) < n:
            more = self.conn.recv(n - len(b))
            if not more:
                raise EOFError
            b += more
        return b

    def frame(self):
        length, kind, flags, _, id, token, offset = wire.HEADER.unpack(self.exactly(32))
        return kind, flags, id, token, offset, self.exactly(length)

    def message(self, code=None):
        """The next message: its call, code and payload. With a code others are passed over."""
        while True:
            kind, got, id, _, _, p = self.frame()
            if kind == wire.MESSAGE and code in (None, got):
                return id, got, p

    def reply(self, id, code, payload):
        self.conn.sendall(wire.message(code, id, payload))

    def data(self, id, payload, token=0, offset=0):
        self.conn.sendall(wire.header(wire.DATA, len(payload), id=id, token=token, offset=offset) + payload)

    def got(self, id, *blocks, lease=0, lease_ms=0, places=None):
        p = struct.pack("<QII", lease, lease_ms, len(blocks))
        for i, b in enumerate(blocks):
            chunk, offset = places[i] if places else (wire.NO_CHUNK, 0)
            p += struct.pack("<HBBIIIQ16s", 0, 0, 2, len(b), len(b), chunk, offset, sum_of(memoryview(b)))
        self.reply(id, wire.GOT, p)

    def close(self):
        if self.conn is not None:
            self.conn.close()
        self.listener.close()


@pytest.fixture
def fake(tmp_path):
    f = Fake(tmp_path / "s")
    yield f
    f.close()


@pytest.fixture
def attached(fake):
    """A pool, a namespace, and the server in the state after Open."""
    thread = threading.Thread(target=lambda: (fake.welcome(), fake.open()))
    thread.start()
    pool = kvtier.connect(fake.address, required=True)
    ns = pool.open("n", max_block_bytes=4 << 20)
    thread.join()
    yield pool, ns, fake
    fake.close()
    pool.close()


def in_thread(f, *args):
    """Runs a call beside the script."""
    out = []
    t = threading.Thread(target=lambda: out.append(f(*args)))
    t.start()

    def result():
        t.join(PATIENCE)
        assert not t.is_alive()
        return out[0]

    return result


def test_wrong_bytes(attached):
    pool, ns, fake = attached
    out = bytearray(5)
    result = in_thread(ns.get_into, hashes(1), [out])
    id, _, _ = fake.message(wire.GET)
    fake.data(id, b"hellO")
    fake.got(id, b"hello")
    r = result()[0]
    assert not r.hit and r.reason == "corrupt" and r.length == 0
    assert pool.stats().corrupt == 1 and pool.connected


def test_data_in_pieces_and_out_of_order(attached):
    pool, ns, fake = attached
    block = pattern(700_001, 3)
    out = [bytearray(len(block)), bytearray(100)]
    result = in_thread(ns.get_into, hashes(2), out)
    id, _, _ = fake.message(wire.GET)
    fake.data(id, b"x" * 10, token=7)  # no such key
    fake.data(id, b"x" * 200, token=1)  # too long
    fake.data(id + 1000, b"x" * 10)  # no such call
    fake.conn.sendall(wire.header(40, 6) + b"unused")  # no such type
    at = 0
    for n in (1, 50_000, 262_144, 100, 262_144, 125_612):
        fake.data(id, block[at : at + n], offset=at)
        at += n
    assert at == len(block)
    p = struct.pack("<QII", 0, 0, 2)
    p += struct.pack("<HBBIIIQ16s", 0, 0, 2, at, at, wire.NO_CHUNK, 0, sum_of(memoryview(block)))
    p += struct.pack("<HBBIIIQ16s", 0, 0, 2, 200, 200, wire.NO_CHUNK, 0, bytes(16))
    fake.reply(id, wire.GOT, p)
    r = result()
    assert r[0].hit and bytes(out[0]) == block
    assert r[1].status == kvtier.Status.INVALID and r[1].total == 200 and out[1] == bytes(100)


def test_late_data_does_not_land(attached):
    """A call that ran out in the middle of a frame: the rest of the frame goes nowhere."""
    pool, ns, fake = attached
    out = bytearray(b"\xaa" * 200_000)
    result = in_thread(ns.get_into, hashes(1), [out], 0.3)
    id, _, _ = fake.message(wire.GET)
    fake.conn.sendall(wire.header(wire.DATA, 200_000, id=id) + b"x" * 1000)
    r = result()[0]
    assert r.reason == "deadline"
    out[:] = b"\xcc" * len(out)
    fake.conn.sendall(b"y" * 199_000)
    cancelled, _, _ = fake.message(wire.CANCEL)
    assert cancelled == id
    fake.got(id, b"x" * 200_000, lease=77)  # its lease is given back
    _, _, p = fake.message(wire.RELEASE)
    assert p == wire.release([77], [])
    time.sleep(0.05)
    assert out == b"\xcc" * len(out) and pool.connected
    # And the stream goes on where it was.
    result = in_thread(ns.match, hashes(1))
    id, _, _ = fake.message(wire.MATCH)
    fake.reply(id, wire.MATCHED, struct.pack("<IQIII", 1, 0, 0, 0, 1) + struct.pack("<BBI", 2, 2, 5))
    assert result().prefix == 1


def test_replies_in_any_order(attached):
    pool, ns, fake = attached
    results = [in_thread(ns.match, hashes(1, seed=i)) for i in range(6)]
    calls = [fake.message(wire.MATCH) for _ in range(6)]
    for id, _, p in reversed(calls):
        seed = int.from_bytes(p[28:32], "big")
        fake.reply(id, wire.MATCHED, struct.pack("<IQIII", 0, 0, 0, 0, 1) + struct.pack("<BBI", 2, 2, seed))
    assert [r().blocks[0].length for r in results] == list(range(6))


@pytest.mark.parametrize(
    "bad",
    [
        lambda f, id: f.conn.sendall(wire.header(0, 0)),
        lambda f, id: f.conn.sendall(wire.header(wire.DATA, wire.MAX_DATA + 1)),
        lambda f, id: f.conn.sendall(wire.header(wire.HELLO, 0)),
        lambda f, id: f.reply(id, wire.GOT, b""),
        lambda f, id: f.reply(id, wire.MATCHED, b"\1\2\3"),
        lambda f, id: f.reply(id, wire.MATCHED, struct.pack("<IQIII", 9, 0, 0, 0, 0)),
        lambda f, id: f.reply(id, wire.FAILED, b"\0\0\0\0"),
        lambda f, id: f.conn.sendall(wire.header(wire.BYE, 4) + b"over"),
        lambda f, id: f.conn.close(),
    ],
)
def test_nonsense_ends_the_session(attached, bad):
    """The call is a miss, and there is a new session."""
    pool, ns, fake = attached
    result = in_thread(ns.match, hashes(1))
    id, _, _ = fake.message(wire.MATCH)
    bad(fake, id)
    m = result()
    assert m.prefix == 0 and m.status != kvtier.Status.OK
    fake.welcome()
    fake.open()
    wait_for("the new session", lambda: ns.is_open)
    assert pool.stats().reconnects == 1


def test_failures(attached):
    """What is wrong with the caller raises, the rest are misses."""
    pool, ns, fake = attached
    for status, error in ((5, kvtier.InvalidError), (11, kvtier.DeniedError)):
        job = ns.submit_match(hashes(1))
        id, _, _ = fake.message(wire.MATCH)
        fake.reply(id, wire.FAILED, struct.pack("<HH", status, 3) + b"why")
        with pytest.raises(error, match="why"):
            job.result(PATIENCE)
    for status in (2, 6, 10, 12, 14, 15, 99):
        job = ns.submit_get_into(hashes(1), [bytearray(5)])
        id, _, _ = fake.message(wire.GET)
        fake.reply(id, wire.FAILED, struct.pack("<HH", status, 3) + b"why")
        r = job.result(PATIENCE)[0]
        assert not r.hit and r.status == (status if status < 16 else kvtier.Status.INTERNAL)
    # A handle that is known no more: the namespace is opened again.
    job = ns.submit_match(hashes(1))
    id, _, _ = fake.message(wire.MATCH)
    fake.reply(id, wire.FAILED, struct.pack("<HH", 1, 0))
    assert job.result(PATIENCE).status == kvtier.Status.NOT_FOUND
    fake.open()
    wait_for("the namespace", lambda: ns.is_open)


def test_ping(attached):
    pool, ns, fake = attached
    fake.conn.sendall(wire.header(wire.PING, 3, id=42) + b"abc")
    kind, _, id, _, _, _ = fake.frame()
    assert (kind, id) == (wire.PONG, 42)


@pytest.fixture
def memory():
    fd = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)
    yield fd
    os.close(fd)


def seal(fd):
    import fcntl

    fcntl.fcntl(fd, 1033, 2)  # F_ADD_SEALS, F_SEAL_SHRINK


def granted(*places):
    return struct.pack("<II", 30000, len(places)) + b"".join(
        struct.pack("<QIIQ", id, size, 0, offset) for id, size, offset in places
    )


def test_revoked_places_are_answered(fake, memory):
    """A place in shared memory that is taken back is answered by Release when nothing
    writes there any more; what the server never heard of it hears in the next session."""
    seal(memory)

    def begin(incarnation=9, release=b""):
        fake.welcome(features=wire.FEATURE_SHARED, fds=[memory], chunks=[1 << 20], incarnation=incarnation)
        if release:
            assert fake.message(wire.RELEASE)[2] == release
        fake.open()

    starting = in_thread(begin)
    with kvtier.connect(fake.address, required=True) as pool:
        ns = pool.open("n", max_block_bytes=1 << 20)
        starting()
        assert pool.shared
        reserving = in_thread(ns.reserve, [100, 100])
        id, _, _ = fake.message(wire.GRANT)
        fake.reply(id, wire.GRANTED, granted((11, 100, 0), (12, 100, 4096)))
        one, two = reserving()
        one.buffer[:] = b"1" * 100
        assert os.pread(memory, 100, 0) == b"1" * 100
        fake.reply(0, wire.REVOKE, struct.pack("<IQ", 1, 11))
        fake.conn.settimeout(0.2)
        with pytest.raises(socket.timeout):  # it is still in use
            fake.message(wire.RELEASE)
        fake.conn.settimeout(PATIENCE)
        committing = in_thread(ns.commit, [one], hashes(1))
        id, _, _ = fake.message(wire.PUT)
        fake.reply(id, wire.PUT_DONE, struct.pack("<IHBB", 1, 3, 0, 0) + granted())
        assert isinstance(committing()[0].error, kvtier.LeaseExpiredError)
        _, _, p = fake.message(wire.RELEASE)
        assert p == wire.release([], [11])
        # The session is lost; the second place is given back in the next one, since the
        # server is the same.
        fake.conn.close()
        wait_for("the end", lambda: not pool.connected)
        two.abort()
        begin(release=wire.release([], [12]))
        wait_for("the namespace", lambda: ns.is_open)
        three = in_thread(ns.reserve, [100])
        id, _, _ = fake.message(wire.GRANT)
        fake.reply(id, wire.GRANTED, granted((13, 100, 0)))
        three = three()
        fake.conn.close()
        wait_for("the end", lambda: not pool.connected)
        three[0].abort()
        # In another incarnation its number may be another's.
        begin(incarnation=10)
        fake.conn.settimeout(0.2)
        with pytest.raises(socket.timeout):
            fake.message(wire.RELEASE)
        fake.close()


def test_memory_that_can_shrink_is_not_mapped(fake, memory):
    starting = in_thread(lambda: fake.welcome(features=wire.FEATURE_SHARED, fds=[memory], chunks=[1 << 20]))
    with kvtier.connect(fake.address, required=True) as pool:
        starting()
        assert pool.connected and not pool.shared
        fake.close()


def test_spoiled_memory_is_a_miss(fake, memory):
    seal(memory)

    def begin():
        fake.welcome(features=wire.FEATURE_SHARED, fds=[memory], chunks=[1 << 20])
        fake.open()

    starting = in_thread(begin)
    with kvtier.connect(fake.address, required=True) as pool:
        ns = pool.open("n", max_block_bytes=1 << 20)
        starting()
        block = pattern(300_000, 1)
        os.pwrite(memory, block, 4096)
        out = bytearray(300_000)
        for reason in ("hit", "corrupt"):
            result = in_thread(ns.get_into, hashes(1), [out])
            id, _, _ = fake.message(wire.GET)
            fake.got(id, block, lease=5, lease_ms=30_000, places=[(0, 4096)])
            assert result()[0].reason == reason
            os.pwrite(memory, b"!", 4096 + 299_999)
        # Places beyond the memory are the end of such a session.
        result = in_thread(ns.get_into, hashes(1), [out])
        id, _, _ = fake.message(wire.GET)
        fake.got(id, block, lease=6, lease_ms=30_000, places=[(0, 1 << 20)])
        assert not result()[0].hit
        wait_for("the end of the session", lambda: not pool.connected)
        fake.close()


@pytest.mark.parametrize("text,error", [((11, "no"), kvtier.DeniedError), ((6, "version"), kvtier.UnavailableError)])
def test_refused_hello(fake, text, error):
    def refuse():
        fake.conn, _ = fake.listener.accept()
        fake.frame()
        p = struct.pack("<4sHH", b"KVTS", text[0], 1) + bytes(24 + 28)
        p += struct.pack("<H", len(text[1])) + text[1].encode() + bytes(6)
        fake.conn.sendall(wire.header(wire.HELLO, len(p)) + p)

    refusing = in_thread(refuse)
    with pytest.raises(error, match=text[1]):
        kvtier.connect(fake.address, required=True)
    refusing()


def test_not_kvtier(fake):
    def other():
        fake.conn, _ = fake.listener.accept()
        fake.conn.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" + bytes(64))

    answering = in_thread(other)
    with pytest.raises(kvtier.InvalidError):
        kvtier.connect(fake.address)
    answering()


def test_regions_are_quiet_when_the_server_has_let_go(fake, memory, monkeypatch):
    """A call on a region that gets no answer ends when the server has closed the connection,
    which it does when nothing of it touches the region any more."""
    from kvtier import _connection

    monkeypatch.setattr(_connection, "_REMOTE_GRACE", 0.1)

    def begin():
        fake.welcome(features=wire.FEATURE_REGIONS)
        fake.open()

    starting = in_thread(begin)
    with kvtier.connect(fake.address, required=True, regions=[kvtier.Region(fd=memory)]) as pool:
        ns = pool.open("n", max_block_bytes=1 << 20)
        starting()
        began = time.monotonic()
        result = in_thread(ns.get_region, hashes(1), [(0, 0, 100)], 0.2)
        fake.message(wire.REGION_GET)
        with pytest.raises(EOFError):
            while True:
                fake.frame()  # it says that it is over, and waits
        time.sleep(0.3)
        closed = time.monotonic()
        fake.conn.close()
        assert not result()[0].hit
        assert time.monotonic() >= closed > began + 0.5
        # A cancelled one waits for the answer.
        begin()
        wait_for("the new session", lambda: ns.is_open)
        job = ns.submit_get_region(hashes(1), [(0, 0, 100)])
        id, _, _ = fake.message(wire.REGION_GET)
        cancelling = in_thread(job.cancel)
        assert fake.message(wire.CANCEL)[0] == id
        time.sleep(0.2)
        assert not job.done()
        fake.reply(id, wire.FAILED, struct.pack("<HH", 13, 0))
        assert cancelling()
        fake.close()


def test_a_put_that_runs_out(attached):
    """A server that takes no bytes: the call ends in time, and the session with it only
    when a frame was begun."""
    pool, ns, fake = attached
    result = in_thread(ns.put, hashes(4), [bytes(4 << 20)] * 4, None, False, 0.0, 0.5)
    id, _, _ = fake.message(wire.GRANT)
    p = struct.pack("<II", 30000, 4) + b"".join(struct.pack("<QIIQ", i, 4 << 20, wire.NO_CHUNK, 0) for i in range(1, 5))
    fake.reply(id, wire.GRANTED, p)
    began = time.monotonic()
    results = result()
    assert time.monotonic() - began < 2
    assert all(isinstance(r.error, (kvtier.DeadlineError, kvtier.DisconnectedError)) for r in results)


def test_the_io_thread_takes_over(fake):
    """The I/O thread opens a namespace while another thread reads, whose call is over first."""
    thread = threading.Thread(target=fake.welcome)
    thread.start()
    pool = kvtier.connect(fake.address, timeout=5.0)
    thread.join()
    try:
        first = in_thread(lambda: pool.open("a", max_block_bytes=4096))
        fake.open()
        a = first()
        # A second one that the I/O thread opens, as after a reconnect.
        b = kvtier.Namespace(pool, "b", {"max_block_bytes": "4096"}, True, 0)
        pool._namespaces.append(b)
        found = in_thread(a.match, hashes(1))
        id, _, _ = fake.message(wire.MATCH)
        pool._reopen()
        opening, _, _ = fake.message(wire.OPEN)
        fake.reply(id, wire.MATCHED, struct.pack("<IQIII", 0, 0, 0, 0, 0))
        assert found().prefix == 0
        time.sleep(0.05)
        began = time.monotonic()
        fake.reply(opening, wire.OPENED, struct.pack("<IQBIQQQ", 3, 4, 0, 0, 0, 0, 4096))
        wait_for("b", lambda: b.is_open)
        assert time.monotonic() - began < 5.0  # of the 10 until something else wakes the thread
    finally:
        fake.close()
        pool.close()


def test_open_is_tried_again(fake):
    """A namespace that a slow daemon did not open in time is opened later."""
    thread = threading.Thread(target=fake.welcome)
    thread.start()
    pool = kvtier.connect(fake.address, timeout=0.2)
    thread.join()
    assert pool.wait_connected(PATIENCE)
    try:
        opened = in_thread(lambda: pool.open("a", max_block_bytes=4096))
        fake.message(wire.OPEN)
        ns = opened()
        assert not ns.is_open and isinstance(ns.error, kvtier.DeadlineError)
        fake.conn.sendall(wire.header(wire.PING, 0, id=1))
        fake.open()
        wait_for("the namespace", lambda: ns.is_open)
    finally:
        fake.close()
        pool.close()


def test_the_io_thread_survives(attached, monkeypatch):
    """Whatever goes wrong in it, the pool connects again."""
    pool, ns, fake = attached
    conn = pool._conn

    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(conn, "_keep_alive", broken)
    pool._poke()
    fake.welcome()
    fake.open()
    wait_for("a session", lambda: ns.is_open)
    assert pool._conn is not conn and "broken" in str(conn.error)


def test_leases_of_a_match_that_fails(attached):
    """No lease is left where one of several matches fails as a whole."""
    pool, ns, fake = attached
    result = in_thread(lambda: pytest.raises(kvtier.InvalidError, pool.match_all, [(ns, hashes(1))] * 3, 5.0))
    ids = [fake.message(wire.MATCH)[0] for _ in range(3)]
    block = struct.pack("<BBI", 2, 2, 5)
    fake.reply(ids[0], wire.MATCHED, struct.pack("<IQIII", 1, 71, 5000, 1, 1) + block)
    fake.reply(ids[2], wire.MATCHED, struct.pack("<IQIII", 1, 73, 5000, 1, 1) + block)
    fake.reply(ids[1], wire.FAILED, struct.pack("<HH", 5, 0))
    result()
    freed = set()
    while len(freed) < 2:
        _, _, p = fake.message(wire.RELEASE)
        n = struct.unpack_from("<I", p)[0]
        freed.update(struct.unpack_from(f"<{n}Q", p, 4))
    assert freed == {71, 73}


def test_a_slow_watcher_ends_alone(attached, monkeypatch):
    """A watcher that takes no events loses its watch; the session goes on."""
    pool, ns, fake = attached
    monkeypatch.setattr(kvtier._watch, "_QUEUE", 4)
    w = ns.watch()
    id, _, _ = fake.message(wire.WATCH)
    for _ in range(8):
        fake.reply(id, wire.EVENTS, struct.pack("<BI", 0, 0))
    assert fake.message(wire.CANCEL)[0] == id
    with pytest.raises(kvtier.BusyError):
        next(w)
    assert list(w) == [] and pool.connected and ns.is_open


def test_a_hello_that_drips(fake, monkeypatch):
    """A server that sends a byte now and then does not hold an attempt for ever."""
    monkeypatch.setattr(kvtier._link, "_DIAL", 0.5)
    over = threading.Event()

    def drip():
        conn, _ = fake.listener.accept()
        frame = wire.header(wire.HELLO, 60000)
        for i in range(400):
            try:
                conn.sendall(frame[i : i + 1] or b"x")
            except OSError:
                break
            if over.wait(0.05):
                break
        conn.close()

    t = threading.Thread(target=drip)
    t.start()
    began = time.monotonic()
    with pytest.raises(kvtier.Error):
        kvtier.connect(fake.address, required=True, timeout=5.0)
    took = time.monotonic() - began
    over.set()
    t.join()
    assert took < 3.0
