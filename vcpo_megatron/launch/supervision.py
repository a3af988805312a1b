"""Following the processes of a run to the end of the first one that decides it.

    consumes    exit codes of the orchestrator and the learner ranks (polled), signals to this process
    produces    an ``Ending``: exit code and, unless all went well, one line that says what happened
    waits for   the orchestrator's end; learner ranks at most 15 s after it; the orchestrator at most
                ``timeout_s`` after a signal or after a learner rank's orderly end
    unblocked by  any process's death, a second signal

SIGUSR1 is a batch system's warning that time is nearly over, and ``Supervisor``'s time limit is the same from within:
a stop like that of SIGTERM. It is no first signal: the SIGTERM that follows it does not cut the checkpoint short.

Whatever the ending, nothing started here is alive when ``Supervisor.run`` returns: process groups get SIGKILL, and
what left its group is found among this process's descendants. The kernel hands orphans to the nearest ancestor
that asked for them (PR_SET_CHILD_SUBREAPER), so descendants cannot escape by losing their parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..config.process import ENDED_BY_ORCHESTRATOR
from ..transport.child import last_error, reap_adopted, signal_group

POLL_S = 0.05
#: Learner ranks get this long to end after the orchestrator did.
LEARNER_GRACE_S = 15.0
#: After a first death: how long others' deaths are collected, to name the cause and not its consequence.
SETTLE_S = 1.0
#: How long the orchestrator, which ends its servers first, is waited for when a rank says that it ended the run.
ORIGIN_S = 15.0
_KILL_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass
class Child:
    """A started process of the run. ``ended_at`` (monotonic seconds) is when its end was seen."""

    role: str
    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    ended_at: float | None = None

    @property
    def name(self) -> str:
        return self.role if self.role == "orchestrator" else f"{self.role} rank {self.rank}"

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -N after signal N."""
        return self.process.returncode

    def describe(self) -> str:
        """One line for the user: how it ended, its log and its last message."""
        code = self.exit_code
        how = "still runs" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"ended with signal {_signal_name(-code)}"
        message = last_error(self.log)
        return f"{self.name} {how}; log: {self.log}" + (f"; last message: {message}" if message else "")

    def ended_by_orchestrator(self) -> bool:
        """Whether a learner rank failed only because the orchestrator, which has the reason, had ended the run."""
        return self.role == "learner" and ENDED_BY_ORCHESTRATOR in (last_error(self.log) or "")


@dataclass(frozen=True, slots=True)
class Ending:
    """``exit_code`` for the shell; ``error`` is one line, None when the run ended well or by a signal as asked.

    ``stopped_by`` is the signal that asked for the end, if any. ``warnings``: lines that change no exit code.
    """

    exit_code: int
    error: str | None = None
    stopped_by: str | None = None
    warnings: tuple[str, ...] = ()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)  # a real-time signal


@contextlib.contextmanager
def caught_signals() -> Iterator[list[int]]:
    """A list that grows by each SIGINT, SIGTERM, SIGHUP and SIGUSR1; the former handlers come back at the end.

    Once a signal has come they do not: the process is about to exit with that signal's code, and another signal
    while it says so must not change it.
    A signal that is ignored from outside (SIGHUP under nohup, say) stays so; SIGINT and SIGTERM are always caught.
    """
    received: list[int] = []
    former = {}
    for signum in _STOP_SIGNALS:
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            former[signum] = signal.signal(signum, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for signum, handler in former.items():
            signal.signal(signum, signal.SIG_IGN if received else handler)


@contextlib.contextmanager
def no_orphans() -> Iterator[None]:
    """Adopt orphaned descendants meanwhile; at the end kill all that were started meanwhile, and reap them."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _kill_descendants(except_for=before)
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _kill_descendants(*, except_for: set[int]) -> None:
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        left = [child for child in psutil.Process().children(recursive=True) if child.pid not in except_for]
        if not left:
            return
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(left, timeout=1.0)  # reaps those that are this process's children by now


class Supervisor:
    """Follows one orchestrator and its learner ranks. ``watch`` is called at every poll (progress, for one).

    ``max_hours``: time after which the run is stopped as by SIGUSR1; ``signals`` then gets one.
    """

    def __init__(
        self,
        children: Sequence[Child],
        signals: list[int],
        *,
        timeout_s: float,
        max_hours: float | None = None,
        watch: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._children = list(children)
        self._orchestrator = next(child for child in children if child.role == "orchestrator")
        self._learners = [child for child in children if child.role == "learner"]
        self._signals = signals
        self._timeout_s = timeout_s
        self._watch = watch
        self._say = say
        self._stop_asked_at: float | None = None
        self._max_hours = max_hours
        self._started_at = time.monotonic()
        self._time_is_over = False

    def run(self) -> Ending:
        """Block until the run is decided; then everything is dead."""
        try:
            return self._follow()
        finally:
            self._kill_all()

    def _follow(self) -> Ending:
        while True:
            self._poll()
            if self._is_urgent():
                return self._killed()
            self._look_at_the_clock()
            if self._signals and self._stop_asked_at is None:
                self._ask_to_stop()
            if any(self._failed(child) for child in self._children):
                return self._failure()
            if self._orchestrator.ended_at is not None:
                return self._finish()
            if (overdue := self._overdue()) is not None:
                return Ending(1, overdue)
            self._watch()
            time.sleep(POLL_S)

    def _poll(self) -> None:
        for child in self._children:
            if child.ended_at is None and child.process.poll() is not None:
                child.ended_at = time.monotonic()
        reap_adopted()

    def _failed(self, child: Child) -> bool:
        if child.exit_code in (None, 0):
            return False
        # The signal that we passed on, before the orchestrator could listen for it: it stopped as asked.
        return not (child is self._orchestrator and self._stop_asked_at and child.exit_code == -signal.SIGTERM)

    # --- signals ---

    def _is_urgent(self) -> bool:
        """Whether a second signal was sent; a warning is none."""
        return len([number for number in self._signals if number != signal.SIGUSR1]) > 1

    def _look_at_the_clock(self) -> None:
        if self._max_hours is not None and not self._signals:
            self._time_is_over = time.monotonic() - self._started_at > 3600 * self._max_hours
            if self._time_is_over:
                self._signals.append(signal.SIGUSR1)

    def _ask_to_stop(self) -> None:
        """To the orchestrator alone, not its group: environments go on until it ends them."""
        self._stop_asked_at = time.monotonic()
        self._say(
            f"{self._stopped()}: stopping after the current step, or in it (launch.grace_s); once more: stop at once"
        )
        if self._orchestrator.exit_code is None:
            self._orchestrator.process.send_signal(signal.SIGTERM)

    def _stopped(self) -> str | None:
        if self._time_is_over:
            return f"--max-hours {self._max_hours:g}"
        return _signal_name(self._signals[0]) if self._signals else None

    def _killed(self) -> Ending:
        self._kill_all()
        return Ending(128 + self._signals[0], stopped_by=self._stopped())

    # --- endings ---

    def _overdue(self) -> str | None:
        """Why the wait for the orchestrator is over, if it is."""
        now, limit = time.monotonic(), f"{self._timeout_s:g} s (launch.timeout_s)"
        if self._stop_asked_at is not None and now - self._stop_asked_at > self._timeout_s:
            return f"orchestrator did not end within {limit} of {self._stopped()} and was killed; log: {self._log}"
        for learner in self._learners:
            if learner.ended_at is not None and now - learner.ended_at > self._timeout_s:
                return f"orchestrator did not end within {limit} of {learner.name} and was killed; log: {self._log}"
        return None

    @property
    def _log(self) -> Path:
        return self._orchestrator.log

    def _finish(self) -> Ending:
        """The orchestrator ended well: learner ranks follow within their grace, or are killed."""
        deadline = time.monotonic() + min(LEARNER_GRACE_S, self._timeout_s)
        if self._orchestrator.exit_code != 0:
            deadline = 0.0  # stopped before it had sent the learner anything
        while time.monotonic() < deadline and not self._is_urgent() and self._alive(self._learners):
            time.sleep(POLL_S)
            self._poll()
        late = self._alive(self._learners) if deadline else []
        warnings = [f"{learner.name} did not end after the orchestrator and was killed" for learner in late]
        warnings += [learner.describe() for learner in self._learners if self._failed(learner)]
        self._kill_all()
        code = 128 + self._signals[0] if self._signals else 0
        return Ending(code, stopped_by=self._stopped(), warnings=tuple(warnings))

    def _failure(self) -> Ending:
        """Name the process that failed first, not one that failed because of it."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and not self._is_urgent() and self._alive(self._children):
            time.sleep(POLL_S)
            self._poll()
        culprit = min((child for child in self._children if self._failed(child)), key=_blame)
        if culprit.ended_by_orchestrator():
            culprit = self._origin(culprit)
        error = culprit.describe()  # before the others are killed and write into their logs
        self._kill_all()
        return Ending(2 if culprit.exit_code == 2 else 1, error)

    def _origin(self, rank: Child) -> Child:
        """The one to name in place of ``rank``: the orchestrator, which ended the run, once it has ended itself."""
        deadline = time.monotonic() + min(ORIGIN_S, self._timeout_s)
        while time.monotonic() < deadline and len(self._signals) < 2 and self._alive([self._orchestrator]):
            time.sleep(POLL_S)
            self._poll()
        return self._orchestrator if self._failed(self._orchestrator) else rank

    def _alive(self, children: Sequence[Child]) -> list[Child]:
        return [child for child in children if child.ended_at is None]

    def _kill_all(self) -> None:
        """SIGKILL to every process group, also of those that ended: they may have left something in it."""
        for child in self._children:
            signal_group(child.process, signal.SIGKILL)
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: no signal ends it
                child.process.wait(timeout=_KILL_S)


def _blame(child: Child) -> tuple[bool, float, float]:
    """Sort key, smallest: the likely cause. A signal from outside comes before errors, which follow from it;
    SIGABRT does not count as one, for C++ libraries abort when a peer is gone. Then the earliest death; within
    one poll, whose log was written last the earliest."""
    code = child.exit_code or 0
    by_signal = code < 0 and code != -signal.SIGABRT
    assert child.ended_at is not None
    with contextlib.suppress(OSError):
        return (not by_signal, child.ended_at, child.log.stat().st_mtime)
    return (not by_signal, child.ended_at, 0.0)
