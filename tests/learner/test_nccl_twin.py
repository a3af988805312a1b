"""The learner's step under NCCL's rules: the same, bit for bit, as in a world of gloo, and no rank waits for ever.

``nccl_twin`` has the rules; what each is worth shows where a mend of the learner is taken out.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.slow import Made
from vcpo_megatron.types import Batch

from .nccl_twin import PROPERTIES
from .scenarios import make_batch, make_config, make_model_folder
from .test_layouts import DEFERRED, ONE_STEP, OVERLAPPED, TWO_PASS, Case
from .world import WorldFailed, run_world

INSIDE = "learner.nccl_twin:inside"
#: Seconds that a rank may wait for another one: far more than a step takes where nothing hangs.
BOUND_S = 60.0

PP, VPP = {"pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2}
MODES: dict[str, dict[str, Any]] = {"accumulate": {}, "deferred": DEFERRED, "two_pass": TWO_PASS}
LAYOUTS = {
    "pp2": Case(2, PP),
    "pp2 tied": Case(2, PP, tied=True),
    "pp2 vpp2": Case(2, VPP),
    "tp2 pp2": Case(4, {"tensor": 2, **PP}),
    "moe ep2 pp2": Case(4, {"expert": 2, **PP}, "moe"),
    "cp2 pp2": Case(4, {"context": 2, **PP}),
    "dp2 overlapped": Case(2, sections=OVERLAPPED),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool, int], Path]:
    root = tmp_path_factory.mktemp("models")
    return Made(lambda kind: make_model_folder(root / "-".join(map(str, kind)), kind[0], tied=kind[1], layers=kind[2]))


@pytest.fixture(scope="module")
def batches(models: dict[tuple[str, bool, int], Path]) -> dict[tuple[str, bool, int], Batch]:
    return Made(lambda kind: make_batch(models[kind]))


def in_twin(ranks: int, function: str, arguments: dict[str, Any], properties: Any = PROPERTIES, **more: Any) -> Any:
    """What ``function`` returns in a world of ``ranks`` with ``properties``."""
    twin = {"properties": list(properties), "bound_s": BOUND_S, "key": uuid.uuid4().hex, **more}
    job = {"function": function, "arguments": arguments, **twin}
    return run_world(ranks, INSIDE, job, timeout_s=4 * BOUND_S)


def steps(case: Case, modes: Any, models: Any, batches: Any) -> dict[str, Any]:
    """Arguments of ``one_step_each``: the layout's step in each mode."""
    kind = (case.family, case.tied, 4 if "virtual_pipeline" in case.parallel else 2)
    configs = [make_config(models[kind], case.ranks, parallel=case.parallel, **case.sections, **m) for m in modes]
    return {"cases": [(config, [batches[kind]]) for config in configs]}


def assert_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Results but for times, gradients and parameters, to the last bit."""
    for one, other in zip(found, expected, strict=True):
        for ours, theirs in zip(one["results"], other["results"], strict=True):
            assert repr(ours.trajectories) == repr(theirs.trajectories) and not ours.skipped  # nan equals nan
            assert _untimed(ours.metrics) == _untimed(theirs.metrics)
        for table in ("gradients", "parameters"):
            assert one[table].keys() == other[table].keys()
            assert all(torch.equal(one[table][name], other[table][name]) for name in one[table])


def _untimed(metrics: Any) -> str:
    return repr({name: value for name, value in metrics.items() if not name.startswith("time/")})


@pytest.mark.timeout(300)
def test_a_pipeline_with_tied_embeddings_takes_the_same_step(models: Any, batches: Any) -> None:
    """All properties at once; sums are accumulated."""
    arguments = steps(LAYOUTS["pp2 tied"], [MODES["accumulate"]], models, batches)
    assert_alike(in_twin(2, ONE_STEP, arguments), run_world(2, ONE_STEP, arguments))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_takes_the_same_step_in_every_mode(name: str, models: Any, batches: Any) -> None:
    arguments = steps(LAYOUTS[name], MODES.values(), models, batches)
    ranks = LAYOUTS[name].ranks
    assert_alike(in_twin(ranks, ONE_STEP, arguments), run_world(ranks, ONE_STEP, arguments))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PROPERTIES)
def test_one_property_alone(name: str, models: Any, batches: Any) -> None:
    """What the others would hide."""
    arguments = steps(LAYOUTS["pp2 tied"], [MODES["accumulate"]], models, batches)
    assert_alike(in_twin(2, ONE_STEP, arguments, [name]), run_world(2, ONE_STEP, arguments))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_weights_are_sent(models: Any, tmp_path: Path) -> None:
    """Six versions to a group of servers, of a pipeline's shards."""
    config = make_config(models["qwen2", True, 2], 2, parallel=PP, rollout={"sync": "distributed"})
    (found,) = in_twin(2, "learner.run_weights:send_each", {"cases": [config], "run_dir": str(tmp_path)})
    assert found["last"].keys() == found["tensors"].keys()
    for name, tensor in found["tensors"].items():
        assert not torch.equal(found["last"][name], tensor)  # each version is one further on


@pytest.mark.timeout(300)
def test_the_twin_refuses_what_hangs_on_nccl() -> None:
    """Each property by itself, and nothing of it where it is left out or, if it is one of groups, on gloo's."""
    found = run_world(2, "learner.run_twin:shows", {"key": uuid.uuid4().hex})
    group = "the group of ranks [0, 1]"
    said = {
        "synchronize": f"Hang: torch.cuda.synchronize() at .*waits for this: rank 0: recv 1 in {group}.*not done after",
        "lazy": f"Hang: rank 0: the communicator of pair [0, 1] in {group}.*its ranks [1] have not come after 1 s",
        "ahead": "DeviceBarrier: rank 0: torch.cuda.synchronize() at .*in a schedule",
        "start": f"LateCommunicator: rank 0: the communicator of group [0, 1] in {group}.*is not made at the start",
        "ordered": f"Hang: rank 0: allreduce in {group}.*not done after 1 s",
        "allocate": f"Hang: memory of the device, allocated at .*waits for this: rank 0: recv 1 in {group}.*not done",
        "device": "HostTensor: allreduce at .*in a group of the device: a tensor [2] of the host",
    }
    for name, pattern in said.items():
        start, *rest = pattern.split(".*")
        assert found[name]["with"].startswith(start), found[name]
        assert all(part in found[name]["with"] for part in rest), found[name]
        assert found[name]["without"] == "" and (name == "ahead" or found[name]["gloo"] == ""), found[name]


TAKEN_OUT = {
    "connect_nothing": "LateCommunicator: ",
    "exchange_on_the_device": "HostTensor: ",
    "norms_on_the_device": "Hang: memory of the device, allocated at pipeline_parallel/p2p_communication.py",
    "ask_for_shapes": "DeviceBarrier: ",
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TAKEN_OUT)
def test_without_a_mend_the_step_hangs(name: str, models: Any, batches: Any) -> None:
    """And the world says where its ranks stand."""
    arguments = steps(LAYOUTS["pp2 tied"], [MODES["accumulate"]], models, batches)
    with pytest.raises(WorldFailed) as failed:
        in_twin(2, ONE_STEP, arguments, bound_s=8.0, before=f"learner.run_twin:{name}")
    assert TAKEN_OUT[name] in str(failed.value)
