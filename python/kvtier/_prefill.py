"""What prefill costs, told by the engine."""

from __future__ import annotations

import math
from typing import Optional, Tuple

from . import _wire as wire
from ._arguments import number_of
from ._attached import Attached
from ._calls import Cancel
from ._errors import Error, InvalidError
from ._jobs import Job, deadline_of

_LONGEST = 1e9  # seconds


class Prefill(Attached):
    """The call by which an engine tells what it has measured."""

    def report_prefill(self, position: int, tokens: int, seconds: float, timeout: Optional[float] = None) -> bool:
        """Tells what computing so many tokens of a prompt in one go took, behind `position`
        others. From the last of them the daemon learns what prefill costs in the namespace,
        for plans that do not say it.

        Only times of the computing itself are of use: what an engine did between is taken
        for a part of it. True when the daemon has it, False when it is not there, or has
        no use for it.
        """
        report = _report(position, tokens, seconds)
        return self._report_prefill(report, deadline_of(timeout, self._pool.timeout))

    def submit_report_prefill(
        self, position: int, tokens: int, seconds: float, timeout: Optional[float] = None
    ) -> Job[bool]:
        """report_prefill as a job."""
        report = _report(position, tokens, seconds)
        deadline = deadline_of(timeout, self._pool.timeout)
        return self._pool._submit(lambda cancel, known: self._report_prefill(report, deadline, cancel), 0)

    def _report_prefill(self, report: Tuple[int, int, int], deadline: float, cancel: Optional[Cancel] = None) -> bool:
        h = self._at()
        if h is None or not h.conn.hints:
            return False
        try:
            message = wire.report_prefill(h.id, h.tag, *report)
            reply = h.conn.trip(wire.REPORT_PREFILL, message, deadline, cancel=cancel)
            h.conn.decode(wire.read_reported, reply)
        except Error as e:
            self._failed(e)
            return False
        return True


def _report(position: int, tokens: int, seconds: float) -> Tuple[int, int, int]:
    """Checks a report, and gives it with its time in µs."""
    number_of("position", position, 0, wire.MAX_PREFILL)
    number_of("tokens", tokens, 1, wire.MAX_PREFILL)
    if not 0 < seconds < _LONGEST:
        raise InvalidError(f"seconds: {seconds}, want more than 0")
    return position, tokens, math.ceil(seconds * 1e6)
