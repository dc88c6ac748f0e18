"""The longest prefix that is there, of one namespace or several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, Dict, List, Optional, Sequence, Tuple

from . import _wire as wire
from ._arguments import hashes_of, parts_of
from ._calls import Call, Cancel
from ._errors import Error, InvalidError, Status
from ._jobs import deadline_of
from ._loans import Lease
from ._places import millis, millis_left
from ._results import BlockState, Plan, PlanOptions, State, tier_of
from ._transfer import Handle

if TYPE_CHECKING:
    from ._namespace import Namespace
    from ._pool import Pool


class Match:
    """The answer of a match.

    prefix: how many keys from the first on are resident without a gap.
    lease: holds the blocks that it tells of where they are; None when none was wanted, or
        nothing was found.
    status: OK, or why nothing is known (DISCONNECTED: nobody was there).
    plan: what of the prefix is worth loading; None when that was not asked, or nothing is
        known.
    """

    __slots__ = ("prefix", "lease", "status", "plan", "_raw", "_blocks")

    def __init__(
        self,
        prefix: int,
        raw: bytes,
        lease: Optional[Lease],
        status: Status = Status.OK,
        plan: Optional[Plan] = None,
    ) -> None:
        self.plan = plan
        self.prefix = prefix
        self.lease = lease
        self.status = status
        self._raw = raw
        self._blocks: Optional[List[BlockState]] = None

    @property
    def blocks(self) -> List[BlockState]:
        """The keys in order. Without all=True the list ends behind the first that is not
        resident."""
        if self._blocks is None:
            self._blocks = [
                BlockState(State(state) if state <= 2 else State.ABSENT, tier_of(tier), length)
                for state, tier, length in wire.read_blocks(self._raw)
            ]
        return self._blocks

    def __repr__(self) -> str:
        return f"Match(prefix={self.prefix}, blocks={self.blocks}, lease={self.lease}, status={self.status.name})"


class Gathered:
    """The parts of a match, which one message may not take."""

    def __init__(
        self,
        h: Handle,
        hashes: Sequence[bytes],
        lease: Optional[float],
        all: bool,
        wanted: Optional[PlanOptions] = None,
        conversation: str = "",
    ) -> None:
        self.h = h
        # The request is one of its conversation, whose name the first message has.
        self.conversation = conversation if h.conn.hints else ""
        self.wanted = _packed(wanted)
        self.plan: Optional[Plan] = None
        if wanted is not None and len(hashes) > h.conn.keys:
            raise InvalidError(f"plan of {len(hashes)} hashes, at most {h.conn.keys}")
        self.hashes = hashes
        self.lease_ms = 0 if lease is None else millis(lease)
        self.all = all
        self.prefix = 0
        self.unbroken = True
        self.raw = b""
        self.leases: List[int] = []
        self.leased = 0
        self.left_ms = 0xFFFFFFFF

    def parts(self) -> List[Sequence[bytes]]:
        return parts_of(self.h.conn.keys, self.hashes)

    def message(self, part: Sequence[bytes], deadline: float) -> bytes:
        keys = wire.Keys(self.h.id, self.h.tag, len(self.hashes[0]), part)
        flags = wire.FLAG_ALL if self.all else 0
        return wire.match(keys, flags, millis_left(deadline), self.lease_ms, self.wanted, self.conversation)

    def take(self, part: Sequence[bytes], reply: bytes) -> bool:
        """Adds an answer, and says whether more are wanted."""
        m = self.h.conn.decode(wire.read_matched, reply)
        if m.lease:
            self.leases.append(m.lease)
            self.leased += m.leased
            self.left_ms = min(self.left_ms, m.lease_ms)
            if self.conversation:
                self.lease_ms = max(1, m.lease_ms)  # of the other parts, too
        self.conversation = ""
        n = len(part)
        if m.prefix > n or m.many > n or (self.all and m.many < n):
            raise self.h.conn.give_up(f"the daemon answered {m.many} of {n} keys, a prefix of {m.prefix}")
        if self.wanted is not None:
            if m.plan is None:
                raise self.h.conn.give_up("the daemon answered a match without the plan")
            start, stop, *ns = m.plan
            self.plan = Plan(start, stop, *(n / 1e9 for n in ns))
        self.raw += m.blocks
        if self.unbroken:
            self.prefix += m.prefix
            self.unbroken = m.prefix == n
        return self.unbroken or self.all

    def drop(self) -> None:
        leases, self.leases = self.leases, []
        for lease in leases:
            self.h.conn.release_later(lease)

    def match(self) -> Match:
        lease = None
        if self.leases:
            lease = Lease(self.h.conn, self.leases, self.leased, self.left_ms / 1000)
        return Match(self.prefix, self.raw, lease, plan=self.plan)


def _packed(p: Optional[PlanOptions]) -> Optional[Tuple[int, float, int, bool]]:
    if p is None:
        return None
    if not (0 <= p.token < 1e9 and 0 <= p.position < 1e9):
        raise InvalidError(f"plan: prefill cost {p.token} s, {p.position} s: want 0 or more")
    if p.within is not None and not p.within > 0:
        raise InvalidError(f"plan: within {p.within} s: want more than 0")
    return round(p.token * 1e9), p.position * 1e9, 0 if p.within is None else millis(p.within), p.overlap


def match_all(
    pool: "Pool",
    requests: "Sequence[Tuple[Namespace, Sequence[bytes]]]",
    lease: Optional[float],
    timeout: Optional[float],
) -> "Callable[[Optional[Cancel]], Tuple[int, List[Match]]]":
    """Checks the arguments of Pool.match_all, and returns the call."""
    if lease is not None and not lease > 0:
        raise InvalidError(f"lease: {lease} s")
    deadline = deadline_of(timeout, pool.timeout)
    requests = list(requests)
    for i, (ns, _) in enumerate(requests):
        if ns._pool is not pool:
            raise InvalidError(f"request {i} is of another pool's namespace")
    keys = [hashes_of(hashes) for _, hashes in requests]

    def call(cancel: Optional[Cancel]) -> Tuple[int, List[Match]]:
        parts: List[_Part] = []
        gathered: Dict[int, Gathered] = {}
        try:
            matches = _gather(requests, keys, lease, deadline, parts, gathered, cancel)
        except BaseException as e:
            for g in gathered.values():
                g.drop()
                if not isinstance(e, Error):
                    g.h.conn.interrupted(e)
            raise
        finally:
            for part in parts:
                part.give_up()
        return min((m.prefix for m in matches), default=0), matches

    return call


class _Part:
    """A message of a match that is under way."""

    def __init__(self, i: int, g: Gathered, keys: Sequence[bytes]) -> None:
        self.i = i  # of the request
        self.g = g
        self.keys = keys
        self.call = Call(wire.MATCHED)
        self.over = False

    def wait(self, deadline: float, cancel: Optional[Cancel]) -> bytes:
        conn = self.g.h.conn
        if cancel is not None:
            cancel.enter(conn, self.call)
        try:
            reply = conn.wait(self.call, deadline)
        finally:
            if cancel is not None:
                cancel.leave()
        self.over = True
        return reply

    def give_up(self) -> None:
        """What it leased, or will lease, is given back."""
        conn, call = self.g.h.conn, self.call
        if not self.over and not conn.abandon(call) and call.payload:
            conn.release_later(conn.decode(wire.read_matched, call.payload).lease)
        self.over = True


def _gather(
    requests: "Sequence[Tuple[Namespace, Sequence[bytes]]]",
    keys: Sequence[Sequence[bytes]],
    lease: Optional[float],
    deadline: float,
    parts: List[_Part],
    gathered: Dict[int, Gathered],
    cancel: Optional[Cancel],
) -> List[Match]:
    failed: Dict[int, Match] = {}
    for i, (ns, _) in enumerate(requests):
        h = ns._at()
        if h is None or not keys[i]:
            failed[i] = Match(0, b"", None, Status.DISCONNECTED if h is None else Status.OK)
            continue
        ns._pool._counts.add(matches=len(keys[i]))
        g = gathered[i] = Gathered(h, keys[i], lease, False)
        try:
            for some in g.parts():
                part = _Part(i, g, some)
                h.conn.begin(part.call)
                parts.append(part)
                h.conn.send([wire.message(wire.MATCH, part.call.id, g.message(some, deadline))], deadline)
        except Error as e:
            failed[i] = Match(0, b"", None, ns._failed(e))
    broken = set(failed)
    for part in parts:
        i = part.i
        if i in broken:  # behind a gap, or of a request that has failed
            part.give_up()
            continue
        try:
            if not part.g.take(part.keys, part.wait(deadline, cancel)):
                broken.add(i)
        except Error as e:
            broken.add(i)
            part.g.drop()
            failed[i] = Match(0, b"", None, requests[i][0]._failed(e))
    return [failed[i] if i in failed else gathered[i].match() for i in range(len(requests))]
