"""The namespaces that a group of layers has its chunks in, opened beside the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import kvtier

#: How long it takes until a failed opening is tried again.
_AGAIN_SECONDS = 5.0


class Lane:
    """The namespaces of one group's chunks, one for each part of a row.

    spaces is None until they are open; refused says why they never will be, and is empty
    otherwise. Both are written by the opening thread and only read by others.
    """

    def __init__(self, group: int, opener: Callable[[Lane], list[Any]], complain: Callable[..., None]) -> None:
        self.group = group
        self.spaces: list[Any] | None = None
        self.refused = ""
        self._opener, self._complain = opener, complain
        self._thread: threading.Thread | None = None
        self._next = 0.0

    def want(self) -> None:
        """Start to open the namespaces, unless they are, or it is under way, or was tried just now."""
        if self.spaces is not None or self.refused or (self._thread is not None and self._thread.is_alive()):
            return
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _AGAIN_SECONDS
        self._thread = threading.Thread(target=self._open, name=f"kvtier-open-{self.group}", daemon=True)
        self._thread.start()

    def _open(self) -> None:
        try:
            self.spaces = self._opener(self)
        except (kvtier.MismatchError, kvtier.InvalidError, kvtier.DeniedError) as error:
            self.refused = str(error)
            self._complain("group %d: nothing is loaded or stored: %s", self.group, error)
        except Exception as error:  # the daemon may be there later; whatever it is, it is told and not raised
            self._complain("group %d: opening its namespace: %s: %s", self.group, type(error).__name__, error)

    def join(self) -> None:
        """Wait until no opening is under way."""
        if self._thread is not None:
            self._thread.join()
