"""The ranks of a run of checks: started by this script, asked with a deadline, killed by pid when it passes.

The parent imports no CUDA: ``Ranks`` is its handle, the functions below it run in the ranks.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import re
import signal
import sys
import time
from dataclasses import replace
from typing import Any

from tests.learner.world import World, WorldFailed

from .checklist import Check, Found, Missed, Outcome, Place, Skipped
from .machine import describe

#: Seconds for ranks to import everything and to find their devices.
START_S = 120.0
#: Seconds before the deadline of a check at which a rank writes down where all its threads are.
_LAST_WORDS_S = 3.0
_PR_SET_PDEATHSIG = 1
#: A line that tells an error, as Python writes it last.
_ERROR_LINE = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Refused|Failed|Missed)\b.*)$", re.MULTILINE)


class Ranks:
    """Worlds by their size: each stays up from check to check, and is started anew after one that failed in it.
    ``prepare``: what a rank does first."""

    def __init__(self, prepare: str = "tests.gpu.ranks:prepare") -> None:
        self._prepare = prepare
        self._worlds: dict[int, World] = {}

    def start(self, ranks: int) -> None:
        """Begin to start a world of this size, unless there is one."""
        if ranks not in self._worlds:
            self._worlds[ranks] = World(ranks)

    def ready(self, ranks: int, seconds: float) -> dict[str, Any]:
        """What rank 0 of a world of this size says of its machine; WorldFailed when it does not come up."""
        self.start(ranks)
        return dict(self._ask(ranks, self._prepare, {}, seconds))

    def run(self, check: Check, place: Place, left: float, arguments: dict[str, Any]) -> Outcome:
        """The outcome of ``check`` within ``place.seconds`` of its ranks being there, and within ``left`` in all."""
        deadline = time.monotonic() + left
        if check.alone:
            self.close()  # what it starts may want the whole device
        try:
            self.ready(place.ranks, min(START_S, left))
            own = replace(place, seconds=max(1.0, min(place.seconds, deadline - time.monotonic())))
            call = {"function": check.function, "place": own, "arguments": arguments}
            found = self._ask(place.ranks, "tests.gpu.ranks:run_check", call, own.seconds)
        except WorldFailed as failure:
            return Outcome(check.name, "failed", reason(str(failure)), log=str(failure))
        finally:
            if check.alone:
                self.close()
        return Outcome(check.name, **found)

    def close(self) -> None:
        """End all ranks."""
        while self._worlds:
            self._worlds.popitem()[1].close()

    def _ask(self, ranks: int, function: str, arguments: dict[str, Any], seconds: float) -> Any:
        try:
            return self._worlds[ranks].run(function, arguments, seconds)
        except BaseException:
            self._worlds.pop(ranks).close(at_once=True)
            raise


def reason(failure: str) -> str:
    """One line of what a world says of its end: the last error of a rank, or that the time was out, and where."""
    first, *_ = failure.splitlines()
    if "no end after" in first:
        return f"{first.split(': ', 1)[1]}; the log says where every thread was"
    errors = _ERROR_LINE.findall(failure)
    return " ".join(errors[-1].split())[:300] if errors else first


# --- in a rank ------------------------------------------------------------------------------------


def prepare() -> dict[str, Any]:
    """Bind this rank to its device, and say what there is."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # no rank outlives the script
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler talks
    from vcpo_megatron.learner.megatron import platform

    platform.prepare()
    import torch

    import tests.learner.scenarios  # noqa: F401 - what a check is given is made of its classes

    if os.environ.get("CUDA_VISIBLE_DEVICES") != "" and not torch.cuda.is_available():
        raise RuntimeError("the host has GPUs, but torch finds none: is this torch built for CUDA, and for its driver?")
    return describe()


def run_check(function: str, place: Place, arguments: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 makes an ``Outcome`` of."""
    import torch

    from tests.learner.world import leave_layout

    module, name = function.split(":")
    check = getattr(importlib.import_module(module), name)
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    faulthandler.dump_traceback_later(max(1.0, place.seconds - _LAST_WORDS_S), exit=False, file=sys.stderr)
    try:
        found: Found = check(place, **arguments)
        outcome = {"state": "passed", "text": found.text, "figures": found.figures}
    except Skipped as why:
        outcome = {"state": "skipped", "text": str(why)}
    except Missed as why:
        outcome = {"state": "failed", "text": str(why)}
    finally:
        faulthandler.cancel_dump_traceback_later()
    outcome["peak_bytes"] = torch.cuda.max_memory_allocated() if gpu else 0
    if torch.distributed.is_initialized():
        leave_layout()  # every check builds its own groups
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
    return outcome


def is_first() -> bool:
    """Whether this is the rank that compares."""
    return os.environ.get("RANK", "0") == "0"
