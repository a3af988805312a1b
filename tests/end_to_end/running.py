"""A real ``vcpo train`` of the shipped example as a child process, watched through its run directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "modular_sum_cpu" / "run.toml"


class Run:
    """One ``vcpo train``. Use as a context manager: whatever is left is killed by pid at the end."""

    def __init__(self, run_dir: Path, *settings: str, resume: bool = False) -> None:
        self.run_dir = run_dir
        command = [sys.executable, "-m", "vcpo_megatron", "train", str(EXAMPLE), "--run-dir", str(run_dir)]
        command += [word for setting in settings for word in ("--set", setting)]
        self.output = run_dir.with_name(run_dir.name + ".out")
        with open(self.output, "a") as output:
            self.process = subprocess.Popen(
                [*command, *(["--resume"] if resume else [])],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.members()
        for process in [psutil.Process(self.process.pid)] if self.process.poll() is None else []:
            process.kill()
        self.process.wait()
        for process in self._seen.values():
            if process.is_running():
                process.kill()

    def members(self) -> dict[str, psutil.Process]:
        """Processes of the run that are alive, by role ("learner 0"); each is remembered."""
        found: dict[str, psutil.Process] = {}
        try:
            descendants = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return {}
        for process in descendants:
            self._seen[process.pid] = process
            try:
                words, environment = process.cmdline(), process.environ()
            except psutil.Error:
                continue
            for module, role in (("learner", "learner"), ("orchestrator", "orchestrator"), ("embedded", "server")):
                if any(word.startswith("vcpo_megatron.") and word.endswith(module) for word in words):
                    found.setdefault(f"{role} {environment.get('RANK', 0) if role == 'learner' else 0}", process)
        return found

    def left_over(self) -> list[str]:
        """Processes of the run, ever seen, that still run."""
        alive = []
        for process in self._seen.values():
            try:
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(f"{process.pid} {' '.join(process.cmdline())}")
            except psutil.Error:
                continue
        return alive

    def wait_for(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.members()
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.text()}"
            assert time.monotonic() < deadline, f"no {what} within {timeout_s} s:\n{self.text()}"
            time.sleep(0.05)

    def has_checkpoint(self) -> bool:
        return any((self.run_dir / "checkpoints").glob("step_*/manifest.json"))

    def wait(self, timeout_s: float) -> int:
        """Exit code; everything that ran on the way is remembered."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            self.members()
            assert time.monotonic() < deadline, f"no end within {timeout_s} s:\n{self.text()}"
            time.sleep(0.1)
        return self.process.returncode

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def text(self) -> str:
        return self.output.read_text()

    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.run_dir)


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_times(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


def without_what_a_crash_changes(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without times and without counts of samples: what was lost with a crash was sampled twice."""
    counted = {"rollouts/generated", "rollouts/dropped"}
    return [{key: value for key, value in row.items() if key not in counted} for row in without_times(rows)]
