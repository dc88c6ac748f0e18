"""What calls answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Optional

from ._errors import Error, Status
from ._wire import REASONS


class Tier(IntEnum):
    """Where a block lies. NONE where it is not known, or nowhere."""

    NONE = 0
    MEMORY = 2  # G2, the store's DRAM
    NVME = 3  # G3
    OBJECT = 4  # G4


class State(IntEnum):
    """Of a key in a match."""

    ABSENT = 0
    PENDING = 1  # it is being stored or brought
    RESIDENT = 2


def reason_name(code: int) -> str:
    """A reason's name; unknown ones are "unavailable"."""
    return REASONS[code] if code < len(REASONS) else "unavailable"


_TIERS = {int(t): t for t in Tier}


def tier_of(code: int) -> Tier:
    """A tier by its number; unknown ones are NONE."""
    return _TIERS.get(code, Tier.NONE)


class BlockState(NamedTuple):
    """One key of a match. `length` is the block's, in bytes."""

    state: State
    tier: Tier
    length: int


class PlanOptions(NamedTuple):
    """What a plan depends on. All times are in seconds.

    token: what prefill costs for a token at the beginning of a prompt; with 0 for both,
        the daemon's `--prefill` of the namespace counts, or what was reported to it.
    position: how much more a token costs for each token before it.
    overlap: the engine can compute the head of a prompt while the tail is loaded.
    within: longest time that loading may take; None is any.
    """

    token: float = 0.0
    position: float = 0.0
    overlap: bool = False
    within: Optional[float] = None


class Plan(NamedTuple):
    """What of a prefix is worth loading: the keys from `start` up to `stop`, none when they
    are the same. `load` is how long that takes, `compute` the rest of the prefix, `total`
    both, and `recompute` computing all of it. In seconds."""

    start: int
    stop: int
    load: float
    compute: float
    total: float
    recompute: float


class GetResult(NamedTuple):
    """One key of a get.

    reason: "hit", or why there are no bytes: "absent", "pending", "expired", "corrupt",
        "no_room", "deadline", "unavailable" (also when the daemon is not there).
    status: OK with each of these; BUSY: not served, ask again; another one: the key
        failed (INVALID: the buffer is too small, `total` says how long the block is).
    length: bytes that lie in the buffer now, 0 unless it is a hit. What is behind them
        was not touched by a hit; a buffer of a miss may have been written to.
    total: of the whole block, 0 when not known.
    """

    status: Status
    reason: str
    tier: Tier
    length: int
    total: int

    @property
    def hit(self) -> bool:
        """Whether the whole block is in the buffer, its checksum verified."""
        return self.reason == "hit" and self.status == 0


class PutResult(NamedTuple):
    """One key of a put.

    stored: the block is in the store because of this call.
    existed: it was there before, with the same bytes.
    error: why it is not there, None with either of the two. ConflictError: it is there
        with other bytes.
    """

    stored: bool
    existed: bool
    error: Optional[Error]

    @property
    def ok(self) -> bool:
        """Whether the block is in the store."""
        return self.error is None


class Location(NamedTuple):
    """Where a copy of a block lies. `place`: the device in the highest byte, below it the
    offset in units of 512 bytes."""

    tier: Tier
    place: int
    length: int


@dataclass(frozen=True)
class Event:
    """Something that happened to a block.

    kind: "stored", "removed", "cleared", "lost" (events that this watch missed, `count`
        of them), "present" (in a snapshot), "snapshot" (it is complete), "start" (the
        first: `incarnation` and `seq` are where the watch begins, `resumed` whether it
        goes on where it was asked to).
    reason: of removed: "evicted", "expired", "deleted", "moved", "damaged", "discarded",
        "unreadable", "rejected".
    gone: no tier has the block now.
    """

    kind: str
    seq: int
    namespace: str = ""
    hash: bytes = b""
    parent: Optional[bytes] = None
    tier: Tier = Tier.NONE
    length: int = 0
    count: int = 0
    reason: str = ""
    gone: bool = False
    incarnation: int = 0
    resumed: bool = False


EVENT_KINDS = ("stored", "removed", "cleared", "lost", "present", "snapshot")
REMOVED_REASONS = ("", "evicted", "expired", "deleted", "moved", "damaged", "discarded", "unreadable", "rejected")


@dataclass(frozen=True)
class Limits:
    """What the server allows one session."""

    calls: int  # in flight
    bytes: int  # of gets in flight
    keys: int  # of one message; longer calls are cut here into several
    grants: int  # places for puts
    grant_bytes: int
    message: int  # bytes of one message


@dataclass(frozen=True)
class Server:
    """Who answers. Another incarnation is another daemon, or this one started anew."""

    name: str
    incarnation: int
    limits: Limits


@dataclass(frozen=True)
class Stats:
    """Counters of a pool since it was made."""

    connects: int = 0  # sessions opened
    reconnects: int = 0  # of those, after a lost one
    disconnected_calls: int = 0  # calls that were answered with misses, nobody being there
    matches: int = 0  # keys
    gets: int = 0  # keys
    hits: int = 0  # of those
    corrupt: int = 0  # gets refused for their checksum
    puts: int = 0  # keys
    in_place: int = 0  # keys whose bytes were copied in or out of the store's memory here
    region_keys: int = 0  # keys whose bytes the daemon moved
    bytes_in: int = 0  # of payload
    bytes_out: int = 0
    jobs: int = 0  # submitted
    busy: int = 0  # submits that were refused
