"""Modes, methods, normalisations and regularisers of the learner against fp64 gradients, in several layouts.

Cases that share a world size share one launch, which stays up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.slow import Made, matrix
from vcpo_megatron.config.methods import METHODS
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.types import Batch

from ..oracles import OBJECTIVES, WHOLE_BATCH, Policy, Sample, grown, sequence_weighted, token_weights, turn_weights
from ..scenarios import in_turns, make_batch, make_config, make_model_folder
from ..world import run_world

RULES = ("sequence_token_mean", "token_mean", "sequence_token_sum", "constant")


@dataclass
class Case:
    """One step: its layout and keys, and how its oracle is formed."""

    ranks: int
    algorithm: dict[str, Any]
    parallel: dict[str, int] = field(default_factory=dict)
    pack: int = 40
    family: str = "qwen2"
    tied: bool = False
    far: bool = False  # log ratios that close clips
    binary: bool = False  # rewards 0 and 1: trajectories that share a reward share a weight gradient
    unit: float = 1.0  # of rewards
    turns: bool = False  # answers of several turns
    anchor: float = 0.0  # in the second of two steps on one batch, at a learning rate that moves nothing


LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "single": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "dp2": (2, {}),
}
#: ranks -> layouts of the estimate of norms from logits
PROXY: dict[int, list[dict[str, int]]] = {1: [{}], 2: [{"tensor": 2}, {"pipeline": 2}, {}, {"context": 2}]}
CASES: dict[str, Case] = {}
for _mode in ("deferred", "two_pass"):
    for _layout, (_ranks, _parallel) in LAYOUTS.items():
        CASES[f"{_mode} {_layout}"] = Case(_ranks, {"opob_mode": _mode}, _parallel)
    CASES[f"{_mode} leave-one-out"] = Case(1, {"opob_mode": _mode, "baseline": "opob_leave_one_out"}, pack=30)
    CASES[f"{_mode} tied qk-norm"] = Case(1, {"opob_mode": _mode}, family="qwen3", tied=True)
    CASES[f"{_mode} whole groups"] = Case(1, {"opob_mode": _mode}, pack=1000)
    CASES[f"{_mode} token weights"] = Case(1, {"opob_mode": _mode, "is_level": "token"})
CASES["deferred leave-one-out pp2"] = Case(
    2, {"opob_mode": "deferred", "baseline": "opob_leave_one_out"}, {"pipeline": 2}
)
CASES["accumulate token weights"] = Case(1, {"is_level": "token"}, pack=1000)
for _layout, (_ranks, _parallel) in LAYOUTS.items():
    CASES[f"right or wrong {_layout}"] = Case(_ranks, {}, _parallel, pack=1000, binary=True)
CASES["pp2 one accumulator"] = Case(2, {"opob_accumulators": 1}, {"pipeline": 2})
CASES["right or wrong deferred"] = Case(1, {"opob_mode": "deferred"}, pack=1000, binary=True)
for _layout in ("single", "pp2"):
    CASES[f"vcpo_opob_only {_layout}"] = Case(LAYOUTS[_layout][0], {"method": "vcpo_opob_only"}, LAYOUTS[_layout][1])
for _name, _ranks, _keys, _parallel in (
    ("", 1, {}, {}),
    ("right or wrong ", 1, {}, {}),
    ("vcpo_ess_only ", 1, {"method": "vcpo_ess_only"}, {}),
    ("tp2 ", 2, {}, {"tensor": 2}),
    ("pp2 ", 2, {}, {"pipeline": 2}),
    ("right or wrong dp2 ", 2, {}, {}),
    ("cp2 ", 2, {}, {"context": 2}),
    ("two_pass dp2 ", 2, {"opob_mode": "two_pass"}, {}),
    ("right or wrong deferred pp2 ", 2, {"opob_mode": "deferred"}, {"pipeline": 2}),
):
    CASES[f"{_name}anchored"] = Case(_ranks, _keys, _parallel, pack=1000, binary=_name.startswith("right"), anchor=0.5)
for _name, _ranks, _keys, _parallel in (
    ("tis_token", 1, {"method": "tis_token"}, {}),
    ("icepop dp2", 2, {"method": "icepop"}, {}),
    ("accumulate token weights", 1, {"is_level": "token"}, {}),
    ("accumulate token weights pp2", 2, {"is_level": "token"}, {"pipeline": 2}),
    ("deferred token weights", 1, {"is_level": "token", "opob_mode": "deferred"}, {}),
    ("deferred token weights cp2", 2, {"is_level": "token", "opob_mode": "deferred"}, {"context": 2}),
    ("two_pass token weights tp2", 2, {"is_level": "token", "opob_mode": "two_pass"}, {"tensor": 2}),
):
    CASES[f"{_name} anchored"] = Case(_ranks, _keys, _parallel, pack=1000, anchor=0.5)
for _name, _ranks, _keys, _parallel in (
    ("accumulate", 1, {}, {}),
    ("accumulate tp2", 2, {}, {"tensor": 2}),
    ("accumulate pp2", 2, {}, {"pipeline": 2}),
    ("accumulate cp2", 2, {}, {"context": 2}),
    ("accumulate dp2", 2, {}, {}),
    ("deferred", 1, {"opob_mode": "deferred"}, {}),
    ("deferred cp2", 2, {"opob_mode": "deferred"}, {"context": 2}),
    ("deferred pp2", 2, {"opob_mode": "deferred"}, {"pipeline": 2}),
    ("two_pass tp2", 2, {"opob_mode": "two_pass"}, {"tensor": 2}),
    ("two_pass leave-one-out dp2", 2, {"opob_mode": "two_pass", "baseline": "opob_leave_one_out"}, {}),
    ("plain", 1, {"method": "tis_token"}, {}),
    ("plain cp2", 2, {"method": "tis_token"}, {"context": 2}),
):
    _case = Case(_ranks, {"is_level": "turn", **_keys}, _parallel, pack=1000, turns=True)
    CASES[f"{_name} turn weights"] = _case
    # far: some turns are truncated, at bounds that differ
    _grown = {**_case.algorithm, "is_threshold_length": 2}
    CASES[f"{_name} turn weights, growing bound"] = replace(_case, algorithm=_grown, far=True)
    CASES[f"{_name} turn weights anchored"] = replace(_case, anchor=0.5)
for _name, _layout in (("", "single"), ("pp2 ", "pp2"), ("dp2 ", "dp2")):
    _keys = {"is_threshold_length": 2}
    CASES[f"{_name}growing bound"] = Case(LAYOUTS[_layout][0], _keys, LAYOUTS[_layout][1], pack=1000, far=True)
    _keys = {**_keys, "opob_weights": "truncated", "opob_mode": "deferred"}
    CASES[f"{_name}growing bound in OPOB"] = Case(LAYOUTS[_layout][0], _keys, LAYOUTS[_layout][1], far=True)
for _layout, (_ranks, _parallel) in {**LAYOUTS, "cp2": (2, {"context": 2})}.items():
    CASES[f"vcpo_plus {_layout}"] = Case(_ranks, {"method": "vcpo_plus"}, _parallel)
for _unit in (3e-12, 1e-13):
    CASES[f"rewards of {_unit:g} without std"] = Case(1, {"normalize_std": False}, pack=1000, binary=True, unit=_unit)
for _rule in RULES:
    CASES[f"{_rule} opob"] = Case(1, {"loss_normalization": _rule}, pack=30)
    CASES[f"{_rule} opob whole groups dp2"] = Case(2, {"loss_normalization": _rule}, pack=1000)
    CASES[f"{_rule} plain dp2"] = Case(2, {"loss_normalization": _rule, "method": "tis_sequence"}, pack=30)
#: method -> keys beside it: bounds between which the far batch's ratios lie, and beyond which
BANDS: dict[str, dict[str, float]] = {
    "mis_geometric": {"ratio_low": 0.5, "ratio_high": 1.5},
    "tis_veto": {"ratio_low": 0.1},
}
for _method in OBJECTIVES:
    CASES[_method] = Case(1, {"method": _method, "allow_uncorrected": True, **BANDS.get(_method, {})}, far=True)
for _method, _layout in (
    *(("m2po", "pp2"), ("p3o", "dp2"), ("p3o", "pp2"), ("gspo", "tp2"), ("mu_grpo", "dp2")),
    *(("ctpo", "pp2"), ("ctpo", "dp2"), ("fspo", "tp2"), ("mis_geometric", "tp2"), ("tis_veto", "pp2")),
):
    _ranks, _parallel = LAYOUTS[_layout]
    CASES[f"{_method} {_layout}"] = Case(_ranks, {"method": _method, **BANDS.get(_method, {})}, _parallel, far=True)


def _oracle(case: Case, model: Path, batch: Batch, config: RunConfig) -> tuple[dict[str, torch.Tensor], Policy]:
    policy = Policy(model, batch)
    preset, length = config.algorithm.preset, config.algorithm.is_threshold_length or math.inf
    weigh: Any = {"token": token_weights, "turn": partial(turn_weights, length=length)}.get(preset.is_level)
    objective: Any = partial(sequence_weighted, length=length)
    policy.normalize(preset.loss_normalization)
    if preset.needs_norms:
        bound: dict[str, Any] = {}
        if config.algorithm.opob_weights == "truncated":
            bound = {"bound": lambda s: grown(len(s.logp), length)}
        policy.opob(preset.baseline == "opob_leave_one_out", preset.normalize_std, weigh, **bound)
    else:
        baseline, std, rule, form = OBJECTIVES[config.algorithm.method]
        policy.normalize(case.algorithm.get("loss_normalization", rule))
        policy.advantages(baseline, std)
        objective = form(policy.samples)
    if weigh is not None and preset.weights == "truncated":
        objective = lambda s: weigh(s) * s.advantage * s.logp  # noqa: E731
    loss = policy.loss(objective, whole_batch=config.algorithm.method in WHOLE_BATCH)
    if case.anchor:
        loss = loss + case.anchor * (1 - policy.ess()) * policy.loss(lambda s: s.logp)
    return policy.gradient(loss), policy


#: Each mode, method and normalisation once, in the layouts that share the least; the other rows are slow.
DEFAULT = (
    "deferred single",
    "deferred pp2",
    "two_pass tp2",
    "deferred leave-one-out",
    "accumulate token weights",
    "right or wrong dp2",
    "pp2 one accumulator",
    "vcpo_opob_only single",
    "vcpo_plus pp2",
    "vcpo_ess_only anchored",
    "tis_token anchored",
    "accumulate token weights anchored",
    "deferred token weights anchored",
    "rewards of 3e-12 without std",
    "tp2 anchored",
    "accumulate turn weights",
    "accumulate cp2 turn weights",
    "deferred turn weights, growing bound",
    "plain turn weights anchored",
    "growing bound in OPOB",
    "token_mean opob",
    "sequence_token_sum opob whole groups dp2",
    "constant plain dp2",
    *OBJECTIVES,
    "m2po pp2",
    "p3o dp2",
    "gspo tp2",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    root = tmp_path_factory.mktemp("models")
    return Made(lambda kind: make_model_folder(root / f"{kind[0]}{kind[1]}", kind[0], tied=kind[1], layers=2))


@pytest.fixture(scope="module")
def batches(models: dict[tuple[str, bool], Path]) -> dict[tuple[tuple[str, bool], bool, bool], Batch]:
    """By kind of model, whether log ratios are far, and whether rewards are 0 and 1."""
    return Made(lambda key: make_batch(models[key[0]], spread=6.0 if key[1] else 0.4, right_or_wrong=key[2]))


def in_units(batch: Batch, unit: float) -> Batch:
    """The batch with every reward ``unit`` times as large."""
    groups = [
        replace(g, trajectories=tuple(replace(t, reward=unit * t.reward) for t in g.trajectories)) for g in batch.groups
    ]
    return batch if unit == 1.0 else replace(batch, groups=tuple(groups))


def assert_gradients(outcome: dict[str, Any], expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    largest = max(float(g.abs().max()) for g in expected.values())
    assert largest > 0
    for key, gradient in outcome["gradients"].items():
        difference = float((gradient.double() - expected[key]).abs().max())
        assert difference <= tolerance * largest, f"{key}: {difference / largest:.2e} of the largest gradient"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", matrix(CASES, DEFAULT))
def test_gradient_equals_the_oracle(name: str, models: dict[tuple[str, bool], Path], batches: dict[Any, Batch]) -> None:
    case = CASES[name]
    model, batch = models[case.family, case.tied], batches[(case.family, case.tied), case.far, case.binary]
    batch = in_turns(in_units(batch, case.unit)) if case.turns else in_units(batch, case.unit)
    config = make_config(
        model,
        case.ranks,
        parallel=case.parallel,
        train={"max_pack_tokens": case.pack},
        algorithm={**case.algorithm, "behavior_anchor": case.anchor},
        optimizer={"lr": 1e-30} if case.anchor else {},
    )
    cases = [(config, [batch] * (2 if case.anchor else 1))]
    (outcome,) = run_world(case.ranks, "learner.run_layouts:one_step_each", {"cases": cases})
    expected, policy = _oracle(case, model, batch, config)
    assert not outcome["results"][-1].skipped
    assert_gradients(outcome, expected)
    metrics = outcome["results"][-1].metrics
    total = sum(float((g**2).sum()) for g in expected.values()) ** 0.5
    if config.algorithm.preset.needs_norms:
        assert float(outcome["accumulators"]) == (0 if config.algorithm.opob_mode != "accumulate" else 1)
    assert metrics["grad_norm/total"] == pytest.approx(total, rel=1e-5)
    assert metrics["baseline/accumulator_error"] == 0 and metrics["kl/reference"] == 0
    scale = metrics["ess/ratio"] ** 0.5 if config.algorithm.preset.ess_scaling else 1.0
    assert metrics["ess/ratio"] == pytest.approx(policy.ess(), rel=1e-5) and metrics["ess/ratio"] < 0.95
    if config.algorithm.preset.step_bound != "off":
        kl, entropy = policy.lag_kl()
        assert metrics["bound/kl"] == pytest.approx(kl, rel=1e-4) and kl > 1e-3
        assert metrics["bound/entropy"] == pytest.approx(entropy, rel=1e-6)
        assert metrics["bound/lr_scale"] == pytest.approx(0.02)  # of a first step
        scale *= metrics["bound/lr_scale"]
    assert metrics["ess/lr_scale"] == pytest.approx(scale)
    assert metrics["lr/effective"] / config.optimizer.lr == pytest.approx(scale)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", matrix({**LAYOUTS, "dp2 distributed": (2, {})}, ("tp2",)))
def test_a_gradient_above_those_before_is_clipped(
    layout: str, models: dict[tuple[str, bool], Path], batches: dict[Any, Batch]
) -> None:
    """Rewards ten times as large give ten times the gradient, and the parameters that its norm before would have."""
    ranks, parallel = {**LAYOUTS, "dp2 distributed": (2, {})}[layout]
    model, batch = models["qwen2", False], batches[("qwen2", False), False, True]
    steps = [batch, in_units(batch, 10.0)]
    keys = {"normalize_std": False, "ess_scaling": False}
    optimizer = {"lr": 1e-4, "distributed": layout.endswith("distributed")}

    def run(algorithm: dict[str, Any], clip_grad: float) -> dict[str, Any]:
        config = make_config(
            model,
            ranks,
            parallel=parallel,
            algorithm={**keys, **algorithm},
            optimizer={**optimizer, "clip_grad": clip_grad},
        )
        (outcome,) = run_world(ranks, "learner.run_layouts:one_step_each", {"cases": [(config, steps)]})
        return outcome

    clipped = run({"spike_clip": 1.0}, 0.0)
    first, second = (result.metrics for result in clipped["results"])
    assert "bound/grad_norm" not in first and second["grad_norm/total"] > 8 * first["grad_norm/total"]
    assert second["bound/grad_norm"] == pytest.approx(first["grad_norm/total"], rel=1e-12)
    expected = run({}, first["grad_norm/total"])
    free = run({}, 0.0)
    for key, parameter in clipped["parameters"].items():
        assert float((parameter - expected["parameters"][key]).abs().max()) < 1e-7, key
    assert max(float((p - free["parameters"][k]).abs().max()) for k, p in clipped["parameters"].items()) > 1e-5


@pytest.mark.timeout(300)
def test_a_token_that_is_far_off_does_not_cost_its_batch(models: dict[tuple[str, bool], Path]) -> None:
    """One token of each answer in the first group at a log ratio of about 710: exp of it has no value in fp64, that of
    89 none in fp32. Among them are answers of advantages above and below 0; the steps are taken."""
    model = models["qwen2", False]
    batch = make_batch(model, right_or_wrong=True)
    first, *others = batch.groups
    far = []
    for t in first.trajectories:
        behavior = t.behavior_logprobs.copy()
        behavior[int(t.loss_mask.nonzero()[0][-1])] = -712.0
        far.append(replace(t, behavior_logprobs=behavior))
    batch = replace(batch, groups=(replace(first, trajectories=tuple(far)), *others))
    keys = [{"method": "grpo"}, {"method": "mu_grpo"}, {"method": "m2po_clip"}, {"method": "gspo"}]
    keys += [{"method": "tis_token", "is_threshold": float("inf")}, {"is_level": "token", "is_threshold": float("inf")}]
    cases = [(make_config(model, 1, algorithm=algorithm), [batch]) for algorithm in keys]
    for algorithm, outcome in zip(
        keys, run_world(1, "learner.run_layouts:one_step_each", {"cases": cases}), strict=True
    ):
        (result,) = outcome["results"]
        assert not result.skipped and 0 < result.metrics["grad_norm/total"] < 1e12, algorithm
        assert np.isfinite(result.metrics["loss"])
        assert all(bool(p.isfinite().all()) for p in outcome["parameters"].values())


#: layouts, and methods: clips, weights of tokens, a statistic, an estimate of the norms; ranks -> what runs there
RECORDED: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo single": ("single", {"method": "grpo"}),
    "tis_token single": ("single", {"method": "tis_token"}),
    "proxy single": ("single", {"method": "vcpo", "opob_mode": "proxy"}),
    "m2po single": ("single", {"method": "m2po"}),
    "p3o anchored single": ("single", {"method": "p3o", "behavior_anchor": 0.5}),
    **{f"grpo {layout}": (layout, {"method": "grpo"}) for layout in ("tp2", "pp2", "dp2", "cp2", "pp2 vpp2")},
    "proxy pp2": ("pp2", {"method": "vcpo", "opob_mode": "proxy"}),
    "tis_sequence dp2 overlapped": ("dp2 overlapped", {"method": "tis_sequence"}),
    "grpo moe ep2": ("ep2", {"method": "grpo"}),
}
RECORDED_LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    **LAYOUTS,
    "cp2": (2, {"context": 2}),
    "pp2 vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "dp2 overlapped": (2, {}),
    "ep2": (2, {"expert": 2}),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", matrix(RECORDED, ("grpo single", "tis_token single", "proxy single", "grpo tp2")))
def test_recorded_norms_are_exact_and_change_nothing_else(
    name: str, models: dict[tuple[str, bool], Path], batches: dict[Any, Batch], tmp_path: Path
) -> None:
    """Gradient, parameters and every other number have the bits that they have without; two steps, so that what the
    first one leaves behind is seen."""
    layout, algorithm = RECORDED[name]
    ranks, parallel = RECORDED_LAYOUTS[layout]
    kind = ("moe" if "moe" in name else "qwen2", False)
    model, batch = models[kind], batches[kind, False, False]
    if "vpp2" in name:  # a layer a piece
        model = make_model_folder(tmp_path / "model", kind[0], layers=4)
    overlapped = {"distributed": True, "overlap_grad_reduce": True} if "overlapped" in name else {}
    configs = [
        make_config(
            model,
            ranks,
            parallel=parallel,
            train={"max_pack_tokens": 40},
            algorithm={**algorithm, "record_norms": recorded},
            optimizer=overlapped,
        )
        for recorded in (False, True)
    ]
    cases = [(config, [batch, replace(batch, step=1)]) for config in configs]
    without, found = run_world(ranks, "learner.run_layouts:one_step_each", {"cases": cases})
    for part in ("gradients", "parameters"):
        assert all(torch.equal(tensor, found[part][key]) for key, tensor in without[part].items())
    for before, after in zip(without["results"], found["results"], strict=True):
        assert {k: v for k, v in before.metrics.items() if not _of_norms(k)} == pytest.approx(
            {k: v for k, v in after.metrics.items() if not _of_norms(k)}, rel=0, abs=0, nan_ok=True
        )
        assert np.isnan(before.metrics["grad_norm/trajectory_mean"])
        assert [replace(row, grad_norm=0.0) for row in before.trajectories] == [
            replace(row, grad_norm=0.0) for row in after.trajectories
        ]
    policy, preset = Policy(model, batch), configs[1].algorithm.preset
    policy.normalize(preset.loss_normalization)
    norms = [
        norm if len({s.reward for s in policy.samples if s.group == sample.group}) > 1 else float("nan")
        for sample, norm in zip(
            policy.samples, policy.opob(weigh=token_weights if preset.is_level == "token" else None), strict=True
        )
    ]
    rows, metrics = found["results"][0].trajectories, found["results"][0].metrics
    assert [row.grad_norm for row in rows] == pytest.approx(norms, rel=5e-6, nan_ok=True)
    assert metrics["grad_norm/trajectory_mean"] == pytest.approx(np.nanmean(norms), rel=5e-6)
    assert metrics["grad_norm/trajectory_max"] == pytest.approx(np.nanmax(norms), rel=5e-6)


def _of_norms(name: str) -> bool:
    return name.startswith(("grad_norm/trajectory", "time/"))


def test_every_preset_is_held_to_an_oracle() -> None:
    """A method is one preset and one entry of ``OBJECTIVES``, or a case of its own where norms make the baseline."""
    for names in (CASES, DEFAULT):  # in the default suite, too
        assert set(METHODS) == {CASES[name].algorithm.get("method", "vcpo") for name in names}
    assert {name for name, preset in METHODS.items() if not preset.needs_norms} == set(OBJECTIVES)


def test_right_or_wrong_answers_share_a_product(models: dict[tuple[str, bool], Path]) -> None:
    """The cases above take the path of shared rewards: in a pack of four, two ratios at most."""
    for group in make_batch(models["qwen2", False], right_or_wrong=True).groups:
        assert len({t.reward for t in group.trajectories}) <= 2


def test_the_far_batch_closes_clips(models: dict[tuple[str, bool], Path]) -> None:
    """Otherwise the methods above would not differ, and the comparison would show little."""
    model = models["qwen2", False]
    policy = Policy(model, make_batch(model, spread=6.0))
    ratios = torch.cat([(s.logp - s.mu).detach().exp() for s in policy.samples])
    for low, high in ((0.8, 1.2), (0.5, 5.0), (0.2, 8.0)):
        outside = int(((ratios < low) | (ratios > high)).sum())
        assert 0 < outside < len(ratios)


def test_the_far_batch_truncates_turns_and_its_bound_grows(models: dict[tuple[str, bool], Path]) -> None:
    model = models["qwen2", False]
    samples = Policy(model, in_turns(make_batch(model, spread=6.0))).samples
    turns = [set(s.turn.tolist()) for s in samples]
    assert max(map(len, turns)) == 3 and min(map(len, turns)) == 1
    plain, grows, alone = (
        torch.cat([weigh(s) for s in samples])
        for weigh in (turn_weights, partial(turn_weights, length=2), token_weights)
    )
    assert 0 < int((plain == 8.0).sum()) < len(plain) / 2
    assert int((grows > 8.0).sum()) > 0 and len(set(grows[grows > 8.0].tolist())) > 3
    assert int((plain != alone).sum()) > len(plain) / 2


@pytest.mark.timeout(900)
def test_regularizers_accumulators_and_proxy(models: dict[tuple[str, bool], Path], tmp_path: Path) -> None:
    """KL to other weights and entropy equal autograd's and are in no norm; bf16 sums say their error."""
    model, other = models["qwen2", False], make_model_folder(tmp_path / "other", layers=2)
    with torch.no_grad():  # the reference: the same model, moved
        from safetensors.torch import load_file, save_file

        weights = load_file(other / "model.safetensors")
        generator = torch.Generator().manual_seed(1)
        moved = {k: v + 0.02 * torch.randn(v.shape, generator=generator) for k, v in weights.items()}
        save_file(moved, other / "model.safetensors", metadata={"format": "pt"})
    batch = make_batch(model)
    terms = {"kl_coef": 0.3, "kl_reference": "initial", "entropy_coef": 0.2}
    layouts = [("accumulate", *LAYOUTS[n]) for n in ("single", "tp2", "pp2", "dp2")]
    layouts += [("accumulate", 2, {"context": 2})]
    layouts += [
        ("deferred", *LAYOUTS["single"]),
        ("two_pass", *LAYOUTS["pp2"]),
        ("plain", *LAYOUTS["single"]),
        ("plain", *LAYOUTS["pp2"]),
    ]
    policy, reference = Policy(model, batch), Policy(other, batch)
    policy.normalize("sequence_token_mean")
    norms = policy.opob()
    kl = torch.stack(
        [
            s.coefficient * ((r.logp.detach() - s.logp).exp() - (r.logp.detach() - s.logp) - 1).sum()
            for s, r in zip(policy.samples, reference.samples, strict=True)
        ]
    ).sum()
    entropy = torch.stack([s.coefficient * s.entropy.sum() for s in policy.samples]).sum()
    exact = policy.gradient(policy.loss(sequence_weighted) + 0.3 * kl - 0.2 * entropy)
    alone = policy.gradient(policy.loss(sequence_weighted))
    policy.advantages("group_mean", True)
    plain = policy.gradient(policy.loss(sequence_weighted) + 0.3 * kl - 0.2 * entropy)
    for ranks in (1, 2):
        mine = [(mode, parallel) for mode, size, parallel in layouts if size == ranks]
        cases = []
        for mode, parallel in mine:
            algorithm = terms | ({"method": "vcpo_ess_only"} if mode == "plain" else {"opob_mode": mode})
            cases.append((make_config(other, ranks, parallel=parallel, algorithm=algorithm), model, [batch]))
        others = [({"opob_mode": "proxy"}, parallel) for parallel in PROXY[ranks]]
        others += [({"opob_accumulator_dtype": "bfloat16"}, {})] if ranks == 1 else []
        cases += [
            (make_config(model, ranks, parallel=parallel, algorithm=algorithm), model, [batch])
            for algorithm, parallel in others
        ]
        results = run_world(ranks, "learner.run_layouts:steps_from_other_weights", {"cases": cases}, timeout_s=400)
        for (mode, _), outcome in zip(mine, results, strict=False):
            assert_gradients(outcome, plain if mode == "plain" else exact)
            metrics = outcome["results"][-1].metrics
            tokens = sum(len(s.logp) for s in policy.samples)
            k3 = sum(
                float(((r.logp - s.logp).exp() - (r.logp - s.logp) - 1).detach().sum())
                for s, r in zip(policy.samples, reference.samples, strict=True)
            )
            assert metrics["kl/reference"] == pytest.approx(k3 / tokens, rel=1e-3)
            if mode != "plain":
                found = outcome["results"][-1].trajectories
                for row, norm in zip(found, norms, strict=True):
                    assert row.grad_norm != row.grad_norm or row.grad_norm == pytest.approx(norm, rel=5e-6)
        for outcome in results[len(mine) : len(mine) + len(PROXY[ranks])]:
            _check_proxy(policy, outcome)
        if ranks == 1:
            error = results[-1]["results"][-1].metrics["baseline/accumulator_error"]
            assert 1e-4 < error < 2e-2
            assert_gradients(results[-1], alone, tolerance=1e-2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "kind"), matrix([(1, "single"), (2, "tensor"), (2, "context")], [(1, "single")]))
def test_the_proxy_has_the_weights_of_turns_in_its_norms(
    ranks: int, kind: str, models: dict[tuple[str, bool], Path]
) -> None:
    model = models["qwen2", False]
    batch = in_turns(make_batch(model, spread=6.0))
    algorithm = {"opob_mode": "proxy", "is_level": "turn"}
    config = make_config(model, ranks, parallel={kind: 2} if ranks == 2 else {}, algorithm=algorithm)
    (outcome,) = run_world(ranks, "learner.run_layouts:one_step_each", {"cases": [(config, [batch])]})
    policy = Policy(model, batch)
    policy.normalize("sequence_token_mean")
    _check_proxy(policy, outcome, turn_weights)


def _check_proxy(
    policy: Policy, outcome: dict[str, Any], weigh: Callable[[Sample], torch.Tensor] | None = None
) -> None:
    """Baselines from sum_t |onehot - p|^2 / T^2, formed here from plain softmaxes; the gradient that goes with them.
    ``weigh`` gives weights of tokens, where they are of parts of an answer."""
    rows = outcome["results"][-1].trajectories
    assert all(row.grad_norm != row.grad_norm for row in rows)  # no exact norm is claimed
    for group, first in zip(policy.groups(), range(0, 16, 4), strict=True):
        rewards = torch.tensor([s.reward for s in group], dtype=torch.float64)
        if len(set(rewards.tolist())) == 1:
            continue
        weights = [torch.ones(()) if weigh is None else weigh(s) for s in group]
        squares = [s.coefficient**2 * (w**2 * s.score_squares).sum() for s, w in zip(group, weights, strict=True)]
        logs = [float((s.logp - s.mu).sum().detach()) if weigh is None else 0.0 for s in group]
        shares = [2 * log + float(square.log()) for log, square in zip(logs, squares, strict=True)]
        b = float((torch.softmax(torch.tensor(shares, dtype=torch.float64), 0) * rewards).sum())
        for row in rows[first : first + 4]:
            assert row.baseline == pytest.approx(b, abs=2e-5)
        std = float(np.std([s.reward for s in group]))
        for s in group:
            s.advantage = (s.reward - b) / std
    objective = sequence_weighted if weigh is None else (lambda s: weigh(s) * s.advantage * s.logp)
    assert_gradients(outcome, policy.gradient(policy.loss(objective)))
