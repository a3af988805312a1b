"""The most memory that a process holds while it does something."""

from __future__ import annotations

import threading
from pathlib import Path


def anonymous_bytes() -> int:
    """Bytes that this process holds in memory; mapped files, which the system can drop, do not count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon: memory is measured on Linux only")


class PeakMemory:
    """``extra``: most anonymous memory held while it was entered, above what was held before: bytes, sampled every
    ``interval_s``. It may be entered again: the most of all times."""

    def __init__(self, interval_s: float = 0.002) -> None:
        self.extra = 0
        self._interval_s = interval_s

    def __enter__(self) -> PeakMemory:
        self._before, self._stop = anonymous_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.extra = max(self.extra, anonymous_bytes() - self._before)
