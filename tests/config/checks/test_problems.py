"""Cross-section checks: each refuses exactly what it says, and all are reported together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.messages import assert_names, assert_said, cases
from tests.models.test_shape import DEEPSEEK_V3
from vcpo_megatron.config.checks.problems import problems
from vcpo_megatron.config.checks.servers import installed_sglang
from vcpo_megatron.config.fused_kernels import InstalledKernels
from vcpo_megatron.config.precision import with_dtype
from vcpo_megatron.config.schema import RunConfig


@pytest.fixture
def make(model_folder: Path) -> Callable[..., RunConfig]:
    """make(("section.key", value), ...): a configuration that runs, but for these keys."""

    def build(*changes: tuple[str, Any]) -> RunConfig:
        data: dict[str, dict[str, Any]] = {
            "model": {"path": model_folder},
            "train": {"steps": 10, "groups_per_step": 4, "group_size": 4},
            "rollout": {"max_new_tokens": 8},
            "environment": {"name": "modular_sum"},
        }
        for key, value in changes:
            section, _, name = key.partition(".")
            data.setdefault(section, {})[name] = value
        return with_dtype(RunConfig.model_validate(data))

    return build


def test_a_good_configuration_has_none(make: Callable[..., RunConfig]) -> None:
    assert problems(make()) == []
    assert problems(make(("parallel.tensor", 2), ("parallel.pipeline", 2), ("launch.learner_ranks", 8))) == []


GOOD_LIMITS = [
    [("train.groups_per_step", 2), ("launch.learner_ranks", 2)],
    [("rollout.max_running_requests", 4)],
    [("rollout.max_new_tokens", 63)],
    [("train.max_pack_tokens", 9)],
    [("rollout.servers", 20)],
    [("optimizer.warmup_steps", 9)],
    [("algorithm.base_ess_ratio", 1e-9)],
    [("algorithm.base_ess_ratio", "auto")],
    [("algorithm.is_level", "none"), ("staleness.max_staleness", 0)],
    [("algorithm.is_level", "none"), ("algorithm.allow_uncorrected", True)],
    [("algorithm.method", "rloo"), ("algorithm.allow_uncorrected", True)],
    [("algorithm.method", "grpo"), ("algorithm.kl_coef", 0.1), ("algorithm.kl_reference", "initial")],
    [("algorithm.baseline", "opob_leave_one_out"), ("algorithm.opob_mode", "two_pass")],
    [("algorithm.method", "tis_token"), ("algorithm.baseline", "opob")],
    [
        ("algorithm.method", "grpo"),
        ("algorithm.record_norms", True),
        ("algorithm.ratio_high", 1.3),
        ("algorithm.ess_scaling", True),
        ("algorithm.ess_rule", "linear"),
        ("algorithm.base_ess_ratio", 0.5),
    ],
    [
        ("algorithm.method", "icepop"),
        ("algorithm.ratio_low", 0.1),
        ("algorithm.baseline", "opob"),
        ("algorithm.opob_mode", "deferred"),
        ("algorithm.opob_accumulators", 2),
    ],
    [("algorithm.is_level", "turn"), ("algorithm.is_threshold_length", 1)],
    [("algorithm.method", "mis"), ("algorithm.is_threshold_length", 512)],
    *(
        [("algorithm.is_level", "turn"), ("algorithm.opob_mode", mode)]
        for mode in ("accumulate", "deferred", "two_pass", "proxy")
    ),
    [("algorithm.method", "icepop"), ("algorithm.is_level", "turn")],
    [("algorithm.mismatch", "recorded"), ("algorithm.mismatch_threshold", 1.0)],
    [("algorithm.mismatch", "recorded"), ("algorithm.is_level", "token")],
    [("algorithm.mismatch", "recorded"), ("algorithm.is_level", "turn"), ("algorithm.is_threshold_length", 512)],
    [("algorithm.mismatch", "recorded"), ("algorithm.method", "vcpo_plus"), ("staleness.adaptive", True)],
    [("algorithm.mismatch", "recorded"), ("algorithm.method", "tis_token"), ("algorithm.record_norms", True)],
    [("algorithm.mismatch", "recorded"), ("train.updates_per_batch", 2), ("train.steps", 8)],
    [("algorithm.mismatch", "recorded"), ("algorithm.method", "mis"), ("algorithm.behavior_anchor", 0.1)],
    [("algorithm.method", "m2po"), ("algorithm.second_moment", 0.1)],
    [("train.updates_per_batch", 4), ("train.steps", 8), ("train.eval_every", 4), ("staleness.max_staleness", 3)],
    [("algorithm.method", "vcpo_plus"), ("algorithm.step_bound_target", 0.1), ("algorithm.spike_clip", 1.0)],
    [("algorithm.method", "tis_token"), ("algorithm.step_bound", "relative_kl"), ("algorithm.step_bound_target", 1.0)],
    [("algorithm.method", "vcpo_plus"), ("algorithm.step_bound", "off"), ("algorithm.spike_clip", 0.0)],
    [("algorithm.method", "m2po_clip"), ("algorithm.second_moment", 0.1)],
    [("algorithm.opob_weights", "truncated"), ("algorithm.opob_accumulator_dtype", "bfloat16")],
    [("optimizer.schedule", "cosine"), ("optimizer.min_lr", 1e-7)],
    [("optimizer.lr", 0.01), ("optimizer.weight_decay", 99.9)],
    [("optimizer.schedule", "wsd"), ("optimizer.decay_steps", 7), ("optimizer.warmup_steps", 3)],
    [("rollout.port", 5000), ("rollout.servers", 2), ("launch.master_port", 5002), ("launch.control_port", 4999)],
    [("rollout.port", 65535)],
    *(
        [("rollout.engine", "sglang"), ("rollout.addresses", ("http://a:1",)), ("launch.address", address)]
        for address in ("trainer", "trainer.cluster.local.", "10.1.2.3", "fd00::7", "node_7", "7-head.8")
    ),
    [("environment.episode_timeout_s", 599.9), ("environment.workers", 256), ("environment.worker_memory_gb", 0.1)],
    [("environment.episode_timeout_s", 600.0), ("staleness.lag", "exact")],
]


@pytest.mark.parametrize("changes", GOOD_LIMITS, ids=str)
def test_values_at_the_limit_are_allowed(make: Callable[..., RunConfig], changes: list[tuple[str, Any]]) -> None:
    assert problems(make(*changes)) == []


#: A run whose requests go through a router.
ROUTED = [("rollout.engine", "sglang"), ("rollout.addresses", ("http://a:1",)), ("rollout.router", "http://r:1")]

JOINED = [("rollout.engine", "sglang"), ("rollout.addresses", ("http://a:1",))]

#: What is wrong, and the key with its value that the problem names; the whole lines are in golden/messages.json.
BAD = [
    ([("environment.episode_timeout_s", 600.0)], "environment.episode_timeout_s = 600"),
    ([("parallel.context", 2)], "launch.learner_ranks = 1"),
    ([("parallel.expert", 2), ("launch.learner_ranks", 2)], "parallel.expert = 2"),
    ([("parallel.expert_tensor", 2), ("launch.learner_ranks", 2)], "parallel.expert_tensor = 2"),
    ([("rollout.routing_replay", True)], "rollout.routing_replay = true"),
    ([("parallel.virtual_pipeline", 2)], "parallel.virtual_pipeline = 2"),
    (
        [("parallel.virtual_pipeline", 2), ("parallel.pipeline", 2), ("launch.learner_ranks", 2)],
        "parallel.virtual_pipeline = 2",
    ),
    (
        [("parallel.expert_dispatcher", "allgather"), ("parallel.pipeline", 2), ("launch.learner_ranks", 2)],
        'parallel.expert_dispatcher = "allgather"',
    ),
    ([("parallel.sequence_parallel", True)], "parallel.sequence_parallel = true"),
    ([("parallel.tensor", 2), ("launch.learner_ranks", 3)], "launch.learner_ranks = 3"),
    ([("parallel.tensor", 2)], "launch.learner_ranks = 1"),
    ([("launch.learner_ranks", 5)], "train.groups_per_step = 4"),
    ([("parallel.tensor", 2), ("launch.learner_ranks", 2), ("model.vocab_multiple", 3)], "model.vocab_multiple = 3"),
    ([("model.vocab_multiple", 1025)], "model.vocab_multiple = 1025"),
    ([("parallel.tensor", 4), ("launch.learner_ranks", 4)], "parallel.tensor = 4"),
    ([("parallel.pipeline", 4), ("launch.learner_ranks", 4)], "parallel.pipeline = 4"),
    ([("algorithm.is_level", "none")], 'algorithm.is_level = "none"'),
    ([("algorithm.method", "rloo")], 'algorithm.method = "rloo"'),
    ([("algorithm.method", "gspo"), ("algorithm.baseline", "opob")], 'algorithm.baseline = "opob"'),
    ([("algorithm.method", "grpo"), ("algorithm.is_level", "token")], 'algorithm.is_level = "token"'),
    ([("algorithm.method", "gspo"), ("algorithm.is_level", "turn")], 'algorithm.is_level = "turn"'),
    *(
        ([*keys, ("algorithm.is_threshold_length", 512)], "algorithm.is_threshold_length = 512")
        for keys in (
            [("algorithm.is_level", "token")],
            [("algorithm.is_threshold", 1.0)],
            [("algorithm.is_threshold", float("inf"))],
            [("algorithm.method", "decoupled_ppo")],
            [("algorithm.method", "icepop"), ("algorithm.is_level", "turn")],
        )
    ),
    ([("algorithm.method", "grpo"), ("algorithm.ratio_low", 1.5)], "algorithm.ratio_low = 1.5"),
    ([("algorithm.baseline", "opob_leave_one_out")], 'algorithm.baseline = "opob_leave_one_out"'),
    (
        [("algorithm.opob_accumulator_dtype", "bfloat16"), ("algorithm.opob_mode", "deferred")],
        'algorithm.opob_accumulator_dtype = "bfloat16"',
    ),
    ([("algorithm.mismatch", "recorded"), ("algorithm.method", "grpo")], 'algorithm.mismatch = "recorded"'),
    ([("algorithm.mismatch", "recorded"), ("algorithm.method", "icepop")], 'algorithm.mismatch = "recorded"'),
    (
        [
            ("algorithm.mismatch", "recorded"),
            ("algorithm.is_level", "none"),
            ("algorithm.allow_uncorrected", True),
        ],
        'algorithm.mismatch = "recorded"',
    ),
    (
        [("algorithm.mismatch", "recorded"), ("algorithm.mismatch_threshold", 0.9)],
        "algorithm.mismatch_threshold = 0.9",
    ),
    ([("algorithm.mismatch_threshold", 3.0)], "algorithm.mismatch_threshold = 3.0"),
    ([("algorithm.ratio_low", 0.5)], "algorithm.ratio_low = 0.5"),
    (
        [
            ("algorithm.method", "icepop"),
            ("algorithm.is_level", "none"),
            ("algorithm.ratio_high", 9.0),
            ("algorithm.allow_uncorrected", True),
        ],
        "algorithm.ratio_high = 9.0",
    ),
    ([("algorithm.method", "p3o"), ("algorithm.second_moment", 0.1)], "algorithm.second_moment = 0.1"),
    ([("algorithm.method", "grpo"), ("algorithm.opob_mode", "deferred")], 'algorithm.opob_mode = "deferred"'),
    (
        [("algorithm.is_level", "token"), ("algorithm.opob_weights", "truncated")],
        'algorithm.opob_weights = "truncated"',
    ),
    (
        [("algorithm.is_level", "turn"), ("algorithm.opob_weights", "truncated")],
        'algorithm.opob_weights = "truncated"',
    ),
    ([("algorithm.record_norms", True)], "algorithm.record_norms = true"),
    ([("train.updates_per_batch", 3), ("train.steps", 9), ("train.eval_every", 0)], "train.updates_per_batch = 3"),
    ([("train.updates_per_batch", 2), ("train.steps", 9)], "train.steps = 9"),
    ([("train.updates_per_batch", 2), ("train.eval_every", 5), ("train.steps", 10)], "train.eval_every = 5"),
    (
        [("train.updates_per_batch", 4), ("train.steps", 8), ("staleness.max_staleness", 2)],
        "staleness.max_staleness = 2",
    ),
    ([("train.updates_per_batch", 2), ("train.steps", 8), ("staleness.lag", "exact")], "train.updates_per_batch = 2"),
    (
        [("train.updates_per_batch", 2), ("train.steps", 8), ("algorithm.base_ess_ratio", "auto")],
        'algorithm.base_ess_ratio = "auto"',
    ),
    (
        [("train.updates_per_batch", 2), ("train.steps", 8), ("algorithm.method", "decoupled_ppo")],
        "train.updates_per_batch = 2",
    ),
    (
        [("train.updates_per_batch", 4), ("train.steps", 8), ("launch.learner_ranks", 4)],
        "train.groups_per_step = 4 / updates_per_batch = 4",
    ),
    ([("algorithm.opob_mode", "two_pass"), ("algorithm.opob_accumulators", 2)], "algorithm.opob_accumulators = 2"),
    ([("algorithm.method", "tis_sequence"), ("algorithm.opob_accumulators", 2)], "algorithm.opob_accumulators = 2"),
    ([("algorithm.ess_scaling", False), ("algorithm.ess_rule", "linear")], 'algorithm.ess_rule = "linear"'),
    ([("algorithm.method", "grpo"), ("algorithm.base_ess_ratio", "auto")], 'algorithm.base_ess_ratio = "auto"'),
    ([("optimizer.min_lr", 1e-7)], "optimizer.min_lr = 1e-07"),
    ([("algorithm.kl_coef", 0.1)], "algorithm.kl_coef = 0.1"),
    ([("algorithm.kl_reference", "initial")], "algorithm.kl_coef = 0.0"),
    ([("optimizer.min_lr", 1.0), ("optimizer.schedule", "cosine")], "optimizer.min_lr = 1.0"),
    ([("optimizer.lr", 0.01), ("optimizer.weight_decay", 100.0)], "optimizer.weight_decay = 100.0"),
    ([("optimizer.schedule", "wsd")], "optimizer.decay_steps = None"),
    ([("optimizer.decay_steps", 3)], "optimizer.decay_steps = 3"),
    (
        [("optimizer.schedule", "wsd"), ("optimizer.decay_steps", 8), ("optimizer.warmup_steps", 3)],
        "optimizer.decay_steps = 8",
    ),
    ([("algorithm.base_ess_ratio", 0.0)], "algorithm.base_ess_ratio = 0.0"),
    ([("algorithm.spike_clip", 0.9)], "algorithm.spike_clip = 0.9"),
    ([("algorithm.step_bound_target", 0.1)], "algorithm.step_bound_target = 0.1"),
    (
        [("algorithm.method", "vcpo_plus"), ("algorithm.step_bound", "off"), ("algorithm.step_bound_target", 0.1)],
        "algorithm.step_bound_target = 0.1",
    ),
    ([("algorithm.base_ess_ratio", 1.01)], "algorithm.base_ess_ratio = 1.01"),
    ([("algorithm.base_ess_ratio", "auto"), ("staleness.lag", "exact")], 'algorithm.base_ess_ratio = "auto"'),
    ([("algorithm.base_ess_ratio", "auto"), ("algorithm.mismatch", "recorded")], 'algorithm.base_ess_ratio = "auto"'),
    ([("train.group_size", 1)], "train.group_size = 1"),
    ([("optimizer.warmup_steps", 10)], "optimizer.warmup_steps = 10"),
    ([("optimizer.betas", (0.9, 1.0))], "optimizer.betas = [0.9, 1.0]"),
    ([("rollout.max_running_requests", 3)], "rollout.max_running_requests = 3"),
    ([("rollout.servers", 21)], "rollout.servers = 21"),
    ([("train.max_pack_tokens", 8)], "train.max_pack_tokens = 8"),
    ([("rollout.context_length", 65)], "rollout.context_length = 65"),
    ([("rollout.context_length", 8)], "rollout.max_new_tokens = 8"),
    ([("rollout.max_new_tokens", 64)], "rollout.max_new_tokens = 64"),
    ([("rollout.engine", "replay")], 'rollout.engine = "replay"'),
    ([("rollout.replay", Path("/nowhere"))], "rollout.replay = /nowhere"),
    ([("rollout.replay", Path("/nowhere")), ("rollout.engine", "replay")], "rollout.replay = /nowhere"),
    ([("rollout.replay", Path("/")), ("rollout.engine", "replay")], "rollout.replay = /"),
    ([("rollout.python", Path("/p"))], "rollout.python = /p"),
    ([("rollout.args", ("--x",)), ("rollout.tensor_parallel", 1)], "rollout.args = ['--x']"),
    ([("rollout.engine", "sglang")], 'rollout.engine = "sglang"'),
    ([("rollout.engine", "sglang"), ("rollout.python", Path("/nowhere"))], "rollout.python = /nowhere"),
    ([("rollout.engine", "sglang"), ("rollout.python", Path("/"))], "rollout.python = /"),
    ([("rollout.engine", "sglang"), ("rollout.python", Path("/bin/sh"))], "rollout.python = /bin/sh"),
    (
        [("rollout.engine", "sglang"), ("rollout.addresses", ("http://a:1",)), ("staleness.lag", "exact")],
        'rollout.engine = "sglang"',
    ),
    (
        [("rollout.engine", "sglang"), ("rollout.addresses", ("http://a:1",)), ("rollout.args", ("--x",))],
        "rollout.args",
    ),
    ([("rollout.engine", "sglang"), ("rollout.addresses", ("a:1",))], "rollout.addresses = ['a:1']"),
    ([("launch.address", "trainer")], 'launch.address = "trainer"'),
    *(
        ([*JOINED, ("launch.address", address)], f'launch.address = "{address}"')
        for address in ("http://trainer", "10.1.2.3:29500", "10.1.2.300", "", "tr ainer")
    ),
    (
        [("rollout.engine", "sglang"), ("rollout.addresses", ("http://a:1/v1",))],
        "rollout.addresses = ['http://a:1/v1']",
    ),
    (
        [("rollout.engine", "sglang"), ("rollout.addresses", ("http://a:99999",))],
        "rollout.addresses = ['http://a:99999']",
    ),
    (
        [("rollout.engine", "sglang"), ("rollout.addresses", ("http://a:1",) * 2)],
        "rollout.addresses = ['http://a:1', 'http://a:1']",
    ),
    ([("rollout.router", "http://r:1")], "rollout.router = http://r:1"),
    ([*ROUTED, ("rollout.router", "r:1")], 'rollout.router = "r:1"'),
    ([*ROUTED, ("rollout.router", "http://a:1/")], 'rollout.router = "http://a:1/"'),
    ([*ROUTED, ("rollout.pause_mode", "in_place")], 'rollout.router = "http://r:1"'),
    ([("environment.data", Path("/nowhere.jsonl"))], "environment.data = /nowhere.jsonl"),
    ([("environment.heldout", Path("/"))], "environment.heldout = /"),
    ([("launch.control_port", 5000), ("launch.master_port", 5000)], "launch.master_port = 5000"),
    ([("rollout.port", 5000), ("rollout.servers", 2), ("launch.master_port", 5001)], "rollout.port (server 1) = 5001"),
    ([("rollout.port", 65535), ("rollout.servers", 2)], "rollout.port = 65535"),
    ([("model.path", Path("/nowhere"))], "model.path = /nowhere"),
]


@pytest.mark.parametrize(("changes", "start"), BAD, ids=[start for _, start in BAD])
def test_one_problem_is_one_line(
    make: Callable[..., RunConfig], model_folder: Path, changes: list[tuple[str, Any]], start: str
) -> None:
    (problem,) = problems(make(*changes))
    assert problem.startswith(f"{start}: ")
    assert_said("problems of a configuration", case(changes), problem, folder=model_folder)


def case(changes: list[tuple[str, Any]]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in changes)


def test_the_lines_are_those_of_cases() -> None:
    assert cases("problems of a configuration") == {case(changes) for changes, _ in BAD}


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
BAD_EXPERTS = [
    ([("parallel.expert", 3)], 3, "parallel.expert = 3: does not divide the 4 experts"),
    ([("parallel.expert", 2)], 3, "parallel.expert = 2: expert x expert_tensor = 2 does not divide the 3 learner"),
    ([("parallel.expert_tensor", 2)], 2, "parallel.expert_tensor = 2: must be parallel.tensor = 1"),
    ([("parallel.expert_tensor", 4), ("parallel.expert", 2)], 8, "parallel.expert_tensor = 4: does not divide the 6"),
    ([("parallel.tensor", 2), ("parallel.expert", 2)], 2, "parallel.tensor = 2: Megatron trains experts with tensor"),
    ([("parallel.context", 3), ("parallel.expert", 2)], 6, "parallel.expert = 2: expert x expert_tensor = 2 and"),
]


@pytest.mark.parametrize(("changes", "ranks", "start"), BAD_EXPERTS, ids=[start for _, _, start in BAD_EXPERTS])
def test_splits_of_experts(
    make: Callable[..., RunConfig],
    make_model: Callable[..., Path],
    changes: list[tuple[str, Any]],
    ranks: int,
    start: str,
) -> None:
    model = ("model.path", make_model(**EXPERTS))
    found = problems(make(model, *changes, ("launch.learner_ranks", ranks), ("train.groups_per_step", 8)))
    assert [problem for problem in found if problem.startswith("parallel.")][0].startswith(start)
    sound = (("parallel.expert", 2), ("launch.learner_ranks", 8), ("train.groups_per_step", 4))
    assert not [problem for problem in problems(make(model, *sound)) if not problem.startswith("model.path")]


def test_the_balance_of_experts_needs_routers_with_a_softmax(
    make: Callable[..., RunConfig], make_model: Callable[..., Path]
) -> None:
    def told(*changes: tuple[str, Any]) -> list[str]:
        return [line for line in problems(make(("algorithm.global_aux_loss", 0.01), *changes)) if "aux_loss" in line]

    (dense,) = told()
    assert dense.startswith("algorithm.global_aux_loss = 0.01: ") and "has no routers with a softmax; use 0" in dense
    model = ("model.path", make_model(**EXPERTS))
    assert told(model) == []
    (problem,) = told(model, ("rollout.routing_replay", True))
    assert_names(problem, "algorithm.global_aux_loss = 0.01", "rollout.routing_replay = true", "use 0")


def test_routing_replay_needs_experts_and_a_record(
    make: Callable[..., RunConfig], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    model, on = ("model.path", make_model(**EXPERTS)), ("rollout.routing_replay", True)
    assert not [problem for problem in problems(make(model, on)) if problem.startswith("rollout.")]
    (tmp_path / "rollouts.sqlite").touch()
    found = problems(make(model, on, ("rollout.engine", "replay"), ("rollout.replay", tmp_path)))
    (problem,) = [problem for problem in found if problem.startswith("rollout.")]
    assert_names(problem, "rollout.routing_replay = true", 'rollout.engine = "replay"', "no record of experts")


ATTENTION, MATRICES = ((f"model.{key}", "transformer_engine") for key in ("core_attention", "transformer_impl"))
TWO_RANKS, LOW = ("launch.learner_ranks", 2), ("model.dtype", "bfloat16")


@pytest.mark.parametrize(
    ("changes", "model", "installed", "expected"),
    [
        ([ATTENTION, MATRICES, LOW], {}, True, []),
        ([ATTENTION, LOW, TWO_RANKS, ("parallel.tensor", 2)], {}, True, []),
        ([ATTENTION, LOW], {}, False, ["core_attention TransformerEngine's part for PyTorch is not installed"]),
        ([MATRICES, LOW], {}, False, ["transformer_impl TransformerEngine's part for PyTorch is not installed"]),
        ([ATTENTION], {}, True, ["core_attention takes packs in 16 bits"]),
        (
            [ATTENTION, LOW, TWO_RANKS, ("parallel.context", 2)],
            {},
            True,
            ["core_attention not checked with parallel.context = 2"],
        ),
        (
            [MATRICES, LOW, TWO_RANKS, ("parallel.tensor", 2)],
            {},
            True,
            ["transformer_impl not checked with parallel.tensor = 2"],
        ),
        ([MATRICES, LOW], EXPERTS, True, ["transformer_impl not checked with the experts of"]),
        ([ATTENTION, LOW], EXPERTS, True, []),
        (
            [ATTENTION, LOW],
            {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
            True,
            ["core_attention not checked with the sliding windows of"],
        ),
    ],
)
def test_transformer_engine_is_refused_by_name(
    make: Callable[..., RunConfig],
    make_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    changes: list[tuple[str, Any]],
    model: dict[str, Any],
    installed: bool,
    expected: list[str],
) -> None:
    found = InstalledKernels(transformer_engine=installed)
    monkeypatch.setattr("vcpo_megatron.config.checks.transformer_engine.find_kernels", lambda: found)
    lines = problems(make(*changes, ("model.path", make_model(**model))))
    told = [line for line in lines if '= "transformer_engine": ' in line]
    for line, part in zip(told, expected, strict=True):
        key, text = part.split(" ", 1)
        assert line.startswith(f'model.{key} = "transformer_engine": {text}')


@pytest.mark.parametrize(("engine", "refused"), [("sglang", 1), ("embedded", 0)])
def test_checksums_of_latent_attention_in_sglang_are_refused(
    make: Callable[..., RunConfig], make_model: Callable[..., Path], engine: str, refused: int
) -> None:
    model = ("model.path", make_model(**{**DEEPSEEK_V3, "rope_parameters": None}))
    found = problems(make(model, ("rollout.engine", engine), ("rollout.verify_sync", True)))
    assert sum(problem.startswith("rollout.verify_sync = true: SGLang keeps") for problem in found) == refused, found
    dense = problems(make(("rollout.engine", engine), ("rollout.verify_sync", True)))
    assert not [problem for problem in dense if "verify_sync" in problem]


def test_heads_and_mlp_are_checked_too(make: Callable[..., RunConfig], make_model: Callable[..., Path]) -> None:
    odd = ("model.path", make_model(num_attention_heads=3, num_key_value_heads=1, intermediate_size=9, hidden_size=6))
    found = problems(make(odd, ("parallel.tensor", 2), ("launch.learner_ranks", 2)))
    for problem, undivided in zip(
        found[:3], ("3 attention heads", "1 key-value heads", "9 units of the MLP"), strict=True
    ):
        assert_names(problem, "parallel.tensor = 2", undivided)


def test_a_replayed_run_directory_is_accepted(make: Callable[..., RunConfig], tmp_path: Path) -> None:
    (tmp_path / "rollouts.sqlite").touch()
    replay = [("rollout.engine", "replay"), ("rollout.replay", tmp_path)]
    assert problems(make(*replay)) == []
    # What bounds servers does not bind a run that has none.
    assert problems(make(*replay, ("rollout.max_running_requests", 1), ("rollout.servers", 99))) == []


@pytest.mark.parametrize(("name", "recorded"), [("groups_per_step", 2), ("groups_per_step", 8), ("group_size", 3)])
def test_a_replay_keeps_the_shape_of_its_batches(
    make: Callable[..., RunConfig], tmp_path: Path, name: str, recorded: int
) -> None:
    (tmp_path / "rollouts.sqlite").touch()
    replay = [("rollout.engine", "replay"), ("rollout.replay", tmp_path)]
    sizes = {"groups_per_step": 4, "group_size": 4}

    def record(**changes: int) -> None:
        lines = [f"{key} = {value}" for key, value in {**sizes, **changes}.items()]
        # A key that this version does not know: the recorded run may be of another one.
        (tmp_path / "resolved.toml").write_text("\n".join(["[train]", *lines, "unknown = 1"]))

    record()
    assert problems(make(*replay)) == []
    record(**{name: recorded})
    (problem,) = problems(make(*replay))
    assert_names(problem, f"train.{name} = 4", f"{tmp_path} has {recorded}", f"set {recorded}")
    (tmp_path / "resolved.toml").write_text("[train")
    (problem,) = problems(make(*replay))
    assert "resolved.toml" in problem


def test_all_are_reported_together(make: Callable[..., RunConfig]) -> None:
    changes = [
        change
        for changes, start in BAD
        if start
        in {
            "parallel.sequence_parallel = true",
            "train.group_size = 1",
            "optimizer.warmup_steps = 10",
            "model.path = /nowhere",
            "environment.data = /nowhere.jsonl",
        }
        for change in changes
    ]
    assert len(problems(make(*changes))) == 5


def test_proxy_does_not_fill_the_schedule_of_virtual_stages(make: Callable[..., RunConfig]) -> None:
    stages = (("parallel.pipeline", 2), ("parallel.virtual_pipeline", 2), ("launch.learner_ranks", 2))
    found = [problems(make(("algorithm.opob_mode", mode), *stages)) for mode in ("proxy", "deferred")]
    assert [any("multiples of the 2 stages" in line for line in lines) for lines in found] == [True, False]


POLICIES = [("train.drop_zero_variance", True), ("staleness.adaptive", True), ("rollout.on_failure", "resample")]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_policies_of_generation_need_a_run_that_generates(
    make: Callable[..., RunConfig], policy: tuple[str, Any]
) -> None:
    assert problems(make(policy)) == []
    (exact,) = problems(make(policy, ("staleness.lag", "exact")))
    assert exact.startswith(policy[0]) and "fixes its batches" in exact
    assert any("trains on what was recorded" in line for line in problems(make(policy, ("rollout.engine", "replay"))))


def test_weights_and_biases_need_their_package(make: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    project = ("observability.wandb_project", "demo")
    monkeypatch.setitem(sys.modules, "wandb", None)
    (missing,) = problems(make(project))
    assert_names(missing, "observability.wandb_project", "demo", "pip install wandb")
    present = ModuleType("wandb")
    present.__spec__ = ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", present)
    assert problems(make(project)) == [] == problems(make(project, ("observability.wandb_mode", "offline")))
    (idle,) = problems(make(("observability.wandb_mode", "offline")))
    assert_names(idle, "observability.wandb_mode", "offline", "wandb_project")


@pytest.fixture
def rollout_python(tmp_path: Path) -> Path:
    """What a rollout environment looks like from outside: an interpreter, and SGLang's metadata beside it."""
    site = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    (site / "sglang-0.5.23.dist-info").mkdir(parents=True)
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to("/bin/sh")
    return python


def test_a_rollout_environment_is_known_by_its_metadata(make: Callable[..., RunConfig], rollout_python: Path) -> None:
    assert installed_sglang(rollout_python) == "0.5.23"
    sglang = [("rollout.engine", "sglang"), ("rollout.python", rollout_python)]
    assert problems(make(*sglang, ("rollout.servers", 2), ("rollout.args", ("--log-level", "warning")))) == []
    for flag in ("--port", "--tp", "--speculative-algorithm=EAGLE"):
        (problem,) = problems(make(*sglang, ("rollout.args", (flag, "2"))))
        assert problem.startswith(f"rollout.args: {flag.split('=')[0]} is not taken: ")
    for flag in ("--enable-symm-mem", "--enable-nccl-nvls"):
        (problem,) = problems(make(*sglang, ("rollout.args", (flag,))))
        assert problem.startswith(f"rollout.args: {flag} sets NCCL_") and "both ends" in problem
        assert problems(make(*sglang, ("rollout.args", (flag,)), ("rollout.sync", "disk"))) == []


def test_packages_that_a_pth_file_adds_count(rollout_python: Path, tmp_path: Path) -> None:
    site = rollout_python.parent.parent / "lib" / "python3.11" / "site-packages"
    (site / "sglang-0.5.23.dist-info").rename(tmp_path / "sglang-0.5.24.dist-info")
    assert installed_sglang(rollout_python) is None
    (site / "more.pth").write_text(f"import os\n/nowhere\n{tmp_path}\n")
    assert installed_sglang(rollout_python) == "0.5.24"


def test_joined_servers_need_no_interpreter(make: Callable[..., RunConfig]) -> None:
    joined = make(("rollout.engine", "sglang"), ("rollout.addresses", ("http://a:30000", "http://b:30000/")))
    assert problems(joined) == [] and (joined.rollout.started, joined.rollout.fleet_size) == (0, 2)


def test_a_router_stands_in_front_of_joined_servers_alone(
    make: Callable[..., RunConfig], make_model: Callable[..., Path], rollout_python: Path
) -> None:
    assert problems(make(*ROUTED)) == [] == problems(make(*ROUTED, ("rollout.pause_mode", "abort")))
    started = [("rollout.engine", "sglang"), ("rollout.python", rollout_python), ("rollout.router", "http://r:1")]
    (problem,) = problems(make(*started))
    assert problem.startswith('rollout.router = "http://r:1": needs rollout.addresses')
    experts = ("model.path", make_model(**EXPERTS)), ("rollout.routing_replay", True)
    found = [problem for problem in problems(make(*ROUTED, *experts)) if problem.startswith("rollout.router")]
    assert len(found) == 1 and "drops return_routed_experts, which rollout.routing_replay = true needs" in found[0]
