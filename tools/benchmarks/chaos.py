"""Rollout servers under fire while a run trains: killed, stopped, and made to refuse an update, at random moments.

The run itself is never ended: it must restart what died or hangs, run its requests again elsewhere, give it all
weights, and go on. Afterwards its account is checked as ``soak`` does it, and with it the learner's own comparison of
log-probs: a token that was recorded under a version that did not sample it would differ there (``mismatch/max``, over
the tokens of the version before each step). A step with such a token counts as one of a wrong version.

An update is refused by closing its session under the orchestrator's feet: ``/end_weight_update`` is posted to a server
until it answers that a session was open, so that the orchestrator's next request of that update is answered 400.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import psutil

from vcpo_megatron.config.load import load_resolved
from vcpo_megatron.observability.sinks import read_rows
from vcpo_megatron.rollout.client.protocol import END_WEIGHT_UPDATE, MODEL_INFO
from vcpo_megatron.types import PolicyVersion

from .soak import PATIENCE_S, Account, Attempts, SoakError, account

FAULTS = ("killed", "stopped", "refused")
#: Steps over which the pace is measured, and how much slower than undisturbed ones may be to count as recovered.
WINDOW, SLOWER = 5, 3.0
#: Seconds in which some update has to come by to be refused.
_UPDATE_S = 60.0
#: Deadline of a server's answer about itself.
_ANSWER_S = 10.0
#: What the orchestrator says of a server that died, and of one that refused an update.
_DIED, _REFUSED = " died (exit code", " refused weights "
#: Largest |log pi - log mu| of a token of the version before the step that float32 explains.
MISMATCH = 1e-3


@dataclass
class ChaosReport:
    """``found``: the run's account. ``faults``: how many of each kind. ``recovery_s``: kind of each fault, and seconds
    from it until all servers hold weights of the run again and ``WINDOW`` steps went at no less than a ``SLOWER``-th of
    the undisturbed pace. ``mismatch``: the largest of the run over ``compared`` tokens; ``wrong_version``: steps where
    it is beyond ``MISMATCH``. ``deaths`` and ``refusals``: what the orchestrator says that it saw.
    """

    found: Account
    faults: dict[str, int]
    recovery_s: list[tuple[str, float]]
    mismatch: float
    compared: int
    wrong_version: int
    deaths: int
    refusals: int

    @property
    def is_clean(self) -> bool:
        seen = self.deaths >= self.faults.get("killed", 0) + self.faults.get("stopped", 0)
        return self.found.is_clean and self.compared > 0 and not self.wrong_version and seen

    def as_json(self) -> str:
        values = asdict(self)
        return json.dumps({"benchmark": "chaos", **values.pop("found"), **values, "clean": self.is_clean})

    def table(self) -> str:
        injected = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items())) or "none"
        kinds = sorted({kind for kind, _ in self.recovery_s})
        lines = [
            f"{self.found.steps} steps; servers: {injected}; seen: {self.deaths} deaths, {self.refusals} refusals",
            *(f"recovery    {_times(kind, self.recovery_s)}" for kind in kinds),
            *self.found.lines(),
            f"wrong_version {self.wrong_version:>6}",
            f"mismatch    {self.mismatch:8.1e} nats at most, over {self.compared} tokens",
        ]
        return "\n".join(lines)


def _times(kind: str, recovery_s: list[tuple[str, float]]) -> str:
    """Seconds after each fault of ``kind``, as text."""
    seconds = [each for other, each in recovery_s if other == kind]
    each = ", ".join(f"{value:.0f}" for value in seconds)
    return f"{median(seconds):8.1f} s median, {max(seconds):.1f} s at most after {kind} ({each})"


def next_kind(rng: random.Random, made: Counter[str], at_least: int, gone: float) -> str:
    """The kind of the next fault when a share ``gone`` of the time is over: each once, then any; a refused update,
    which costs seconds where a new server costs a minute, while fewer were made than it takes."""
    missing = [kind for kind in FAULTS if not made[kind]]
    if missing:
        return missing[0]
    return "refused" if made.total() < at_least * gone else rng.choice(FAULTS)


def chaos(
    attempts: Attempts, rng: random.Random, *, seconds: float, at_least: int, say: Callable[[str], None]
) -> ChaosReport:
    """Inject faults for ``seconds``, and until ``at_least`` were made, each kind once at least; then stop in order."""
    faults, recovery = Counter[str](), list[tuple[str, float]]()
    attempts.start()
    try:
        attempts.wait_for_a_step()
        began = time.monotonic()
        calm = [_pace(attempts)]
        while len(faults) < len(FAULTS) or faults.total() < at_least or time.monotonic() < began + seconds:
            time.sleep(rng.uniform(0.0, 3.0))
            kind = next_kind(rng, faults, at_least, (time.monotonic() - began) / seconds if seconds else 1.0)
            if not _inject(kind, attempts, rng):
                continue
            injected = time.monotonic()
            faults[kind] += 1
            deaths = sum(faults[other] for other in ("killed", "stopped"))
            calm.append(_recovered(attempts, SLOWER * median(calm), deaths))
            recovery.append((kind, round(time.monotonic() - injected, 2)))
            say(f"{kind} a server; recovered after {recovery[-1][1]:.1f} s, {attempts.rows()} steps")
        assert attempts.process is not None
        attempts.process.send_signal(signal.SIGTERM)
        attempts.end(expected=[128 + signal.SIGTERM])
    finally:
        attempts.stop()
    return _outcome(attempts, faults, recovery)


def _pace(attempts: Attempts) -> float:
    """Seconds of the next ``WINDOW`` steps."""
    started = time.monotonic()
    for _ in range(WINDOW):
        attempts.wait_for_a_step()
    return time.monotonic() - started


def _recovered(attempts: Attempts, limit_s: float, deaths: int) -> float:
    """Wait until ``deaths`` were noticed in all, every server holds weights of the run, and a window takes at most
    ``limit_s`` seconds, which is returned; SoakError when that does not come in ``PATIENCE_S``."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        pace, noticed = _pace(attempts), _orchestrator_log(attempts).count(_DIED)
        if noticed >= deaths and _all_hold_weights(attempts) and pace <= limit_s:
            return pace
        if time.monotonic() > deadline:
            raise SoakError(
                f"not recovered {PATIENCE_S:g} s after a fault: {noticed} of {deaths} deaths were noticed, {WINDOW} "
                f"steps take {pace:.1f} s where {limit_s:.1f} s were expected"
            )


def _all_hold_weights(attempts: Attempts) -> bool:
    """Whether every server answers, and names weights that the run gave it."""
    servers = attempts.members("server")
    try:
        for server in servers:
            with urllib.request.urlopen(_url(server) + MODEL_INFO, timeout=_ANSWER_S) as answer:
                PolicyVersion.parse(str(json.loads(answer.read())["weight_version"]))
    except (OSError, psutil.Error, ValueError):  # not yet: it starts, or it ended just now
        return False
    return len(servers) == load_resolved(attempts.directory.resolved).rollout.servers


def _url(server: psutil.Process) -> str:
    words = server.cmdline()
    return f"http://127.0.0.1:{words[words.index('--port') + 1]}"


def _orchestrator_log(attempts: Attempts) -> str:
    """The orchestrator's log."""
    return attempts.directory.log("orchestrator", 0).read_text(errors="replace")


def _inject(kind: str, attempts: Attempts, rng: random.Random) -> bool:
    """Make one fault; False when there is no server to make it on now."""
    servers = [server for server in attempts.members("server") if server.status() != psutil.STATUS_STOPPED]
    if not servers:
        return False
    server = rng.choice(servers)
    try:
        if kind == "refused":
            return _refuse(server)
        # Of SGLang's processes the HTTP server and the scheduler are chosen: the others end with them.
        parts = [server, *(child for child in server.children() if "scheduler" in " ".join(child.cmdline()))]
        os.kill(rng.choice(parts).pid, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
    except (psutil.Error, ProcessLookupError):
        return False  # it has just ended
    return True


def _refuse(server: psutil.Process) -> bool:
    """End the next update of ``server`` from outside; False when none came by."""
    url = _url(server) + END_WEIGHT_UPDATE
    deadline = time.monotonic() + _UPDATE_S
    while time.monotonic() < deadline:
        request = urllib.request.Request(url, b"{}", {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_UPDATE_S):
                return True  # a session was open
        except urllib.error.HTTPError:
            continue  # 400: none is open now
        except OSError:
            return False  # it has just ended
    return False


def _outcome(attempts: Attempts, faults: Counter[str], recovery: list[tuple[str, float]]) -> ChaosReport:
    rows = read_rows(attempts.directory.metrics)
    log = _orchestrator_log(attempts)
    compared = [row for row in rows if row.get("mismatch/tokens", 0) > 0]
    mismatch = [row["mismatch/max"] for row in compared]
    return ChaosReport(
        found=account(attempts.directory),
        faults=dict(faults),
        recovery_s=recovery,
        mismatch=max(mismatch, default=0.0),
        compared=sum(int(row["mismatch/tokens"]) for row in compared),
        wrong_version=sum(not value <= MISMATCH for value in mismatch),
        deaths=log.count(_DIED),
        refusals=log.count(_REFUSED),
    )
