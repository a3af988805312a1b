"""What a check is, how long it may take, and in which order the checks of a run start. No torch here.

A run has a total time, ``TOTAL_S`` unless it is told another, and every check a budget, which grows with that. A check
starts when half of its budget is left of the total. It ends by its budget, which begins when its ranks are there, or by
the total, whichever comes first. So a run takes no longer than its total, and what it had no time for is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

#: Seconds of a run by its ranks: of one, and of more, which try layouts beside.
TOTAL_S = {1: 600.0, 2: 900.0}
NEEDS_A_GPU = "needs a GPU"


class Skipped(Exception):
    """A check that cannot be made here; the message says why. Raised on all ranks alike."""


class Missed(AssertionError):
    """A number is outside its limit. Raised when no rank waits for another any more: the ranks stay up."""


@dataclass(frozen=True)
class Place:
    """What a check is given: a folder of its own, the seconds within which it has to end, how many GPUs the machine
    offers (0: it runs on CPUs, in small sizes), how many ranks take part, the interpreter of a rollout environment."""

    folder: Path
    seconds: float
    gpus: int
    ranks: int = 1
    rollout_python: Path | None = None

    @property
    def large(self) -> bool:
        """Whether sizes are those of a GPU."""
        return self.gpus > 0


@dataclass(frozen=True)
class Found:
    """What a check that passed found: a line for people, and numbers by name."""

    text: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """``function`` ("module:name") takes a ``Place``, and by keywords ``keys`` and what ``made`` makes of the run's
    place; it returns ``Found``. ``made`` runs in the parent, before the ranks are there. ``seconds``: its budget in a
    run of ``TOTAL_S``. ``ranks``: it needs so many, on a GPU each. ``alone``: in processes of its own."""

    name: str
    function: str
    seconds: float
    ranks: int = 1
    alone: bool = False
    keys: Mapping[str, Any] = field(default_factory=dict)
    made: Callable[[Place], dict[str, Any]] | None = None


@dataclass(frozen=True)
class Outcome:
    """``log``: the end of the ranks' output, of a check that did not come to its end."""

    name: str
    state: Literal["passed", "failed", "skipped"]
    text: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int = 0
    log: str = ""


def chosen(checks: Sequence[Check], words: Sequence[str]) -> list[Check]:
    """Those whose name holds one of ``words``; all of them without any."""
    return [check for check in checks if not words or any(word in check.name for word in words)]


def run_checks(
    checks: Sequence[Check],
    total_s: float,
    scale: float,
    run: Callable[[Check, float, float], Outcome],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Outcome]:
    """``run(check, budget, left)`` for one check after another, for as long as there is time; ``scale`` of budgets."""
    deadline = clock() + total_s
    for check in checks:
        left, budget = deadline - clock(), check.seconds * scale
        if left < budget / 2:
            text = f"out of time: {max(left, 0.0):.0f} s of {total_s:.0f} s are left, and it may take {budget:.0f} s"
            yield Outcome(check.name, "skipped", text)
            continue
        started = clock()
        outcome = run(check, min(budget, left), left)
        yield Outcome(**{**vars(outcome), "seconds": clock() - started})


def require(value: float, limit: float, what: str) -> str:
    """ "what value (allowed limit)"; Missed where it is above it, or not a number."""
    if not value <= limit:
        raise Missed(f"{what} {value:.3g}, allowed {limit:g}")
    return f"{what} {value:.1e} (allowed {limit:g})"
