"""The bytes of the protocol: frames, messages, and nothing that moves them.

Every function here is pure. Encoders return the payload of a message, decoders take it
and raise `WireError` when it is none; that is the end of the connection it came by.
docs/protocol.md has the layouts, the tests compare with its golden frames.
"""

from __future__ import annotations

import struct
from typing import Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union, cast

Bytes = Union[bytes, bytearray, memoryview]

MAGIC = b"KVTS"
VERSION = 1

HEADER = struct.Struct("<IBBHQQQ")  # length, type, flags, status, id, token, offset
HEADER_BYTES = HEADER.size

# Types of frames, and the most bytes of their payloads.
HELLO, DATA, MESSAGE, PING, PONG, BYE = 1, 2, 3, 4, 5, 6
MAX_HELLO = 65536
MAX_DATA = 256 << 10
MAX_MESSAGE = 1 << 20
# What an end may tell of its messages; a longer one is no frame, and not skipped.
MIN_TOLD, MAX_TOLD = 64 << 10, 16 << 20
# Frames of an unknown type are skipped, up to this.
MAX_PAYLOAD = {HELLO: MAX_HELLO, DATA: MAX_DATA, MESSAGE: MAX_TOLD}

MATCH, MATCHED, GET, GOT, GRANT, GRANTED, PUT, PUT_DONE = 1, 2, 3, 4, 5, 6, 7, 8
RELEASE, RELEASED, RENEW, RENEWED, PREFETCH, PREFETCHED = 9, 10, 11, 12, 13, 14
LOCATE, LOCATED, WATCH, EVENTS, CANCEL, REVOKE, FAILED = 15, 16, 17, 18, 19, 20, 21
OPEN, OPENED, PIN, PINNED, REGION_GET, REGION_PUT = 22, 23, 24, 25, 26, 27
PASSED, REPORT_PREFILL, REPORTED = 28, 29, 30

REPLY = {
    MATCH: MATCHED,
    GET: GOT,
    GRANT: GRANTED,
    PUT: PUT_DONE,
    RELEASE: RELEASED,
    RENEW: RENEWED,
    PREFETCH: PREFETCHED,
    LOCATE: LOCATED,
    WATCH: EVENTS,
    OPEN: OPENED,
    PIN: PINNED,
    REGION_GET: GOT,
    REGION_PUT: PUT_DONE,
    REPORT_PREFILL: REPORTED,
}

FLAG_ALL, FLAG_QUIET, FLAG_NO_PROMOTE, FLAG_VERIFY, FLAG_RANGES = 1, 2, 4, 8, 16
FLAG_IN_PLACE, FLAG_REGRANT, FLAG_PARENTS, FLAG_PLAN, FLAG_UNPIN = 32, 64, 128, 256, 512
FLAG_CONVERSATION, FLAG_URGENCY = 1024, 2048
OPEN_CREATE = 1

FEATURE_SHARED = 1
FEATURE_REGIONS = 2
FEATURE_CHUNKS = 4
FEATURE_HINTS = 8

MAX_KEYS = 8192  # of one message that are served
MAX_NAMED = MAX_MESSAGE // 8  # and that it can name
MAX_BLOCK = 8 << 20
MAX_TEXT = 4096
MAX_CONVERSATION = 255  # bytes
MAX_PRIORITY = 9
MAX_PREFILL = 1 << 28  # tokens of a report, and its position
MAX_REGIONS = 64
MAX_SEGMENTS = 4096
NO_CHUNK = 0xFFFFFFFF
MAX_PASSED = 1056  # bytes of a packet with the file of a chunk
HASH_LENGTHS = (8, 16, 20, 32)

REASONS = (
    "hit",
    "absent",
    "pending",
    "expired",
    "corrupt",
    "no_room",
    "deadline",
    "unavailable",
)
HIT = 0
REASON_CORRUPT = 4
REASON_NO_ROOM = 5

_HEAD = struct.Struct("<IIQBBHI")  # namespace, keys, tag, hash_len, class, flags, deadline
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_HELLO = struct.Struct("<4sHHQIQ")
_WELCOME = struct.Struct("<4sHHQQQIQIIQ")
_MATCHED = struct.Struct("<IQIII")
_PLAN_WANTED = struct.Struct("<QdIB")
_PLAN = struct.Struct("<IIQQQQ")
_BLOCK = struct.Struct("<BBI")
_GOT = struct.Struct("<QII")
_GOT_KEY = struct.Struct("<HBBIIIQ16s")
_GRANT = struct.Struct("<IQIII")
_PLACE = struct.Struct("<QIIQ")
_ITEM = struct.Struct("<QIB16s")
_PUT_KEY = struct.Struct("<HBB")  # status, existed, bytes of the text behind it
_OPENED = struct.Struct("<IQBIQQQ")
_SEGMENT = struct.Struct("<HIQ")
_URGENCY = struct.Struct("<BI")
_REPORT = struct.Struct("<IQIIQ")
_WATCH = struct.Struct("<IQQQB")
_EVENT = struct.Struct("<QBBBBIqBB")
_PLACED = struct.Struct("<BQI")


class WireError(Exception):
    """Bytes that are no frame or message of the protocol."""


class Keys(NamedTuple):
    """The namespace of a request and the hashes that it names."""

    ns: int
    tag: int
    hash_len: int
    hashes: Sequence[bytes]


class Welcome(NamedTuple):
    """The server's hello."""

    status: int
    version: int
    features: int
    session: int
    incarnation: int
    calls: int
    bytes: int
    keys: int
    grants: int
    grant_bytes: int
    text: str
    name: str
    chunks: Tuple[int, ...]
    message: int  # most bytes of a message


class GotKey(NamedTuple):
    """The outcome of one key of a get."""

    status: int
    reason: int
    tier: int
    length: int
    total: int
    chunk: int
    offset: int
    sum: bytes


class Got(NamedTuple):
    lease: int
    lease_ms: int
    keys: List[GotKey]


class Matched(NamedTuple):
    prefix: int
    lease: int
    lease_ms: int
    leased: int
    many: int
    blocks: bytes  # packed, for read_blocks
    plan: "Optional[Tuple[int, int, int, int, int, int]]"  # from, to, and ns


class Place(NamedTuple):
    """A place for a put."""

    grant: int
    size: int
    chunk: int
    offset: int


class Granted(NamedTuple):
    ttl_ms: int
    places: List[Place]


class PutKey(NamedTuple):
    status: int
    existed: int
    text: str


class PutDone(NamedTuple):
    keys: List[PutKey]
    granted: Granted


class Opened(NamedTuple):
    id: int
    tag: int
    hash_len: int
    epoch: int
    ttl_ms: int
    block_bytes: int
    max_block_bytes: int


class Located(NamedTuple):
    tier: int
    place: int
    length: int


class WireEvent(NamedTuple):
    seq: int
    kind: int
    tier: int
    reason: int
    gone: bool
    length: int
    many: int
    hash: bytes
    parent: Optional[bytes]
    name: str


class Events(NamedTuple):
    start: Optional[Tuple[int, int, bool]]  # incarnation, seq, resumed
    events: List[WireEvent]


Segment = Tuple[int, int, int]  # region, offset, length
PutItem = Tuple[int, int, bool, bytes]  # grant, length, whether it has a parent, checksum


def header(kind: int, length: int, flags: int = 0, id: int = 0, token: int = 0, offset: int = 0) -> bytes:
    """A frame's header."""
    return HEADER.pack(length, kind, flags, 0, id, token, offset)


def message(code: int, id: int, payload: bytes) -> bytes:
    """A whole frame with a message."""
    return HEADER.pack(len(payload), MESSAGE, code, 0, id, 0, 0) + payload


def _text(s: str) -> bytes:
    b = s.encode()
    if len(b) > MAX_TEXT:
        raise ValueError(f"text of {len(b)} bytes, at most {MAX_TEXT}")
    return len(b).to_bytes(2, "little") + b


class _Reader:
    """Takes fields from a payload."""

    __slots__ = ("p", "at", "what")

    def __init__(self, p: Bytes, what: str) -> None:
        self.p = p
        self.at = 0
        self.what = what

    def take(self, n: int) -> bytes:
        b = bytes(self.p[self.at : self.at + n])
        if len(b) != n:
            raise WireError(f"{self.what} ends after {len(self.p)} bytes")
        self.at += n
        return b

    def unpack(self, s: struct.Struct) -> Tuple[int, ...]:
        try:
            v = s.unpack_from(self.p, self.at)
        except struct.error:
            raise WireError(f"{self.what} ends after {len(self.p)} bytes") from None
        self.at += s.size
        return v

    def number(self, n: int) -> int:
        return int.from_bytes(self.take(n), "little")

    def count(self, each: int, most: int = MAX_KEYS) -> int:
        n = self.number(4)
        if n > most or n * each > len(self.p) - self.at:
            raise WireError(f"{self.what} with a count of {n}")
        return n

    def text(self, width: int = 2) -> str:
        return self.take(self.number(width)).decode("utf-8", "replace")

    def end(self) -> None:
        if self.at != len(self.p):
            raise WireError(f"{self.what} has {len(self.p) - self.at} bytes too many")


# Hello


def hello(
    token: str,
    name: str,
    features: int = 0,
    calls: int = 0,
    bytes_: int = 0,
    versions: Tuple[int, int] = (VERSION, VERSION),
    regions: Sequence[Tuple[int, int, str]] = (),
    message: int = MAX_MESSAGE,
) -> bytes:
    """The client's hello. Regions are (length, flags, path or "" for a descriptor)."""
    b = _HELLO.pack(MAGIC, versions[0], versions[1], features, calls, bytes_)
    b += _text(token) + _text(name)
    if regions:
        b += _U32.pack(len(regions))
        for length, flags, path in regions:
            b += _U64.pack(length) + bytes((flags,)) + _text(path)
    return b + _U32.pack(message)


def read_welcome(p: Bytes) -> Welcome:
    """The server's hello. What is behind the known fields is of a newer version."""
    r = _Reader(p, "hello")
    f = r.unpack(_WELCOME)
    if f[0] != MAGIC:  # type: ignore[comparison-overlap]
        raise WireError(f"hello begins with {f[0]!r}, not {MAGIC!r}")
    text, name = r.text(), r.text()
    n = r.count(8, 4096)
    chunks = tuple(r.number(8) for _ in range(n))
    size = r.number(4) if r.at < len(p) else MAX_MESSAGE  # an older server does not say
    return Welcome(f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10], text, name, chunks, size)


def read_passed(p: Bytes) -> Tuple[int, int, Tuple[int, ...]]:
    """What comes with the file of a chunk: its number, its length, and the numbers of
    chunks that are gone."""
    r = _Reader(p, "packet of a chunk")
    size, kind, code = r.unpack(HEADER)[:3]
    if kind != MESSAGE or code != PASSED or size != len(p) - HEADER_BYTES:
        raise WireError(f"a packet of type {kind}, code {code}, with {len(p)} bytes")
    number, length = r.number(4), r.number(8)
    gone = tuple(r.number(4) for _ in range(r.count(4, MAX_PASSED)))
    r.end()
    return number, length, gone


def keys_of(size: int) -> int:
    """How many keys a message of so many bytes can have served, with the answer to them."""
    return min(MAX_KEYS, (size - 20416) // 105)


# Requests


def _head(k: Keys, flags: int, deadline: int, cls: int = 0) -> bytes:
    return _HEAD.pack(k.ns, len(k.hashes), k.tag, k.hash_len, cls, flags, deadline)


def match(
    k: Keys,
    flags: int,
    deadline: int,
    lease_ms: int,
    plan: Optional[Tuple[int, float, int, bool]] = None,
    conversation: str = "",
) -> bytes:
    """plan: ns of a token, ns more for each before it, ms that loading may take, overlap."""
    behind = b""
    if plan is not None:
        flags |= FLAG_PLAN
        behind = _PLAN_WANTED.pack(*plan)
    if conversation:
        flags |= FLAG_CONVERSATION
        behind += _text(conversation)
    return b"".join((_head(k, flags, deadline), _U32.pack(lease_ms), *k.hashes, behind))


def get(k: Keys, flags: int, deadline: int, ranges: Sequence[Tuple[int, int]] = ()) -> bytes:
    if not ranges:
        return b"".join((_head(k, flags, deadline), *k.hashes))
    packed = b"".join(_U32.pack(o) + _U32.pack(n) for o, n in ranges)
    return b"".join((_head(k, flags | FLAG_RANGES, deadline), *k.hashes, packed))


def keys_only(k: Keys, deadline: int, flags: int = 0) -> bytes:
    """Locate and Pin."""
    return b"".join((_head(k, flags, deadline), *k.hashes))


def prefetch(k: Keys, deadline: int, urgency: Optional[Tuple[int, int]] = None) -> bytes:
    """urgency: the priority, and ms for which the blocks are of use, 0: always."""
    if urgency is None:
        return b"".join((_head(k, 0, deadline), *k.hashes))
    return b"".join((_head(k, FLAG_URGENCY, deadline), *k.hashes, _URGENCY.pack(*urgency)))


def report_prefill(ns: int, tag: int, position: int, tokens: int, micros: int) -> bytes:
    return _REPORT.pack(ns, tag, position, tokens, micros)


def grant(ns: int, tag: int, size: int, count: int, deadline: int) -> bytes:
    return _GRANT.pack(ns, tag, size, count, deadline)


def put(
    k: Keys,
    flags: int,
    deadline: int,
    durable: int,
    ttl_ms: int,
    items: Sequence[PutItem],
    parents: Sequence[bytes] = (),
) -> bytes:
    if parents:
        flags |= FLAG_PARENTS
    body = [_head(k, flags, deadline), bytes((durable,)), _U64.pack(ttl_ms)]
    body += [_ITEM.pack(*i) for i in items]
    body += k.hashes
    body += parents
    return b"".join(body)


def _ids(ids: Iterable[int]) -> bytes:
    packed = [_U64.pack(i) for i in ids]
    return _U32.pack(len(packed)) + b"".join(packed)


def release(leases: Sequence[int], grants: Sequence[int]) -> bytes:
    return _ids(leases) + _ids(grants)


def renew(lease_ms: int, leases: Sequence[int]) -> bytes:
    return _U32.pack(lease_ms) + _ids(leases)


def watch(ns: int, tag: int, incarnation: int, after: int, snapshot: bool) -> bytes:
    return _WATCH.pack(ns, tag, incarnation, after, snapshot)


def open_(name: str, fields: Mapping[str, str], create: bool, ttl_ms: int, deadline: int) -> bytes:
    """Open a namespace; fields are those of the descriptor beside its name."""
    b = struct.pack("<IHQH", deadline, OPEN_CREATE if create else 0, ttl_ms, 1 + len(fields))
    b += _text("name") + _text(name)
    for key, value in fields.items():
        b += _text(key) + _text(value)
    return b


def _segments(lists: Sequence[Sequence[Segment]]) -> bytes:
    out = []
    for segments in lists:
        out.append(len(segments).to_bytes(2, "little"))
        out += [_SEGMENT.pack(region, length, offset) for region, offset, length in segments]
    return b"".join(out)


def region_get(k: Keys, flags: int, deadline: int, segments: Sequence[Sequence[Segment]]) -> bytes:
    return b"".join((_head(k, flags, deadline), _segments(segments), *k.hashes))


def region_put(
    k: Keys,
    deadline: int,
    durable: int,
    ttl_ms: int,
    segments: Sequence[Sequence[Segment]],
    has_parent: Sequence[bool],
    parents: Sequence[bytes] = (),
) -> bytes:
    flags = FLAG_PARENTS if parents else 0
    return b"".join(
        (
            _head(k, flags, deadline),
            bytes((durable,)),
            _U64.pack(ttl_ms),
            bytes(has_parent),
            _segments(segments),
            *k.hashes,
            *parents,
        )
    )


# Replies


def read_failed(p: Bytes) -> Tuple[int, str]:
    r = _Reader(p, "Failed")
    status, text = r.number(2), r.text()
    r.end()
    if status == 0:
        raise WireError("a failure without a status")
    return status, text


def read_matched(p: bytes) -> Matched:
    try:
        prefix, lease, lease_ms, leased, many = _MATCHED.unpack_from(p)
    except struct.error:
        raise WireError(f"Matched ends after {len(p)} bytes") from None
    end = _MATCHED.size + many * _BLOCK.size
    if many > MAX_NAMED or len(p) not in (end, end + _PLAN.size):
        raise WireError(f"Matched of {many} blocks in {len(p)} bytes")
    plan = None
    if len(p) > end:
        plan = _PLAN.unpack_from(p, end)
        if not plan[0] <= plan[1] <= many:
            raise WireError(f"plan of blocks {plan[0]} to {plan[1]} of {many}")
    return Matched(prefix, lease, lease_ms, leased, many, p[_MATCHED.size : end], plan)


def read_blocks(p: bytes) -> Iterator[Tuple[int, int, int]]:
    """State, tier and length of each block of Matched."""
    return cast(Iterator[Tuple[int, int, int]], _BLOCK.iter_unpack(p))


def read_got(p: bytes) -> Got:
    try:
        lease, lease_ms, n = _GOT.unpack_from(p)
    except struct.error:
        raise WireError(f"Got ends after {len(p)} bytes") from None
    if n > MAX_NAMED or len(p) != _GOT.size + n * _GOT_KEY.size:
        raise WireError(f"Got of {n} keys in {len(p)} bytes")
    return Got(lease, lease_ms, list(map(GotKey._make, _GOT_KEY.iter_unpack(p[_GOT.size :]))))


def _granted(r: _Reader) -> Granted:
    ttl_ms = r.number(4)
    n = r.count(_PLACE.size)
    packed = r.take(n * _PLACE.size)
    return Granted(ttl_ms, list(map(Place._make, _PLACE.iter_unpack(packed))))


def read_granted(p: Bytes) -> Granted:
    r = _Reader(p, "Granted")
    g = _granted(r)
    r.end()
    return g


def read_put_done(p: Bytes) -> PutDone:
    r = _Reader(p, "PutDone")
    n = r.count(4, MAX_NAMED)
    keys: List[PutKey] = []
    packed = p[r.at : r.at + n * _PUT_KEY.size]
    if not any(packed[3 :: _PUT_KEY.size]):  # nothing has failed
        r.at += len(packed)
        keys = [PutKey(status, existed, "") for status, existed, _ in _PUT_KEY.iter_unpack(packed)]
        n = 0
    for _ in range(n):
        status, existed, text = r.unpack(_PUT_KEY)
        if text:
            keys.append(PutKey(status, existed, r.take(text).decode("utf-8", "replace")))
        else:
            keys.append(PutKey(status, existed, ""))
    g = _granted(r)
    r.end()
    return PutDone(keys, g)


def read_statuses(p: Bytes) -> List[int]:
    """Released, Renewed and Pinned."""
    r = _Reader(p, "results")
    n = r.count(2, MAX_NAMED)
    out = [r.number(2) for _ in range(n)]
    r.end()
    return out


def read_prefetched(p: Bytes) -> Tuple[int, List[Tuple[int, int]]]:
    """The first key told of, and a reason and a tier for each from there on."""
    r = _Reader(p, "Prefetched")
    first = r.number(4)
    n = r.count(2, MAX_NAMED)
    out = [(r.number(1), r.number(1)) for _ in range(n)]
    r.end()
    return first, out


def read_reported(p: Bytes) -> None:
    _Reader(p, "Reported").end()


def read_located(p: Bytes) -> List[List[Located]]:
    r = _Reader(p, "Located")
    n = r.count(1)
    out = []
    for _ in range(n):
        places = r.number(1)
        out.append([Located(*r.unpack(_PLACED)) for _ in range(places)])
    r.end()
    return out


def read_opened(p: Bytes) -> Opened:
    r = _Reader(p, "Opened")
    o = Opened(*r.unpack(_OPENED))
    r.end()
    return o


def read_revoke(p: Bytes) -> List[int]:
    r = _Reader(p, "Revoke")
    n = r.count(8)
    out = [r.number(8) for _ in range(n)]
    r.end()
    return out


def read_events(p: Bytes) -> Events:
    r = _Reader(p, "Events")
    start = None
    if r.number(1):
        start = (r.number(8), r.number(8), bool(r.number(1)))
    n = r.count(_EVENT.size, MAX_MESSAGE)
    events = []
    for _ in range(n):
        seq, kind, tier, reason, bits, length, count, hash_len, name_len = r.unpack(_EVENT)
        hash_ = r.take(hash_len)
        parent = r.take(hash_len) if bits & 1 else None
        name = r.take(name_len).decode("utf-8", "replace")
        events.append(WireEvent(seq, kind, tier, reason, bool(bits & 2), length, count, hash_, parent, name))
    r.end()
    return Events(start, events)
