"""Processor seconds of a run: of a process and of all its descendants, those that have ended included."""

from __future__ import annotations

import psutil


class ProcessSeconds:
    """User and system time of the tree of ``pid``, looked at now and then.

    What a process used after the last look before its end is not seen: a fraction of a second of a run's minutes.
    ``already``: seconds that count from before, of an attempt that a resume goes on from.
    """

    def __init__(self, pid: int, already: float = 0.0) -> None:
        self._pid, self._already = pid, already
        self._seen: dict[tuple[int, float], float] = {}

    def look(self) -> float:
        """Seconds until now; once the tree has ended, those of the last look."""
        try:
            root = psutil.Process(self._pid)
            members = [root, *root.children(recursive=True)]
        except psutil.Error:
            members = []
        for member in members:
            try:
                with member.oneshot():
                    times, key = member.cpu_times(), (member.pid, member.create_time())
            except psutil.Error:
                continue
            self._seen[key] = max(self._seen.get(key, 0.0), times.user + times.system)
        return self._already + sum(self._seen.values())
