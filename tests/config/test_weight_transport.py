"""How weights travel is a table of what the configuration says and what the learner runs on."""

from __future__ import annotations

from typing import Any

import pytest

from vcpo_megatron.config.schema import RolloutConfig
from vcpo_megatron.config.weight_transport import WeightTransport, nccl_variables, weight_transport

EMBEDDED: dict[str, Any] = {}
REPLAY: dict[str, Any] = {"engine": "replay", "replay": "/r"}
STARTED: dict[str, Any] = {"engine": "sglang", "python": "/p"}
JOINED: dict[str, Any] = {"engine": "sglang", "addresses": ("http://a:1",)}
WIDE: dict[str, Any] = {"engine": "sglang", "python": "/p", "tensor_parallel": 2}

TENSOR, DISK = WeightTransport("tensor"), WeightTransport("disk")
GLOO, NCCL = WeightTransport("distributed", "gloo"), WeightTransport("distributed", "nccl")

#: engine, learner on GPUs -> what each of rollout.sync = auto, tensor, distributed, disk becomes.
TABLE = [
    (EMBEDDED, False, (TENSOR, TENSOR, GLOO, DISK)),
    (EMBEDDED, True, (TENSOR, TENSOR, GLOO, DISK)),
    (REPLAY, False, (TENSOR, TENSOR, GLOO, DISK)),
    (REPLAY, True, (TENSOR, TENSOR, GLOO, DISK)),
    (STARTED, False, (TENSOR, TENSOR, GLOO, DISK)),
    (STARTED, True, (NCCL, TENSOR, NCCL, DISK)),
    (JOINED, False, (TENSOR, TENSOR, GLOO, DISK)),
    (JOINED, True, (NCCL, TENSOR, NCCL, DISK)),
    (WIDE, False, (GLOO, TENSOR, GLOO, DISK)),
    (WIDE, True, (NCCL, TENSOR, NCCL, DISK)),
]


@pytest.mark.parametrize(("rollout", "learner_on_gpus", "expected"), TABLE)
def test_every_row(rollout: dict[str, Any], learner_on_gpus: bool, expected: tuple[WeightTransport, ...]) -> None:
    found = tuple(
        weight_transport(RolloutConfig.model_validate({**rollout, "sync": sync}), learner_on_gpus=learner_on_gpus)
        for sync in ("auto", "tensor", "distributed", "disk")
    )
    assert found == expected


def test_the_embedded_engine_is_never_offered_nccl() -> None:
    """It refuses any backend but gloo: a run of the README's example on a GPU would end at its first update."""
    for sync in ("auto", "tensor", "distributed", "disk"):
        rollout = RolloutConfig.model_validate({"sync": sync})
        assert weight_transport(rollout, learner_on_gpus=True).backend != "nccl"


def test_both_ends_of_a_broadcast_take_the_same_variables() -> None:
    assert nccl_variables({}) == {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    chosen = nccl_variables({"NCCL_CUMEM_ENABLE": "1", "NCCL_DEBUG": "INFO"})
    assert chosen == {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
