"""A whole step against fp64: norms, baselines, gradients and parameters, of one rank and of layouts of several."""

from __future__ import annotations

from typing import Any

from tests.gpu.checklist import Found, Missed, Place, require
from tests.gpu.ranks import is_first

#: family, tied
Kind = tuple[str, bool]
MODES = ("accumulate", "deferred", "two_pass")
EXACT: dict[str, float] = {
    "loss": 1e-4,
    "log ratio": 1e-4,
    "norm": 5e-5,
    "baseline": 1e-4,
    "ess": 5e-5,
    "rate": 5e-5,
    "gradient": 1e-4,
    "parameter": 1e-3,
}
#: What activations of 8 bits leave after four layers.
ROUNDED: dict[str, float] = {"log ratio": 0.3, "norm": 0.03, "baseline": 0.3, "gradient": 0.15, "parameter": 0.2}
#: name -> (sections of the configuration, model)
LAYOUTS: dict[str, tuple[dict[str, dict[str, Any]], Kind]] = {
    "PP 2": ({"parallel": {"pipeline": 2}}, ("qwen2", False)),
    "PP 2, tied": ({"parallel": {"pipeline": 2}}, ("qwen3", True)),
    "PP 2 x VPP 2": ({"parallel": {"pipeline": 2, "virtual_pipeline": 2}}, ("qwen2", False)),
    "TP 2": ({"parallel": {"tensor": 2, "sequence_parallel": True}}, ("qwen2", False)),
    "DP 2": ({"optimizer": {"distributed": True, "overlap_grad_reduce": True}}, ("qwen2", False)),
    "CP 2": ({"parallel": {"context": 2}}, ("qwen2", False)),
    "EP 2": ({"parallel": {"expert": 2}}, ("moe", False)),
}


def made_models(place: Place) -> dict[str, Any]:
    """``models``: folder, batch and oracle of every kind. In the parent, by transformers on CPUs: where the learner has
    made Megatron run on CPUs, torch's factories are not what they were, and transformers' rotary frequencies are
    memory that nobody has written."""
    import transformers

    from tests.learner.scenarios import make_batch, make_config, make_model_folder, oracle_step

    transformers.logging.disable_progress_bar()
    models = {}
    for family, tied in (("qwen2", False), ("qwen3", True), ("moe", False)):
        model = make_model_folder(place.folder / f"{family}{tied}", family, tied=tied, rounded=True)
        batch = make_batch(model)
        models[family, tied] = (model, batch, oracle_step(model, batch, make_config(model, 1)))
    return {"models": models}


def exact(place: Place, models: dict[Kind, Any]) -> Found:
    """In float32: three models by each exact mode."""
    cases = [(kind, {"model": {"dtype": "float32"}, "algorithm": {"opob_mode": m}}) for kind in models for m in MODES]
    return against_oracle(place, models, cases, EXACT)


def rounded(place: Place, models: dict[Kind, Any]) -> Found:
    """In bfloat16: one model by each exact mode."""
    kinds = [("qwen2", False)]
    cases = [(kind, {"model": {"dtype": "bfloat16"}, "algorithm": {"opob_mode": m}}) for kind in kinds for m in MODES]
    return against_oracle(place, models, cases, ROUNDED)


def layout(place: Place, models: dict[Kind, Any], name: str) -> Found:
    """In float32 and in one layout, by two modes."""
    sections, kind = LAYOUTS[name]
    model = {"model": {"dtype": "float32"}}
    cases = [(kind, {**model, **sections, "algorithm": {"opob_mode": mode}}) for mode in ("accumulate", "deferred")]
    return against_oracle(place, models, cases, EXACT)


def against_oracle(
    place: Place,
    models: dict[Kind, Any],
    cases: list[tuple[Kind, dict[str, dict[str, Any]]]],
    limits: dict[str, float],
) -> Found:
    """The largest difference of all ``cases`` by what differs, each within its limit; of rank 0, nothing elsewhere."""
    from tests.learner.run_layouts import one_step_each
    from tests.learner.scenarios import make_config

    runs = [(make_config(models[kind][0], place.ranks, **sections), [models[kind][1]]) for kind, sections in cases]
    outcomes = one_step_each(runs)
    if not is_first():
        return Found("")
    worst: dict[str, float] = {}
    by_case = {}
    for (kind, sections), outcome in zip(cases, outcomes, strict=True):
        found = differences(outcome, models[kind][2])
        by_case[f"{kind[0]}{' tied' * kind[1]} {sections['algorithm']['opob_mode']}"] = found
        worst = {key: max(value, worst.get(key, 0.0)) for key, value in found.items()}
    text = ", ".join(require(worst[key], limit, key) for key, limit in limits.items())
    return Found(text, {"limits": limits, "differences": by_case})


def differences(outcome: dict[str, Any], oracle: Any) -> dict[str, float]:
    """Largest differences of one step. loss, norm, ess, rate: relative; gradient: relative to the largest of all;
    parameter: mean of every tensor's, relative to the mean of what the step has changed in it."""
    import torch

    result = outcome["results"][0]
    if result.skipped:
        raise Missed(f"the step was skipped: {result.skipped}")
    metrics, rows = result.metrics, result.trajectories

    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=torch.float64)

    norms = column("grad_norm")
    known = ~norms.isnan()
    if int(known.sum()) != 12:  # the members of one group of four have equal rewards
        raise Missed(f"{int(known.sum())} norms where 12 trajectories have one")
    largest = max(float(g.abs().max()) for g in oracle.gradients.values())
    gradients = {k: g.cpu().double() for k, g in outcome["gradients"].items()}
    if missing := set(oracle.gradients) - set(gradients) - {"lm_head.weight"}:  # tied: one tensor with the embedding
        raise Missed(f"no gradient of {', '.join(sorted(missing))}")
    return {
        "loss": abs(metrics["loss"] / oracle.loss - 1),
        "log ratio": float((column("log_ratio") - oracle.log_ratios).abs().max()),
        "norm": float((norms[known] / oracle.norms[known] - 1).abs().max()),
        "baseline": float((column("baseline") - oracle.baselines).abs().max()),
        "ess": abs(metrics["ess/ratio"] / oracle.ess - 1),
        "rate": abs(metrics["lr/effective"] / oracle.learning_rate - 1),
        "gradient": max(float((gradients[k] - oracle.gradients[k]).abs().max()) for k in gradients) / largest,
        "parameter": max(
            float((parameter.cpu().double() - oracle.parameters[k]).abs().mean()) / oracle.learning_rate
            for k, parameter in outcome["parameters"].items()
            if k in oracle.gradients
        ),
    }


def packed_as_alone(place: Place) -> Found:
    """Several trajectories a micro-batch, in blocks that do not see each other: what each gives by itself."""
    from .bench import Bench

    texts, figures = [], {}
    for dtype, limit in (("float32", 2e-5), ("bfloat16", 0.05)):
        bench = Bench(place, dtype)
        packed, alone = (bench.gradient({}, pack) for pack in (4096, 1))
        bench.close()
        figures[dtype] = {"gradient": relative(packed[1], alone[1]), "norm": norm_difference(packed[0], alone[0])}
        texts.append(f"{dtype}: " + ", ".join(require(v, limit, k) for k, v in figures[dtype].items()))
    return Found("; ".join(texts), figures)


def modes_agree(place: Place) -> Found:
    """accumulate, deferred and two_pass on a larger model: one gradient. proxy: the same log ratios."""
    from .bench import Bench

    texts, figures = [], {}
    for dtype, limit in (("float32", 2e-5), ("bfloat16", 0.05)):
        bench = Bench(place, dtype)
        found = {mode: bench.gradient({"opob_mode": mode}, 4096) for mode in (*MODES, "proxy")}
        bench.close()
        own = {mode: relative(found[mode][1], found["accumulate"][1]) for mode in MODES[1:]}
        ratios = [[row.log_ratio for row in found[mode][0].trajectories] for mode in ("proxy", "accumulate")]
        own["log ratio of proxy"] = max(abs(a - b) for a, b in zip(*ratios, strict=True))
        figures[dtype] = own
        texts.append(f"{dtype}: " + ", ".join(require(v, limit, k) for k, v in own.items()))
    return Found("; ".join(texts), figures)


def relative(gradients: list[Any], reference: list[Any]) -> float:
    """The largest |a - b| / |b| of two lists of tensors."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(gradients, reference, strict=True))


def norm_difference(result: Any, reference: Any) -> float:
    """The largest relative difference of trajectories' gradient norms."""
    pairs = zip(result.trajectories, reference.trajectories, strict=True)
    return max(abs(a.grad_norm / b.grad_norm - 1) for a, b in pairs)
