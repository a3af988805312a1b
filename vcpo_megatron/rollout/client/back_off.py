"""Pauses between tries that grow."""

from __future__ import annotations

import time


class BackOff:
    """Times between tries: ``first_s``, then twice as long each time, at most ``most_s``."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._next_s = first_s
        self._due = 0.0

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._due

    def wait(self) -> float:
        """Seconds of the next pause, after which the next try is due."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._most_s)
        self._due = time.monotonic() + pause_s
        return pause_s

    def reset(self) -> None:
        """The next try is due now, and the pause after it is the first again."""
        self._due, self._next_s = 0.0, self._first_s
