"""The codec against the golden frames of the Go side."""

import pathlib

import pytest

from kvtier import _wire as wire

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "api" / "session" / "testdata" / "golden"

A, B, ROOT = b"blockAAA", b"blockBBB", b"block000"
TAG = 0x1122334455667788
HELLO_SUM = bytes.fromhex("b5e9c1ad071b3e7fc779cfaa5e523818")


def golden(name):
    path = GOLDEN / f"{name}.hex"
    if not path.exists():
        pytest.skip(f"no golden frame {name}")
    return bytes.fromhex(path.read_text())


def frame(name):
    b = golden(name)
    length, kind, flags, status, id, token, offset = wire.HEADER.unpack_from(b)
    assert length == len(b) - wire.HEADER_BYTES and status == 0
    return kind, flags, id, token, offset, b[wire.HEADER_BYTES :]


def test_passed():
    b = golden("passed")
    assert wire.read_passed(b) == (9, 66 << 20, (4, 7))
    for bad in (b[:-1], b + b"\0", b[:4] + b"\x02" + b[5:], b[:5] + b"\x14" + b[6:], b[:20]):
        with pytest.raises(wire.WireError):
            wire.read_passed(bad)


def keys(*hashes):
    return wire.Keys(1, TAG, 8, hashes)


REQUESTS = {
    "match": (wire.MATCH, 1, lambda: wire.match(keys(A, B), wire.FLAG_ALL, 500, 1000)),
    "get": (wire.GET, 2, lambda: wire.get(keys(A, B), 0, 500)),
    "get_range": (wire.GET, 3, lambda: wire.get(keys(A), 0, 0, [(1, 3)])),
    "get_in_place": (wire.GET, 4, lambda: wire.get(keys(A), wire.FLAG_IN_PLACE, 0)),
    "grant": (wire.GRANT, 5, lambda: wire.grant(1, TAG, 5, 2, 500)),
    "put": (
        wire.PUT,
        6,
        lambda: wire.put(keys(A), wire.FLAG_REGRANT, 500, 2, 0, [(0xA1, 5, True, HELLO_SUM)], [ROOT]),
    ),
    "match_plan": (wire.MATCH, 17, lambda: wire.match(keys(A, B), 0, 500, 0, (33_000, 1.5, 200, True))),
    "match_conversation": (wire.MATCH, 18, lambda: wire.match(keys(A), 0, 500, 60000, conversation="agent 7")),
    "report_prefill": (wire.REPORT_PREFILL, 19, lambda: wire.report_prefill(1, TAG, 4096, 512, 20000)),
    "release": (wire.RELEASE, 8, lambda: wire.release([0x55], [0xA2])),
    "renew": (wire.RENEW, 9, lambda: wire.renew(1000, [0x55])),
    "prefetch": (wire.PREFETCH, 10, lambda: wire.prefetch(keys(A, B), 2000)),
    "prefetch_urgent": (wire.PREFETCH, 20, lambda: wire.prefetch(keys(A), 2000, (9, 250))),
    "locate": (wire.LOCATE, 11, lambda: wire.keys_only(keys(A), 0)),
    "watch": (wire.WATCH, 12, lambda: wire.watch(1, TAG, 0, 0, True)),
    "open": (wire.OPEN, 13, lambda: wire.open_("llama", {"dtype": "bf16", "block_bytes": "2097152"}, True, 60000, 500)),
    "open_known": (wire.OPEN, 14, lambda: wire.open_("llama", {}, False, 0, 0)),
    "pin": (wire.PIN, 15, lambda: wire.keys_only(keys(A, B), 500)),
    "unpin": (wire.PIN, 16, lambda: wire.keys_only(keys(A), 0, wire.FLAG_UNPIN)),
    "region_get": (
        wire.REGION_GET,
        13,
        lambda: wire.region_get(keys(A, B), wire.FLAG_QUIET, 500, [[(0, 4096, 5)], [(0, 8192, 3), (0, 12288, 2)]]),
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_requests(name):
    code, id, encode = REQUESTS[name]
    assert wire.message(code, id, encode()) == golden(name)


def test_hello():
    p = wire.hello("secret", "worker-0", wire.FEATURE_SHARED, 64, 64 << 20)
    assert wire.header(wire.HELLO, len(p)) + p == golden("hello")


def test_hello_with_regions():
    b = golden("hello_regions")
    p = wire.hello(
        "", "worker-0", wire.FEATURE_REGIONS, 64, 64 << 20, regions=[(1 << 30, 0, ""), (4096, 1, "/dev/shm/kv")]
    )
    assert wire.header(wire.HELLO, len(p)) + p == b


def test_region_put():
    p = wire.region_put(keys(A), 500, 3, 60000, [[(0, 4096, 3), (1, 16, 2)]], [True], [ROOT])
    assert wire.message(wire.REGION_PUT, 14, p) == golden("region_put")


def test_data_and_cancel():
    assert wire.header(wire.DATA, 5, token=0xA1, id=6) + b"hello" == golden("put_data")
    assert wire.header(wire.DATA, 5, id=2) + b"hello" == golden("get_data")
    assert wire.message(wire.CANCEL, 12, b"") == golden("cancel")


def test_welcome():
    w = wire.read_welcome(frame("welcome")[5])
    assert (w.status, w.version, w.session, w.incarnation) == (0, 1, 7, 0x0102030405060708)
    assert (w.calls, w.bytes, w.keys, w.grants, w.grant_bytes) == (64, 64 << 20, 8192, 64, 64 << 20)
    assert (w.text, w.name, w.chunks, w.message) == ("", "kvtier", (1 << 30,), 1 << 20)
    older = wire.read_welcome(frame("welcome")[5][:-4])
    assert older == w  # one that does not say has messages of 1 MiB
    with pytest.raises(wire.WireError):
        wire.read_welcome(frame("welcome")[5][:-1])
    w = wire.read_welcome(frame("refused")[5] + b"more of a newer version")
    assert (w.status, w.text) == (11, "denied: wrong token")


def test_replies():
    assert wire.read_failed(frame("failed")[5]) == (13, "canceled")
    matched = wire.read_matched(frame("matched")[5])
    assert matched[:5] == (1, 0x55, 1000, 1, 2)
    assert list(wire.read_blocks(matched.blocks)) == [(2, 2, 5), (0, 0, 0)]
    got = wire.read_got(frame("got")[5])
    assert got.keys[0] == wire.GotKey(0, 0, 2, 5, 5, wire.NO_CHUNK, 0, HELLO_SUM)
    assert got.keys[1].reason == 1 and got.lease == 0
    got = wire.read_got(frame("got_in_place")[5])
    assert (got.lease, got.lease_ms, got.keys[0].chunk, got.keys[0].offset) == (0x77, 30000, 0, 4096)
    granted = wire.read_granted(frame("granted")[5])
    assert granted == wire.Granted(
        30000, [wire.Place(0xA1, 5, wire.NO_CHUNK, 0), wire.Place(0xA2, 5, wire.NO_CHUNK, 0)]
    )
    done = wire.read_put_done(frame("put_done")[5])
    assert done.keys == [wire.PutKey(0, 0, "")] and done.granted.places[0].grant == 0xA3
    done = wire.read_put_done(frame("put_refused")[5])
    assert done.keys == [wire.PutKey(3, 0, "lease expired: no such grant")] and not done.granted.places
    assert wire.read_statuses(frame("released")[5]) == [0, 0]
    assert wire.read_statuses(frame("renewed")[5]) == [3]
    assert wire.read_prefetched(frame("prefetched")[5]) == (0, [(0, 2), (1, 0)])
    assert wire.read_located(frame("located")[5]) == [[wire.Located(2, 8, 5)]]
    assert wire.read_revoke(frame("revoke")[5]) == [0xA3]
    wire.read_reported(frame("reported")[5])


def test_match_with_a_plan_and_a_conversation():
    """What the plan depends on comes first."""
    p = wire.match(keys(A), 0, 500, 0, (33_000, 1.5, 200, True), "agent 7")
    planned = wire.match(keys(A), wire.FLAG_CONVERSATION, 500, 0, (33_000, 1.5, 200, True))
    assert p == planned + b"\x07\0agent 7"


def test_opened_and_pinned():
    opened = wire.read_opened(frame("opened")[5])
    assert opened == wire.Opened(1, TAG, 8, 1, 60000, 2097152, 0)
    status, text = wire.read_failed(frame("open_refused")[5])
    assert status == 9 and "dtype" in text
    assert wire.read_statuses(frame("pinned")[5]) == [0, 1]


def test_events():
    e = wire.read_events(frame("events_start")[5])
    assert e == wire.Events((0x0102030405060708, 40, False), [])
    e = wire.read_events(frame("events")[5])
    assert [(x.seq, x.kind, x.hash, x.parent, x.name) for x in e.events] == [
        (41, 0, A, ROOT, "llama"),
        (42, 1, A, None, "llama"),
    ]
    assert e.events[1].gone and e.events[1].reason == 3 and e.events[0].length == 5


READERS = {
    "matched": wire.read_matched,
    "got": wire.read_got,
    "granted": wire.read_granted,
    "put_done": wire.read_put_done,
    "released": wire.read_statuses,
    "prefetched": wire.read_prefetched,
    "located": wire.read_located,
    "revoke": wire.read_revoke,
    "events": wire.read_events,
    "failed": wire.read_failed,
    "opened": wire.read_opened,
    "reported": wire.read_reported,
}


@pytest.mark.parametrize("name", READERS)
def test_broken_replies(name):
    """What is cut off, or too long, or lies about a count is refused, and nothing else raised."""
    p = frame(name)[5]
    read = READERS[name]
    for n in range(len(p)):
        with pytest.raises(wire.WireError):
            read(p[:n])
    with pytest.raises(wire.WireError):
        read(p + b"\0")
    for at in range(len(p)):
        try:
            read(p[:at] + b"\xff" + p[at + 1 :])
        except wire.WireError:
            pass
