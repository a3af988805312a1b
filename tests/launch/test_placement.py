"""Which processes a run has, and what each gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.messages import assert_names
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.launch.devices import installed_gpus
from vcpo_megatron.launch.placement import PlacementError, Process, plan_local


def config(**sections: Any) -> RunConfig:
    base = {"model": {"path": "/m"}, "train": {"steps": 1}, "environment": {"name": "e"}}
    return RunConfig.model_validate({**base, **sections})


def test_the_smallest_run_on_cpus() -> None:
    plan = plan_local(config())
    assert plan.processes == (
        Process("orchestrator", 0, "127.0.0.1", (), 0, Path("logs/orchestrator.0.log")),
        Process("environment", 0, "127.0.0.1", (), None, Path("logs/environment.0.log")),
        Process("environment", 1, "127.0.0.1", (), None, Path("logs/environment.1.log")),
        Process("learner", 0, "127.0.0.1", (), 0, Path("logs/learner.0.log")),
        Process("server", 0, "127.0.0.1", (), 0, Path("logs/server.0.log")),
    )


def test_ports_follow_the_configuration() -> None:
    plan = plan_local(
        config(
            launch={"learner_ranks": 3, "control_port": 4000, "master_port": 4001}, rollout={"servers": 2, "port": 5000}
        )
    )
    assert plan.orchestrator.port == 4000
    assert [process.port for process in plan.learners] == [4001, None, None]
    assert [process.port for process in plan.servers] == [5000, 5001]
    assert [process.rank for process in plan.learners] == [0, 1, 2]


def test_learner_and_servers_share_no_gpu() -> None:
    plan = plan_local(config(launch={"learner_ranks": 2}, rollout={"servers": 2}), gpus=["3", "5", "6", "7", "8"])
    assert [process.devices for process in plan.processes] == [(), (), (), ("3",), ("5",), ("6",), ("7",)]


def test_a_server_of_several_gpus_has_them_for_itself() -> None:
    sglang = {"engine": "sglang", "python": "/p", "servers": 2, "tensor_parallel": 2}
    plan = plan_local(config(rollout=sglang), gpus=["0", "1", "2", "3", "4", "5"])
    assert [process.devices for process in plan.processes] == [(), (), (), ("0",), ("1", "2"), ("3", "4")]
    with pytest.raises(PlacementError, match="servers = 2 .* 5 GPUs, 4 visible"):
        plan_local(config(rollout=sglang), gpus=["0", "1", "2", "3"])


def test_joined_servers_are_no_processes_of_the_run() -> None:
    plan = plan_local(config(rollout={"engine": "sglang", "addresses": ["http://a:1", "http://b:1"]}), gpus=["0"])
    assert plan.servers == () and plan.learners[0].devices == ("0",)


def test_too_few_gpus() -> None:
    with pytest.raises(PlacementError) as caught:
        plan_local(config(launch={"learner_ranks": 2}, rollout={"servers": 2}), gpus=["0", "1", "2"])
    assert_names(caught.value, "learner_ranks = 2", "rollout.servers = 2", "4 GPUs", "3 visible")


def test_a_replay_has_no_servers() -> None:
    plan = plan_local(config(rollout={"engine": "replay", "replay": "/r", "servers": 4}), gpus=["0"])
    assert plan.servers == () and plan.learners[0].devices == ("0",)


@pytest.mark.parametrize(
    ("hidden", "expected"),
    [(None, ("0", "2", "10")), ("", ()), ("-1", ()), ("2, 0", ("2", "0")), ("GPU-4f", ("GPU-4f",))],
)
def test_gpus_that_the_driver_shows(tmp_path: Path, hidden: str | None, expected: tuple[str, ...]) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia10", "nvidia0", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    environ = {} if hidden is None else {"CUDA_VISIBLE_DEVICES": hidden}
    assert installed_gpus(environ, tmp_path) == expected


def test_no_driver(tmp_path: Path) -> None:
    assert installed_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path) == ()


def test_the_table_has_a_line_a_process() -> None:
    plan = plan_local(config(launch={"control_port": 4000}, rollout={"tensor_parallel": 1}), gpus=["3", "5"])
    assert [line.split() for line in plan.table(Path("r")).splitlines()] == [
        ["role", "rank", "host", "devices", "port", "log"],
        ["orchestrator", "0", "127.0.0.1", "cpu", "4000", "r/logs/orchestrator.0.log"],
        ["environment", "0", "127.0.0.1", "cpu", "-", "r/logs/environment.0.log"],
        ["environment", "1", "127.0.0.1", "cpu", "-", "r/logs/environment.1.log"],
        ["learner", "0", "127.0.0.1", "gpu", "3", "any", "free", "r/logs/learner.0.log"],
        ["server", "0", "127.0.0.1", "gpu", "5", "any", "free", "r/logs/server.0.log"],
    ]
