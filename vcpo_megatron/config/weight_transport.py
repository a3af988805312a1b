"""How weights get to the servers of a run, and by which of torch's backends where they are broadcast.

    rollout.sync    learner    rollout.engine        transport     backend
    tensor          any        any                   tensor        -
    disk            any        any                   disk          -
    distributed     GPUs       sglang                distributed   nccl
    distributed     GPUs       embedded, replay      distributed   gloo: the embedded engine computes on CPUs
    distributed     CPUs       any                   distributed   gloo
    auto            GPUs       sglang                distributed   nccl
    auto            GPUs       embedded, replay      tensor        -
    auto            CPUs       any, of one rank      tensor        -
    auto            CPUs       sglang, of several    distributed   gloo: a bucket over HTTP is for one rank

Servers that a run starts have GPUs where its learner has; joined ones are taken to, and a joined one that says that it
runs on CPUs is refused where NCCL was chosen (weight_sync/distributed/orchestrator.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .schema import RolloutConfig

#: Variables of NCCL that both ends of a broadcast need alike -> what SGLang's servers get where they are unset.
_ALIKE = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


@dataclass(frozen=True, slots=True)
class WeightTransport:
    """``name`` is one of ``rollout.sync``; ``backend``: None where nothing is broadcast."""

    name: Literal["tensor", "distributed", "disk"]
    backend: Literal["nccl", "gloo"] | None = None


def weight_transport(rollout: RolloutConfig, *, learner_on_gpus: bool) -> WeightTransport:
    """The row of the table above for ``rollout``."""
    nccl = learner_on_gpus and rollout.engine == "sglang"
    name = rollout.sync
    if name == "auto":
        name = "distributed" if nccl or rollout.tensor_parallel > 1 else "tensor"
    if name != "distributed":
        return WeightTransport(name)
    return WeightTransport(name, "nccl" if nccl else "gloo")


def nccl_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables for the two ends of a broadcast over NCCL: the user's where they are set, else SGLang's own.

    SGLang 0.5.23 sets them in its servers alone (``_set_envs_and_config``) and keeps what it finds; without them the
    other end would take NCCL's own defaults.
    """
    return {name: environ.get(name, value) for name, value in _ALIKE.items()}
