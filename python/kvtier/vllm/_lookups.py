"""Which chunks the daemon has, asked once a step and never waited for."""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import kvtier

from ._lanes import Lane

#: Keys of one question. The protocol's limit is 8192.
_MATCH_KEYS = 4096

#: Keys whose load failed that are remembered at most; beyond it the oldest is forgotten.
FAILED_KEYS = 65536

#: How long no more is asked after a question that nobody answered, at first and at most.
_QUIET_SECONDS = (1.0, 30.0)

#: How long what was found stays where it is, so that it is there when it is loaded: a step
#: or two later, and then it is given free.
_LEASE_SECONDS = 5.0


class _Found:
    """The leases of what a question found, given free when all of it has been let go."""

    __slots__ = ("keys", "leases")

    def __init__(self, leases: Sequence[Any]) -> None:
        self.leases, self.keys = leases, 0

    def let_go(self) -> None:
        self.keys -= 1
        if self.keys == 0:
            for lease in self.leases:
                lease.release()


class _Asked:
    """A key that requests wait for, or know the answer of: None while it is out."""

    __slots__ = ("answer", "found", "key", "requests", "since")

    def __init__(self, key: bytes, since: float) -> None:
        self.key = key
        self.answer: bool | None = None
        self.requests: set[str] = set()
        self.since = since
        self.found: _Found | None = None

    def let_go(self) -> None:
        """Let the block go from where it was found."""
        found, self.found = self.found, None
        if found is not None:
            found.let_go()


class _Flight:
    """A question under way: keys of one lane, asked of the namespace of each part."""

    __slots__ = ("asked", "jobs", "since")

    def __init__(self, asked: list[_Asked], jobs: list[Any], since: float) -> None:
        self.asked, self.jobs, self.since = asked, jobs, since


class Lookups:
    """The answers that requests have, the questions that are out, and the keys that failed.

    An answer is kept as long as a request that asked lives, so that a request sees one
    answer, but for two things: a load that failed makes it False, a store that succeeded
    makes it True. Failures outlive their request, since another would run into them, too:
    they are forgotten when the key is stored again, when there are too many, or when the
    daemon was lost and is there again. Even then the answer stays as long as a request that
    saw the failure lives, so that no request loads a key in vain twice.
    """

    def __init__(
        self, lane: Callable[[int], Lane], timeout: float, complain: Callable[..., None], reconnected: Callable[[], bool]
    ) -> None:
        self._lane, self._timeout, self._complain, self._reconnected = lane, timeout, complain, reconnected
        self._asked: dict[bytes, _Asked] = {}
        self._of_request: defaultdict[str, set[bytes]] = defaultdict(set)
        self._batch: list[_Asked] = []
        self._flights: list[_Flight] = []
        self._failed: OrderedDict[bytes, None] = OrderedDict()
        self._fresh = False  # whether answers were taken in since the last flush
        self._quiet_until = 0.0
        self._quiet = _QUIET_SECONDS[0]
        self._asked_count = self._hit_count = 0

    def ask(self, key: bytes, request: str) -> bool | None:
        """Return whether the chunk is there; None when that is not known yet."""
        if not self._fresh:
            self._fresh = True
            self.poll()
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = _Asked(key, time.monotonic())
            if key in self._failed or asked.since < self._quiet_until:
                asked.answer = False
            else:
                self._batch.append(asked)
        asked.requests.add(request)
        self._of_request[request].add(key)
        return False if key in self._failed else asked.answer

    def flush(self) -> None:
        """Send what was asked since the last time: one question a lane."""
        self.poll()
        self._fresh = False
        batch, self._batch = self._batch, []
        now = time.monotonic()
        by_lane: defaultdict[Lane, list[_Asked]] = defaultdict(list)
        for asked in batch:
            if not asked.requests or asked.answer is not None:
                continue
            lane = self._lane(int.from_bytes(asked.key[-4:], "big"))
            if lane.refused or now - asked.since > self._timeout:
                asked.answer = False
            elif lane.spaces is None:
                self._batch.append(asked)  # it is being opened
            else:
                by_lane[lane].append(asked)
        for lane, wanted in by_lane.items():
            for i in range(0, len(wanted), _MATCH_KEYS):
                self._send(lane, wanted[i : i + _MATCH_KEYS], now)

    def _send(self, lane: Lane, wanted: list[_Asked], now: float) -> None:
        jobs: list[Any] = []
        hashes = [asked.key[:-4] for asked in wanted]
        try:
            for space in lane.spaces or ():
                jobs.append(space.submit_match(hashes, lease=_LEASE_SECONDS, all=True, timeout=self._timeout))
        except Exception as error:
            if isinstance(error, kvtier.BusyError):
                self._batch += wanted  # in the next step; what was asked already is asked again
                return
            self._complain("asking for %d chunks: %s", len(wanted), error)
            for asked in wanted:
                asked.answer = False
            return
        self._flights.append(_Flight(wanted, jobs, now))

    def poll(self) -> None:
        """Take in what has come: a daemon that is there again, answers."""
        if self._reconnected():
            self._failed.clear()
            self._quiet, self._quiet_until = _QUIET_SECONDS[0], 0.0
        if not self._flights:
            return
        now = time.monotonic()
        flights, self._flights = self._flights, []
        for flight in flights:
            if all(job.done() for job in flight.jobs):
                self._land(flight, now)
            elif now - flight.since > 2 * self._timeout:
                self._unanswered(flight, now, "no answer")
            else:
                self._flights.append(flight)

    def _land(self, flight: _Flight, now: float) -> None:
        there = [True] * len(flight.asked)
        leases: list[Any] = []
        for job in flight.jobs:
            try:
                match = job.result(0)
            except Exception as error:
                self._unanswered(flight, now, error)
                return
            if match.status not in (kvtier.Status.OK, kvtier.Status.DISCONNECTED):
                self._unanswered(flight, now, match.status.name)
                return
            blocks = match.blocks  # none when nobody is there
            for i in range(len(there)):
                there[i] = there[i] and i < len(blocks) and blocks[i].state == kvtier.State.RESIDENT
            if match.lease is not None:
                leases.append(match.lease)
        self._quiet, self._quiet_until = _QUIET_SECONDS[0], 0.0
        self._asked_count += len(there)
        self._hit_count += sum(there)
        found = _Found(leases)
        for asked, answer in zip(flight.asked, there):
            if asked.answer is None:
                asked.answer = answer
                if answer and asked.requests:
                    asked.found, found.keys = found, found.keys + 1
        if not found.keys:  # all who asked are gone
            for lease in leases:
                lease.release()

    def _unanswered(self, flight: _Flight, now: float, why: object) -> None:
        """Take it for misses, and ask nothing for a while: requests would wait for every timeout."""
        self._complain("asking for %d chunks: %s; no more is asked for %.0f s", len(flight.asked), why, self._quiet)
        self._quiet_until = now + self._quiet
        self._quiet = min(2 * self._quiet, _QUIET_SECONDS[1])
        for asked in flight.asked:
            if asked.answer is None:
                asked.answer = False

    def pending(self) -> bool:
        """Return whether questions are out, or wait to be sent."""
        return bool(self._flights or self._batch)

    def take_counts(self) -> tuple[int, int]:
        """Return how many keys were answered since the last call, and how many were there."""
        counts = self._asked_count, self._hit_count
        self._asked_count = self._hit_count = 0
        return counts

    def asked_by(self, request: str) -> Iterable[bytes]:
        """Return the keys that a request has asked for."""
        return self._of_request.get(request, ())

    def failed(self, keys: Iterable[bytes]) -> None:
        """Answer that these are not there, from now on."""
        for key in keys:
            self._failed[key] = None
            self._failed.move_to_end(key)
            if key in self._asked:
                self._asked[key].answer = False
                self._asked[key].let_go()
        while len(self._failed) > FAILED_KEYS:
            self._failed.popitem(last=False)

    def loaded(self, keys: Iterable[bytes]) -> None:
        """Let these go from where they were found: the engine has them."""
        for key in keys:
            if key in self._asked:
                self._asked[key].let_go()

    def stored(self, keys: Iterable[bytes]) -> None:
        """Answer that these are there."""
        for key in keys:
            self._failed.pop(key, None)
            if key in self._asked:
                self._asked[key].answer = True

    def forget(self, request: str) -> None:
        """Drop what a request has asked for, unless others have, too."""
        for key in self._of_request.pop(request, ()):
            asked = self._asked[key]
            asked.requests.discard(request)
            if not asked.requests:
                asked.let_go()
                del self._asked[key]
