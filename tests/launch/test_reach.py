"""Servers on other hosts are told an address that they reach, and a launcher's variables are not a run's."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.launch.reach import foreign_variables, foreign_variables_note, reach_problems

FAR, OTHER = "http://10.255.255.1:30000", "http://node7:30000"
HERE = f"http://{socket.gethostname()}:30000"


def config(addresses: tuple[str, ...], sync: str, address: str | None) -> RunConfig:
    sections: dict[str, Any] = {
        "model": {"path": "/m"},
        "train": {"steps": 1},
        "environment": {"name": "e"},
        "rollout": {"engine": "sglang", "addresses": addresses, "sync": sync},
        "launch": {"address": address},
    }
    return RunConfig.model_validate(sections)


@pytest.mark.parametrize(
    ("addresses", "sync", "gpus", "address", "named"),
    [
        ((FAR,), "distributed", (), None, f"launch.address is not set: {FAR} would look"),
        ((OTHER, HERE, FAR), "auto", ("0",), None, f"launch.address is not set: {OTHER}, {FAR} would look"),
        ((FAR,), "distributed", (), "127.0.0.1", f'launch.address = "127.0.0.1": {FAR} would look'),
        ((FAR,), "distributed", (), "localhost", f'launch.address = "localhost": {FAR} would look'),
        ((FAR,), "distributed", (), "::1", f'launch.address = "::1": {FAR} would look'),
        ((FAR,), "distributed", (), "0.0.0.0", f'launch.address = "0.0.0.0": {FAR} would look'),
        ((FAR,), "distributed", (), "10.1.2.3", ""),
        ((FAR,), "distributed", ("0",), "trainer", ""),
        ((FAR,), "auto", (), None, ""),  # over HTTP, from CPUs
        ((FAR,), "tensor", ("0",), None, ""),
        ((FAR,), "disk", ("0",), None, ""),
        (("http://127.0.0.1:1", "http://localhost:2", "http://[::1]:3", HERE), "distributed", ("0",), None, ""),
        ((), "distributed", ("0",), None, ""),
        (("http://[",), "distributed", ("0",), None, ""),  # no address: said by another check
    ],
)
def test_who_would_look_for_the_learner_on_their_own_host(
    addresses: tuple[str, ...], sync: str, gpus: tuple[str, ...], address: str | None, named: str
) -> None:
    found = list(reach_problems(config(addresses, sync, address), gpus))
    assert [line.startswith(named) for line in found] == ([True] if named else [])
    assert all("launch.address" in line and "set it to" in line for line in found)


def test_variables_of_a_launcher_around_the_run() -> None:
    ours = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "NCCL_SOCKET_IFNAME": "eth0", "VCPO_RUN": "3f9a21c0"}
    theirs = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert foreign_variables(ours | theirs) == sorted(theirs)
    assert foreign_variables_note(ours) is None
    said = foreign_variables_note(ours | theirs | {"MASTER_ADDR": "10.1.2.3"})
    assert said is not None and "MASTER_ADDR=10.1.2.3: set launch.address" in said and "LOCAL_RANK" in said
