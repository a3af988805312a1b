"""What the processes of a run warn of, or note, for the terminal of the user who started it."""

from __future__ import annotations

from pathlib import Path

from ..config.process import NOTE_PREFIX, WARNING_PREFIX

#: Bytes that are looked at in one call; the next one goes on.
_BLOCK = 1 << 20


class LogWarnings:
    """Lines of ``log`` that begin with "vcpo: warning: " or "vcpo: note: ", those that are written from now on."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._at = log.stat().st_size if log.is_file() else 0

    def poll(self) -> list[str]:
        """Whole lines since the last call; does not block."""
        if not self._log.is_file():  # not yet, or a device
            return []
        with open(self._log, "rb") as file:
            file.seek(self._at)
            data = file.read(_BLOCK)
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) == _BLOCK:  # a line without end is no warning
            end = _BLOCK
        self._at += end
        lines = data[:end].decode(errors="replace").splitlines()
        return [line.removeprefix(NOTE_PREFIX) for line in lines if line.startswith((WARNING_PREFIX, NOTE_PREFIX))]
