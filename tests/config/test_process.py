"""What the launcher sets is what the child reads."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from vcpo_megatron.config.load import dump_resolved
from vcpo_megatron.config.process import ProcessContext
from vcpo_megatron.config.schema import RunConfig

CONTEXT = ProcessContext(
    run_dir=Path("/runs/a b"),
    attempt=3,
    resume_step=20,
    token="0123abcd",
    control="tcp://127.0.0.1:29500",
    server_ports=(30000, 30001),
    server_devices=("2", "3"),
    run="3f9a21c0",
    learner_devices=("0", "1"),
)


def test_variables_are_what_the_documentation_says() -> None:
    assert CONTEXT.environment() == {
        "VCPO_RUN_DIR": "/runs/a b",
        "VCPO_ATTEMPT": "3",
        "VCPO_RESUME_STEP": "20",
        "VCPO_RUN_TOKEN": "0123abcd",
        "VCPO_CONTROL": "tcp://127.0.0.1:29500",
        "VCPO_SERVER_PORTS": "30000,30001",
        "VCPO_SERVER_DEVICES": "2,3",
        "VCPO_RUN": "3f9a21c0",
        "VCPO_LEARNER_DEVICES": "0,1",
    }


@pytest.mark.parametrize(
    "changes",
    [{}, {"resume_step": None}, {"resume_step": 0}, {"server_ports": (), "server_devices": (), "learner_devices": ()}],
)
def test_round_trip(changes: dict) -> None:
    context = dataclasses.replace(CONTEXT, **changes)
    assert ProcessContext.from_environment(context.environment()) == context


def test_reads_this_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CONTEXT.environment().items():
        monkeypatch.setitem(os.environ, name, value)
    assert ProcessContext.from_environment() == CONTEXT


@pytest.mark.parametrize("name", CONTEXT.environment())
def test_missing_variable_is_named(name: str) -> None:
    environment = CONTEXT.environment()
    del environment[name]
    with pytest.raises(KeyError, match=name):
        ProcessContext.from_environment(environment)


def test_configuration_is_the_one_of_the_run_directory(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {"model": {"path": Path("/model")}, "train": {"steps": 7}, "environment": {"name": "countdown"}}
    )
    context = dataclasses.replace(CONTEXT, run_dir=tmp_path)
    context.directory.resolved.write_text(dump_resolved(config))
    assert context.config() == config
