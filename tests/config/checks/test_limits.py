"""Numbers that no run can mean, keys that nothing would read, and a start that does not fit are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.config.checks.test_problems import make as make  # noqa: PLC0414 - the fixture
from tests.messages import assert_names
from vcpo_megatron.config.checks.limits import least
from vcpo_megatron.config.checks.problems import problems
from vcpo_megatron.config.checks.start import start_checkpoint
from vcpo_megatron.config.load import written
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.models.folder import read_model
from vcpo_megatron.models.identity import shape_facts
from vcpo_megatron.run.directory import Manifest, RunDirectory

Make = Callable[..., RunConfig]
JOINED = [("rollout.engine", "sglang"), ("rollout.addresses", ("http://a:1", "http://b:1"))]
EXACT = [("staleness.lag", "exact"), ("staleness.max_staleness", 1)]
COSINE = ("optimizer.schedule", "cosine")

#: What is given, and the key that is refused with its value.
BAD: list[tuple[list[tuple[str, Any]], str]] = [
    ([("rollout.bucket_bytes", 1)], "rollout.bucket_bytes = 1: must be at least 1048576 bytes"),
    ([("rollout.bucket_bytes", 2**20 - 1)], "rollout.bucket_bytes = 1048575: must be at least 1048576 bytes"),
    ([("rollout.request_timeout_s", 0.001)], "rollout.request_timeout_s = 0.001: must be at least 1 s"),
    ([("rollout.sync_timeout_s", 0.999)], "rollout.sync_timeout_s = 0.999: must be at least 1 s"),
    ([("rollout.health_interval_s", 0.01)], "rollout.health_interval_s = 0.01: must be at least 0.1 s"),
    ([("launch.timeout_s", 1e-3)], "launch.timeout_s = 0.001: must be at least 1 s"),
    ([("launch.grace_s", 0.5)], "launch.grace_s = 0.5: must be at least 1 s"),
    ([("staleness.wait_s", 0.2)], "staleness.wait_s = 0.2: must be at least 1 s"),
    ([("observability.watchdog_s", 1e-6)], "observability.watchdog_s = 1e-06: must be at least 0.1 s"),
    ([("algorithm.is_threshold", 0.5)], "algorithm.is_threshold = 0.5: every weight would be cut"),
    (
        [("algorithm.method", "grpo"), ("algorithm.ratio_low", 0.2), ("algorithm.ratio_high", 0.28)],
        "algorithm.ratio_high = 0.28: ratio_low and ratio_high bound the ratio itself",
    ),
    (
        [("algorithm.method", "grpo"), ("algorithm.ratio_low", 1.1)],
        "algorithm.ratio_low = 1.1: ratio_low and ratio_high bound the ratio itself",
    ),
    (
        [("staleness.adaptive_ess", 0.3)],
        "staleness.adaptive_ess = 0.3: has no effect, since staleness.adaptive = false",
    ),
    (
        [("algorithm.method", "grpo"), ("algorithm.is_threshold", 4.0)],
        'algorithm.is_threshold = 4.0: has no effect, since method = "grpo" truncates no weight',
    ),
    (
        [("algorithm.method", "rloo"), ("staleness.max_staleness", 0), ("algorithm.is_threshold", 4.0)],
        'algorithm.is_threshold = 4.0: has no effect, since is_level = "none"',
    ),
    ([("algorithm.method", "icepop"), ("algorithm.is_threshold", 4.0)], "algorithm.is_threshold = 4.0: has no effect"),
    ([("optimizer.schedule_steps", 5)], "optimizer.schedule_steps = 5: has no effect, since schedule = "),
    (
        [("train.start_optimizer", True)],
        "train.start_optimizer = true: has no effect, since train.start_from is not set",
    ),
    ([*JOINED, ("rollout.servers", 2)], "rollout.servers = 2: has no effect, since the servers of rollout.addresses"),
    ([*EXACT, ("rollout.servers", 2), ("rollout.sync_wave", 2)], "rollout.sync_wave = 2: has no effect"),
    ([("rollout.sync", "disk"), ("rollout.bucket_bytes", 2**21)], "rollout.bucket_bytes = 2097152: has no effect"),
    ([*EXACT, ("rollout.max_prompt_failures", 5)], "rollout.max_prompt_failures = 5: has no effect"),
    ([*EXACT, ("rollout.max_failure_ratio", 0.9)], "rollout.max_failure_ratio = 0.9: has no effect"),
    ([("environment.fields", {"prompt": "q"})], 'environment.fields = {"prompt": "q"}: has no effect'),
    ([("parallel.expert_dispatcher", "allgather")], 'parallel.expert_dispatcher = "allgather": '),
    (
        [COSINE, ("optimizer.schedule_steps", 4), ("optimizer.warmup_steps", 4)],
        "optimizer.warmup_steps = 4: must be below optimizer.schedule_steps = 4",
    ),
    ([("train.start_from", Path("/nowhere"))], "train.start_from = /nowhere: no such folder"),
    ([("train.start_from", Path("/dev/null"))], "train.start_from = /dev/null: is a file"),
    (
        [("train.start_from", Path("/"))],
        "train.start_from = /: neither a run directory (no checkpoints/) nor a complete",
    ),
]


@pytest.mark.parametrize(("changes", "start"), BAD, ids=[start.partition(":")[0] for _, start in BAD])
def test_one_problem_is_one_line(make: Make, changes: list[tuple[str, Any]], start: str) -> None:
    (problem,) = problems(make(*changes))
    assert problem.startswith(start)


@pytest.mark.parametrize(
    "changes",
    [
        [("rollout.bucket_bytes", 2**20), ("rollout.request_timeout_s", 1.0), ("observability.watchdog_s", 0.1)],
        [("algorithm.is_threshold", 1.0)],
        [("algorithm.is_threshold", float("inf"))],
        [("algorithm.method", "decoupled_ppo"), ("algorithm.is_threshold", 4.0)],
        [("algorithm.method", "tis_token"), ("algorithm.is_threshold", 4.0)],
        [("algorithm.method", "grpo"), ("algorithm.ratio_low", 1.0), ("algorithm.ratio_high", float("inf"))],
        [("staleness.adaptive", True), ("staleness.adaptive_ess", 0.3)],
        [COSINE, ("optimizer.schedule_steps", 100), ("optimizer.warmup_steps", 50)],
        [COSINE, ("optimizer.schedule_steps", 2)],
        JOINED,
        [("staleness.max_staleness", 0), ("rollout.max_prompt_failures", 5)],
    ],
    ids=str,
)
def test_values_at_the_limit_are_allowed(make: Make, changes: list[tuple[str, Any]]) -> None:
    assert problems(make(*changes)) == []


def test_every_deadline_has_a_least() -> None:
    sections = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    keys = {f"{name}.{key}": field for name, model in sections.items() for key, field in model.model_fields.items()}
    timed = {key: field for key, field in keys.items() if key.endswith(("_s", "_bytes"))}
    assert len(timed) >= 10
    for key, field in timed.items():
        bound = least(key)
        assert bound is not None and 0.1 <= bound, key
        assert field.default is None or bound <= field.default, key


# --- what a run starts from -------------------------------------------------------------------


@pytest.fixture
def source(make: Make, tmp_path: Path) -> RunDirectory:
    """A run of the same model with two checkpoints."""
    directory, config = RunDirectory(tmp_path / "source"), make()
    shape = read_model(config.model.path)
    facts = {
        **shape_facts(shape),
        "padded vocabulary": shape.padded_vocabulary(config.model.vocab_multiple),
        "dtype": "float32",
        "parallel.expert > 1": False,
        "weights model.safetensors": "1 bytes",
    }
    for step in (3, 12):
        directory.checkpoint(step).mkdir(parents=True)
        (directory.checkpoint(step) / "data").write_text("tensors")
        learner = {"model": facts}
        manifest = Manifest(
            step=step, attempt=1, version_number=step, learner=learner, orchestrator={}, config=written(config)
        )
        directory.complete(step, manifest)
    return directory


def test_a_run_directory_stands_for_its_newest_checkpoint(make: Make, source: RunDirectory) -> None:
    assert start_checkpoint(source.path) == source.checkpoint(12)
    assert start_checkpoint(source.checkpoint(3)) == source.checkpoint(3)
    for path in (source.path, source.checkpoint(3)):
        assert problems(make(("train.start_from", path))) == []
        assert problems(make(("train.start_from", path), ("train.start_optimizer", True))) == []


def test_a_start_that_does_not_fit_is_one_line(
    make: Make, make_model: Callable[..., Path], source: RunDirectory
) -> None:
    def said(*changes: tuple[str, Any]) -> list[str]:
        return [line for line in problems(make(("train.start_from", source.path), *changes)) if "start_from" in line]

    other = make_model(rms_norm_eps=0.5, rope_parameters={"rope_theta": 123.0, "rope_type": "default"})
    (line,) = said(("model.path", other))
    assert line.startswith(f"train.start_from = {source.path}: ")
    assert_names(line, other, "norm_eps 1e-06", "0.5 now", "rope.theta 10000.0", "123.0 now")
    (line,) = said(("model.vocab_multiple", 16))
    assert_names(line, "(model.vocab_multiple) 128", "16 now")
    assert said(("model.dtype", "bfloat16"), ("optimizer.distributed", True)) == []  # weights alone
    (line,) = said(("train.start_optimizer", True), ("model.dtype", "bfloat16"), ("optimizer.distributed", True))
    assert_names(line, 'model.dtype "float32"', '"bfloat16" now', "optimizer.distributed false")
    assert line.endswith("take the weights alone, with start_optimizer = false")


def test_a_start_that_is_damaged_or_lost_is_named(make: Make, source: RunDirectory) -> None:
    def said(path: Path) -> str:
        (line,) = problems(make(("train.start_from", path)))
        return line

    (source.checkpoint(12) / "data").write_text("torn")
    for path in (source.path, source.checkpoint(12)):
        assert said(path).startswith(f"train.start_from = {path}: ") and "data has 4 bytes, not 7" in said(path)
    assert problems(make(("train.start_from", source.checkpoint(3)))) == []
    (source.checkpoint(3) / "manifest.json").write_text(json.dumps({"step": 3}))
    assert_names(said(source.checkpoint(3)), "damaged", "manifest.json", "no checksum")
    (source.path / "empty" / "checkpoints").mkdir(parents=True)
    assert "the run has no complete checkpoint" in said(source.path / "empty")


def test_a_run_with_a_checkpoint_of_its_own_needs_it_no_more(make: Make) -> None:
    assert problems(make(("train.start_from", Path("/nowhere"))), begins=False) == []
