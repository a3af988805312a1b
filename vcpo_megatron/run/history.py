"""What a run's configuration was at its start, and every change of it since: ``history.jsonl``, a line an event.

    {"event": "start",  "attempt": 1, "step": 0,  "time": "2026-01-31T12:00:00+00:00", "values": {...}}
    {"event": "resume", "attempt": 2, "step": 40, "time": ...}
    {"event": "change", "attempt": 2, "step": 40, "time": ..., "key": "optimizer.lr", "old": "1e-06", "new": "5e-07"}

Values are TOML text by "section.key", null where a key is not set. Lines are only added, those of an attempt when it
takes the run over. With a checkpoint's manifest, which holds the values that made it, they say what the run's own copy
of its configuration must hold.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .directory import RunDirectory

#: "section.key" -> its value as TOML text, None where it is not set.
Values = Mapping[str, str | None]


@dataclass(frozen=True)
class Recorded:
    """The values of a run; ``replaced``: what the newest attempt changed, as it was before.

    An attempt that died in the instant between its line here and its copy of the configuration has changed nothing, so
    either value may be found in that copy.
    """

    values: Values = field(default_factory=dict)
    replaced: Values = field(default_factory=dict)

    def differing(self, found: Values) -> Iterator[str]:
        """Keys of ``found`` whose value is not the run's; a key that the run did not know has none."""
        for key, value in found.items():
            if key in self.values and value != self.values[key] and (key, value) not in self.replaced.items():
                yield key


def recorded(directory: RunDirectory, step: int | None) -> Recorded:
    """What is known of the run whose checkpoint ``step`` is gone back to (None: its start). OSError or ValueError when
    the manifest cannot be read."""
    attempt, values = 0, dict[str, str | None]()
    if step is not None:
        manifest = directory.manifest(step)
        attempt, values = manifest.attempt, dict(manifest.config)
    replaced = dict[str, str | None]()
    changed_by = 0
    for event in _events(directory.history):
        if event["event"] == "start" and step is None:
            values = dict(event["values"])
        elif event["event"] == "change" and event["attempt"] > attempt:
            if event["attempt"] != changed_by:
                changed_by, replaced = event["attempt"], {}
            replaced[event["key"]] = values.get(event["key"])
            values[event["key"]] = event["new"]
    return Recorded(values, replaced)


def last_step(directory: RunDirectory) -> int:
    """The highest step that an attempt went on from, which had a complete checkpoint then; 0 for none."""
    return max((event["step"] for event in _events(directory.history)), default=0)


def record(directory: RunDirectory, *, attempt: int, step: int | None, values: Values) -> None:
    """Add the lines of an attempt that goes on from checkpoint ``step`` (None: from the start) with ``values``.

    OSError, which names the file, when the disk does not take them.
    """
    path = directory.history
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"attempt": attempt, "step": step or 0, "time": now}
    if step is None and not any(event["event"] == "start" for event in _events(path)):
        events: list[Mapping[str, Any]] = [{"event": "start", **about, "values": dict(values)}]
    else:
        known = recorded(directory, step).values
        changed = [key for key in values if key in known and values[key] != known[key]]
        events = [
            {"event": "resume", **about},
            *({"event": "change", **about, "key": key, "old": known[key], "new": values[key]} for key in changed),
        ]
    try:
        _append(path, events)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _append(path: Path, events: list[Mapping[str, Any]]) -> None:
    """Add whole lines, durably; a line that a crash left without its end goes first."""
    with open(path, "a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(b"".join(json.dumps(event).encode() + b"\n" for event in events))
        file.flush()
        os.fsync(file.fileno())


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of the file; a torn or damaged one, which cannot say what came of it, is passed over."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and _is_whole(event):
            yield event


def _is_whole(event: Mapping[str, Any]) -> bool:
    """Whether ``event`` holds what its kind is read for."""
    if type(event.get("attempt")) is not int or type(event.get("step")) is not int:
        return False
    match event.get("event"):
        case "start":
            return isinstance(event.get("values"), dict) and all(map(_is_toml_text, event["values"].values()))
        case "change":
            return isinstance(event.get("key"), str) and "new" in event and _is_toml_text(event["new"])
        case kind:
            return kind == "resume"


def _is_toml_text(value: object) -> bool:
    return value is None or isinstance(value, str)
