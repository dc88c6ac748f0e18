"""Attach to a kvtier daemon: a tiered store of LLM KV-cache blocks.

    import kvtier

    pool = kvtier.connect("unix:/path/of/session.sock")
    ns = pool.open("my-model", model="my-model", dtype="bf16", max_block_bytes=1 << 20)
    ns.put([h0, h1], [block0, block1], parents=[None, h0])
    found = ns.match([h0, h1, h2]).prefix
    results = ns.get_into([h0, h1], [buffer0, buffer1])

The bytes of a hit are verified, and lie in the caller's memory. Everything else is a miss
with a reason, also a daemon that is not there: the pool connects again in the background.
`kvtier.aio` has the same calls with await.
"""

from ._dial import Region
from ._errors import (
    BusyError,
    CancelledError,
    ClosedError,
    ConflictError,
    CorruptError,
    DeadlineError,
    DeniedError,
    DisconnectedError,
    Error,
    InternalError,
    InvalidError,
    LeaseExpiredError,
    MismatchError,
    NoSpaceError,
    NotFoundError,
    Status,
    UnavailableError,
)
from ._jobs import Job
from ._loans import Lease, Loan, Reservation
from ._match import Match
from ._namespace import Namespace
from ._pool import Pool, connect
from ._results import (
    BlockState,
    Event,
    GetResult,
    Limits,
    Location,
    Plan,
    PlanOptions,
    PutResult,
    Server,
    State,
    Stats,
    Tier,
)
from ._watch import Watch

__all__ = [
    "BlockState",
    "BusyError",
    "CancelledError",
    "ClosedError",
    "ConflictError",
    "CorruptError",
    "DeadlineError",
    "DeniedError",
    "DisconnectedError",
    "Error",
    "Event",
    "GetResult",
    "InternalError",
    "InvalidError",
    "Job",
    "Lease",
    "LeaseExpiredError",
    "Limits",
    "Loan",
    "Location",
    "Match",
    "MismatchError",
    "Namespace",
    "NoSpaceError",
    "NotFoundError",
    "Plan",
    "PlanOptions",
    "Pool",
    "PutResult",
    "Region",
    "Reservation",
    "Server",
    "State",
    "Stats",
    "Status",
    "Tier",
    "UnavailableError",
    "Watch",
    "connect",
]
