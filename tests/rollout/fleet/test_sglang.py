"""The command line and environment of a SGLang server."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from vcpo_megatron.config.process import ProcessContext
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.orchestrator.peers.servers import embedded_command, make_fleet, sglang_server
from vcpo_megatron.rollout.fleet.sglang import SglangServer
from vcpo_megatron.run.notifier import Notifier

SERVER = SglangServer(Path("/env/bin/python"), Path("/m"), "127.0.0.1", 30000, "bfloat16", 4096, 64)


def options(command: list[str]) -> dict[str, str | None]:
    """Flag -> value; None for a switch."""
    flags = [index for index, word in enumerate(command) if word.startswith("--")]
    following = [command[index + 1] if index + 1 < len(command) else "--" for index in flags]
    return {
        command[index]: None if value.startswith("--") else value for index, value in zip(flags, following, strict=True)
    }


def test_a_server_on_gpus_takes_them_all() -> None:
    server = dataclasses.replace(SERVER, devices=("4", "5"))
    command = server.command()
    assert command[:3] == ["/env/bin/python", "-m", "sglang.launch_server"]
    given = options(command)
    assert (given["--model-path"], given["--port"], given["--tensor-parallel-size"]) == ("/m", "30000", "2")
    assert (given["--dtype"], given["--max-running-requests"]) == ("bfloat16", "64")
    assert given["--context-length"] == "4098"  # SGLang leaves two tokens unused
    assert "--device" not in given
    assert server.environment()["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert "SGLANG_USE_CPU_ENGINE" not in server.environment()
    assert {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}.items() <= server.environment().items()


def test_a_server_on_cpus_sleeps_when_idle_and_bounds_its_cache() -> None:
    given = options(SERVER.command())
    assert given["--device"] == "cpu" and "--sleep-on-idle" in given
    assert given["--max-total-tokens"] == "65536"
    small = options(dataclasses.replace(SERVER, context_length=64, max_running_requests=8).command())
    assert small["--max-total-tokens"] == "512"
    long = options(dataclasses.replace(SERVER, context_length=100000).command())
    assert long["--max-total-tokens"] == "100000"
    assert SERVER.environment()["SGLANG_USE_CPU_ENGINE"] == "1"
    assert SERVER.environment()["CUDA_VISIBLE_DEVICES"] == ""


def test_further_arguments_come_last() -> None:
    command = dataclasses.replace(SERVER, args=("--max-total-tokens", "99")).command()
    assert command[-2:] == ["--max-total-tokens", "99"] and options(command)["--max-total-tokens"] == "99"


def run_config(**rollout: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "/m", "dtype": "bfloat16"},
            "train": {"steps": 1},
            "environment": {"name": "e"},
            "rollout": {"engine": "sglang", "context_length": 32, **rollout},
        }
    )


def context(tmp_path: Path) -> ProcessContext:
    return ProcessContext(tmp_path, 1, None, "t", "tcp://127.0.0.1:1", (5000, 5001), ("0", "1", "2", "3"))


def test_each_server_of_a_run_has_its_own_port_and_gpus(tmp_path: Path) -> None:
    config = run_config(python="/p", servers=2, tensor_parallel=2)
    first, second = (sglang_server(context(tmp_path), config, index) for index in range(2))
    assert (first.port, first.devices, second.port, second.devices) == (5000, ("0", "1"), 5001, ("2", "3"))


def test_logits_stay_in_float32_where_the_learners_do(tmp_path: Path) -> None:
    def flags(**model: object) -> tuple[bool, bool]:
        config = run_config(python="/p", args=["--mem-fraction-static", "0.7"])
        config = config.model_copy(update={"model": config.model.model_copy(update=model)})
        server = sglang_server(context(tmp_path), config, 0)
        assert server.command()[-2:] == ["--mem-fraction-static", "0.7"]
        flag = "--enable-fp32-lm-head"
        return flag in server.command(), flag in embedded_command(context(tmp_path), config, 0)

    assert flags() == (True, True)
    assert flags(fp32_lm_head=False) == flags(dtype="float32") == (False, False)


def test_joined_servers_have_their_addresses_and_no_process(tmp_path: Path) -> None:
    config = run_config(addresses=["http://a:1", "http://b:2"])
    fleet = make_fleet(context(tmp_path), config, 10, Notifier())
    assert [(server.client.base_url, server.joined) for server in fleet.servers] == [
        ("http://a:1", True),
        ("http://b:2", True),
    ]
    fleet.launch()
    assert all(server.process is None for server in fleet.servers)
