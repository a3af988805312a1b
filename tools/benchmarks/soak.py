"""A run under fire: its processes are killed with SIGKILL at random, it is resumed, and then its account is checked.

The account is the rollout store's alone, but what was trained is compared with ``metrics.jsonl`` as well. A data
position is lost when it was admitted once and is now neither trained, nor failed, nor among what a resume would go on
with; it is duplicated when two groups of it were trained; a violation is a trajectory that was trained at more than
``staleness.max_staleness`` versions, or a row of metrics that is missing or counts wrong.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from vcpo_megatron.config.load import load_resolved
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.observability.sinks import read_rows
from vcpo_megatron.orchestrator.store.store import RolloutStore
from vcpo_megatron.run.directory import RunDirectory

#: Role -> modules, one of which is in its command line.
MODULES = {
    "learner": {"vcpo_megatron.learner"},
    "orchestrator": {"vcpo_megatron.orchestrator"},
    "server": {"vcpo_megatron.rollout.embedded", "sglang.launch_server"},
}
#: A start, with its imports, or an end may take so long.
PATIENCE_S = 600.0


class SoakError(RuntimeError):
    """The run did not do what the soak needs; one line for the user."""


@dataclass
class Account:
    """What the run came to, in trajectories but for ``lost`` and ``duplicated`` (data positions) and ``steps``."""

    steps: int
    generated: int
    trained: int
    dropped: int
    failed: int
    lost: int
    duplicated: int
    violations: int
    reasons: dict[str, int]
    faults: dict[str, int] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        return self.lost == self.duplicated == self.violations == 0

    def as_json(self) -> str:
        faults = sum(self.faults.values())
        return json.dumps({"benchmark": "soak", **asdict(self), "faults": faults, "killed": self.faults})

    def table(self) -> str:
        killed = ", ".join(f"{role} {count}" for role, count in sorted(self.faults.items())) or "none"
        return "\n".join([f"{self.steps} steps; killed: {killed}", *self.lines()])

    def lines(self) -> list[str]:
        """Counts and reasons, one a line."""
        return [
            f"generated   {self.generated:>8}",
            f"trained     {self.trained:>8}",
            f"failed      {self.failed:>8}",
            f"dropped     {self.dropped:>8}",
            *(f"  {count:>8}  {reason}" for reason, count in self.reasons.items()),
            f"lost        {self.lost:>8}",
            f"duplicated  {self.duplicated:>8}",
            f"violations  {self.violations:>8}",
        ]


class Attempts:
    """``vcpo train`` of one run directory, again and again."""

    def __init__(self, config: Path, run_dir: Path, settings: Sequence[str]) -> None:
        self._command = [sys.executable, "-m", "vcpo_megatron", "train", str(config), "--run-dir", str(run_dir)]
        self._settings = [word for setting in settings for word in ("--set", setting)]
        self.directory = RunDirectory(run_dir)
        self._output = run_dir.with_name(run_dir.name + ".out")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """The first attempt, or a resume."""
        again = self.directory.resolved.exists()
        command = [*self._command, *(["--resume"] if again else self._settings)]
        with open(self._output, "ab") as output:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)

    def members(self, role: str) -> list[psutil.Process]:
        """Living processes of ``role``."""
        assert self.process is not None
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if MODULES[role] & set(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue  # it has just ended
        return found

    def rows(self) -> int:
        return len(read_rows(self.directory.metrics))

    def wait_for_a_step(self) -> None:
        """Wait for a row that is new since this attempt cut the metrics back."""
        least = self.rows()

        def look() -> bool:
            nonlocal least
            rows = self.rows()
            least = min(least, rows)
            return rows > least

        self._wait(look, "further step")

    def wait_for_a_checkpoint(self) -> None:
        """Wait for the first one."""
        self._wait(lambda: bool(self.directory.complete_steps()), "checkpoint")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        """SoakError when the run ends, or ``PATIENCE_S`` pass, before ``condition``."""
        assert self.process is not None
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SoakError(f"no {what}, exit code {self.process.poll()}; see {self._output}")
            time.sleep(0.05)

    def end(self, *, expected: Sequence[int]) -> None:
        """Wait for the end."""
        assert self.process is not None
        code = self.process.wait(timeout=PATIENCE_S)
        if code not in expected:
            raise SoakError(f"the run ended with exit code {code}, not {expected}; see {self._output}")

    def stop(self) -> None:
        """Kill what is left, by pid."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def soak(
    attempts: Attempts, rng: random.Random, *, seconds: float, victims: Sequence[str], say: Callable[[str], None]
) -> Counter[str]:
    """Kill and resume for ``seconds``, at least until each of ``victims`` was killed once, then stop in order."""
    deadline, faults, waiting = time.monotonic() + seconds, Counter[str](), list(victims)
    attempts.start()
    try:
        attempts.wait_for_a_checkpoint()
        while waiting or time.monotonic() < deadline:
            attempts.wait_for_a_step()
            time.sleep(rng.uniform(0.0, 3.0))
            role = waiting.pop(0) if waiting else rng.choice(list(MODULES))
            alive = attempts.members(role)
            if not alive:
                continue
            rng.choice(alive).kill()
            faults[role] += 1
            say(f"killed {role} after {attempts.rows()} steps")
            if role != "server":  # a server is restarted within the run
                attempts.end(expected=[1])
                attempts.start()
        attempts.wait_for_a_step()
        assert attempts.process is not None
        attempts.process.send_signal(signal.SIGTERM)
        attempts.end(expected=[128 + signal.SIGTERM])
    finally:
        attempts.stop()
    return faults


def account(directory: RunDirectory) -> Account:
    """Check a run that has ended."""
    config = load_resolved(directory.resolved)
    with tempfile.TemporaryDirectory(prefix="vcpo-soak-") as folder:
        copy = Path(folder) / directory.store.name
        for file in directory.path.glob(f"{directory.store.name}*"):
            shutil.copyfile(file, Path(folder) / file.name)
        with RolloutStore(copy) as store:
            counts, reasons = store.counts(), store.reasons()
            groups = store._rows("SELECT cursor_index, state, step FROM groups")
            trained = Counter(row["cursor_index"] for row in groups if row["state"] == "trained")
            beyond = sum(
                not 0 <= row["staleness"] <= config.staleness.max_staleness
                for row in store.history()
                if row["state"] == "trained"
            )
            plan = store.resume(store.steps_done(), keep_partial=True)
            failed = {row["cursor_index"] for row in groups if row["state"] == "failed"}
            known = {*trained, *plan.cursors.values(), *plan.requeue, *failed}
            lost = len(set(range(plan.next_cursor)) - known)
    return Account(
        steps=plan.step,
        generated=counts.generated,
        trained=counts.trained,
        dropped=counts.dropped,
        failed=counts.failed,
        lost=lost,
        duplicated=sum(count > 1 for count in trained.values()),
        violations=beyond + _wrong_rows(directory, config, plan.step, counts.trained),
        reasons=reasons,
    )


def _wrong_rows(directory: RunDirectory, config: RunConfig, steps: int, trained: int) -> int:
    """Rows that are missing or too many, and whether the last does not count what the store holds."""
    rows = read_rows(directory.metrics)
    skipped = sum(int(row["step/skipped"]) for row in rows)
    expected = (steps - skipped) * config.train.groups_per_update * config.train.group_size
    wrong = {row["step"] for row in rows} ^ set(range(steps))
    return len(wrong) + (trained != expected) + bool(rows and rows[-1]["rollouts/trained"] != trained)


def environment() -> None:
    """One thread a process, and no GPU: the soak is of the machinery."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
