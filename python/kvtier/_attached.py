"""A namespace in the sessions of a pool: how it is opened, and how calls begin and end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Dict, List, Optional, Sequence

from . import _wire as wire
from ._connection import Connection
from ._errors import (
    CancelledError,
    ClosedError,
    DeadlineError,
    DeniedError,
    DisconnectedError,
    Error,
    InvalidError,
    MismatchError,
    NotFoundError,
    Status,
    bare,
)
from ._lookup import Lookups
from ._places import millis_left
from ._results import GetResult, PutResult, Tier
from ._transfer import Handle

if TYPE_CHECKING:
    from ._pool import Pool

_log = logging.getLogger("kvtier")

MISS = GetResult(Status.DISCONNECTED, "unavailable", Tier.NONE, 0, 0)

REASON_OF = {Status.DEADLINE: "deadline", Status.CORRUPT: "corrupt", Status.NO_SPACE: "no_room"}


class Attached:
    """What a namespace is in whichever session its pool has, none included."""

    def __init__(self, pool: "Pool", name: str, fields: Dict[str, str], create: bool, ttl_ms: int) -> None:
        self._pool = pool
        self.name = name
        self._fields = fields
        self._create = create
        self._ttl_ms = ttl_ms
        self._handle: Optional[Handle] = None
        self._opened: Optional[wire.Opened] = None
        # Why it could not be opened, None when it is open or nobody was asked yet.
        self.error: Optional[Error] = None
        self._lookups = Lookups()

    def __repr__(self) -> str:
        return f"<kvtier.Namespace {self.name!r} at {self._pool.address}{'' if self.is_open else ', not open'}>"

    # Life

    def _open(self, conn: Connection, deadline: float) -> None:
        message = wire.open_(self.name, self._fields, self._create, self._ttl_ms, millis_left(deadline))
        opened = conn.decode(wire.read_opened, conn.trip(wire.OPEN, message, deadline))
        self._opened = opened
        self.error = None
        self._handle = Handle(conn, opened.id, opened.tag)

    def _refused(self, e: Error) -> None:
        """It could not be opened: told once."""
        if not isinstance(e, (DisconnectedError, DeadlineError)) and str(e) != str(self.error):
            _log.error("namespace %s: %s", self.name, e)
        self.error = bare(e)
        self._handle = None

    def _after_fork(self) -> None:
        self._handle = None
        self._lookups = Lookups()

    @property
    def pool(self) -> "Pool":
        return self._pool

    @property
    def is_open(self) -> bool:
        """Whether calls go to the daemon now."""
        h = self._handle
        return h is not None and h.conn.error is None

    @property
    def hash_len(self) -> int:
        """Bytes of its hashes as it was opened; 0: the first put fixes it."""
        return self._opened.hash_len if self._opened is not None else 0

    @property
    def block_bytes(self) -> int:
        """Length of all its blocks, 0 when they differ or it was never open."""
        return self._opened.block_bytes if self._opened is not None else 0

    @property
    def max_block_bytes(self) -> int:
        """Most bytes of a block, 0 when it has block_bytes or was never open."""
        return self._opened.max_block_bytes if self._opened is not None else 0

    # How calls begin and end

    def _at(self) -> Optional[Handle]:
        """The namespace in the session that there is, None: the call is a miss."""
        conn = self._pool._ready()
        h = self._handle
        if conn is None or h is None or h.conn is not conn:
            self._pool._counts.add(disconnected_calls=1)
            return None
        return h

    def _failed(self, e: Error) -> Status:
        """What becomes of a call that failed as a whole: raised, or answered with misses
        of this status."""
        if isinstance(e, (InvalidError, DeniedError, CancelledError)):
            raise e
        if isinstance(e, ClosedError) and self._pool._closed:
            raise e
        if isinstance(e, (NotFoundError, MismatchError)):
            self._handle = None  # the store is another one behind the same session
            self._pool._reopen()
        elif isinstance(e, DisconnectedError):
            self._pool._counts.add(disconnected_calls=1)
        return e.status

    def _stored(self, hashes: Sequence[bytes], results: List[Optional[PutResult]], error: Error) -> List[PutResult]:
        failed = PutResult(False, False, bare(error))
        done = [failed if r is None else r for r in results]
        results[:] = done
        self._lookups.put([k for k, r in zip(hashes, done) if r.ok])
        return done

def misses(results: Sequence[Optional[GetResult]], status: Status) -> List[GetResult]:
    """Results with misses for those keys that the call did not come to."""
    miss = GetResult(status, REASON_OF.get(status, "unavailable"), Tier.NONE, 0, 0)
    return [miss if r is None else r for r in results]
