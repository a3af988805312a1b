"""Weights & Biases get the rows, and a run never notices what goes wrong there. The package is a stand-in."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.messages import assert_names
from tests.orchestrator.fake_run import config
from vcpo_megatron.config.process import ProcessContext
from vcpo_megatron.observability import wandb_sink
from vcpo_megatron.observability.wandb_sink import WandbRun, WandbSink


class Wandb(types.ModuleType):
    """Keeps what it is given; ``fails`` names the calls that raise, ``hangs`` those that wait for ``released``."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[str, Any]] = []
        self.fails: dict[str, BaseException] = {}
        self.hangs: set[str] = set()
        self.released = threading.Event()

    def call(self, name: str, value: Any = None) -> None:
        self.calls.append((name, value))
        if name in self.hangs:
            self.released.wait(30)
        if name in self.fails:
            raise self.fails[name]

    def init(self, **arguments: Any) -> Wandb:
        self.call("init", arguments)
        return self

    def Settings(self, **arguments: Any) -> dict[str, Any]:
        return arguments

    def define_metric(self, name: str, step_metric: str = "") -> None:
        self.call("define_metric", (name, step_metric))

    def log(self, row: dict[str, Any]) -> None:
        self.call("log", row)

    def finish(self) -> None:
        self.call("finish")

    def given(self, name: str) -> list[Any]:
        return [value for called, value in self.calls if called == name]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def sink(tmp_path: Path, warnings: list[str]) -> Callable[..., WandbSink]:
    def make(close_s: float = 30.0) -> WandbSink:
        run = WandbRun("project", "offline", "3f9a21c0", "first", tmp_path, {"train": {"steps": 3}})
        return WandbSink(run, warn=warnings.append, close_s=close_s)

    return make


def test_rows_in_order(wandb: Wandb, sink: Callable[..., WandbSink], warnings: list[str], tmp_path: Path) -> None:
    one = sink()
    for step in range(3):
        one.write({"step": step, "loss": step / 4, "why": "text", "half\ud83d": 1})
    one.close()
    one.close()
    assert wandb.given("log") == [{"step": step, "loss": step / 4, "half\\ud83d": 1} for step in range(3)]
    assert wandb.calls[-1] == ("finish", None) and one.failures == 0 and warnings == []
    (begun,) = wandb.given("init")
    assert (begun["project"], begun["id"], begun["name"], begun["mode"]) == ("project", "3f9a21c0", "first", "offline")
    assert begun["resume"] == "allow" and begun["dir"] == str(tmp_path) and begun["config"] == {"train": {"steps": 3}}
    assert wandb.given("define_metric") == [("step", ""), ("*", "step")]


@pytest.mark.parametrize("call", ["init", "define_metric", "log", "finish"])
@pytest.mark.parametrize("error", [RuntimeError("no network"), SystemExit(1), KeyError("\n")])
def test_what_fails_is_counted_and_said_once(
    wandb: Wandb, sink: Callable[..., WandbSink], warnings: list[str], call: str, error: BaseException
) -> None:
    wandb.fails[call] = error
    one = sink()
    for step in range(3):
        one.write({"step": step})
    one.close()
    assert one.failures == (3 if call == "log" else 1)
    (line,) = warnings
    assert_names(line, "Weights & Biases", "observability.wandb_project")
    assert "\n" not in line


def test_a_package_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, sink: Callable[..., WandbSink], warnings: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    one = sink()
    one.write({"step": 0})
    one.close()
    assert one.failures == 1 and len(warnings) == 1


@pytest.mark.parametrize("call", ["init", "log"])
def test_a_network_that_hangs_is_left_behind(
    wandb: Wandb,
    sink: Callable[..., WandbSink],
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    monkeypatch.setattr(wandb_sink, "MOST_WAITING", 2)
    wandb.hangs.add(call)
    one = sink(close_s=0.1)
    try:
        for step in range(9):
            one.write({"step": step})  # returns at once
        one.close()
        assert one.failures >= 6 and len(warnings) == 1
    finally:
        wandb.released.set()
        one._thread.join(30)


def test_a_resumed_run_is_the_same_run_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vcpo_megatron.orchestrator.__main__ import wandb_run

    cfg = config(observability={"wandb_project": "project"})
    contexts = [
        ProcessContext(tmp_path / "first", attempt, step, "token", "tcp://host:1", (1,), run="3f9a21c0")
        for attempt, step in ((1, None), (2, 40))
    ]
    first, second = (wandb_run(context, cfg) for context in contexts)
    assert first == second and (first.run_id, first.name, first.mode) == ("3f9a21c0", "first", "online")
    assert first.config["train"]["steps"] == cfg.train.steps
