"""The names in ``metrics.jsonl``: what each means, its unit, and how several observations become one number.

Who measures does not average by hand: it hands raw observations to ``StepMetrics.observe``, and the table here
says whether the row holds their mean, their maximum, ... A vector that is a distribution is observed under each of
its names at once with ``StepMetrics.distribution``.

Not-a-number is never averaged away: one nan among the observations makes the result nan, for every reducer. What
is legitimately absent (the gradient norm of a trajectory without a backward) is left out by who observes.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _p95(values: Sequence[float]) -> float:
    """Nearest rank: the smallest observed value that at least 95 % of the observations do not exceed."""
    return sorted(values)[(95 * len(values) + 99) // 100 - 1]


def _last(values: Sequence[float]) -> float:
    return values[-1]


#: Name of a reducer -> what it makes of one or more observations, none of them nan.
REDUCERS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "last": _last,
    "mean": _mean,
    "sum": math.fsum,
    "min": min,
    "max": max,
    "p95": _p95,
}


def reduce(reducer: str, values: Sequence[float]) -> float:
    """One number from the observations of a step; nan as soon as one of them is nan.

    ValueError when there is no observation: an absent metric is left out of the row, not made 0.
    """
    if not values:
        raise ValueError(f"reducer {reducer!r} needs at least one observation")
    if any(math.isnan(value) for value in values):
        return math.nan
    if any(math.isinf(value) for value in values) and reducer in ("mean", "sum"):
        return sum(values)  # fsum refuses inf - inf; the plain sum makes it nan
    return REDUCERS[reducer](values)


@dataclass(frozen=True, slots=True)
class Metric:
    """``unit`` is "" for pure numbers; ``reducer`` is a key of ``REDUCERS``."""

    description: str
    unit: str = ""
    reducer: str = "last"


#: Every key that a row of ``metrics.jsonl`` may hold. Counters ("rollouts/...") count trajectories since the start
#: of the run, attempts before a resume included; everything else speaks of the one step of its row.
METRICS: Mapping[str, Metric] = {
    "step": Metric("index of the optimizer step, from 0; it makes policy version step + 1"),
    "policy_version": Metric("number of the policy version that the step made"),
    "loss": Metric("- sum of (R_i - b_g) / std_g w_i times the normalised log-prob", reducer="sum"),
    "reward/mean": Metric("reward of the trajectories trained on", reducer="mean"),
    "eval/accuracy": Metric("mean reward over the held-out prompts, one sample each; only where it was evaluated"),
    "eval/version": Metric("number of the policy version that eval/accuracy speaks of"),
    "ess/ratio": Metric("effective sample size of the raw sequence weights over N, in [1/N, 1]"),
    "ess/ratio_truncated": Metric("the same with weights truncated at is_threshold"),
    "ess/lr_scale": Metric("factor on the learning rate: min(1, ratio / base_ess_ratio) ^ p"),
    "lr/effective": Metric("learning rate used: schedule times ess/lr_scale"),
    "weight/max": Metric("largest truncated importance weight", reducer="max"),
    "grad_norm/total": Metric("norm of the whole gradient before clipping"),
    "grad_norm/trajectory_mean": Metric("norm of a trajectory's unweighted score gradient |g_i|", reducer="mean"),
    "grad_norm/trajectory_max": Metric("largest |g_i|", reducer="max"),
    "baseline/fallbacks": Metric("groups whose OPOB baseline had no finite term: group mean used", "groups", "sum"),
    "baseline/accumulator_error": Metric(
        "relative error of bf16 accumulators against fp32 on one row a parameter; 0 in fp32", reducer="max"
    ),
    "groups/zero_variance": Metric("groups of equal rewards: no backward", "groups", "sum"),
    "kl/behavior": Metric("mean over trained tokens of log mu - log pi, estimate of KL(mu, pi)", "nats", "mean"),
    "mismatch/mean": Metric(
        "mean |log pi - log mu| over trained tokens that the version before the step sampled", "nats", "mean"
    ),
    "mismatch/max": Metric("the largest of them", "nats", "max"),
    "mismatch/tokens": Metric("trained tokens that the version before the step sampled", "tokens", "sum"),
    "kl/reference": Metric("mean over trained tokens of the estimate of KL(pi, reference)", "nats", "mean"),
    "entropy": Metric("entropy of the policy, mean over trained tokens", "nats", "mean"),
    "experts/balance": Metric(
        "mean over layers of E sum f_e P_e, f_e and P_e an expert's shares of tokens and of probability: 1 when even; "
        "only with global_aux_loss",
        reducer="mean",
    ),
    "staleness/mean": Metric("learner version at use - oldest version that sampled a token", "versions", "mean"),
    "staleness/p95": Metric("95th percentile of the staleness, nearest rank", "versions", "p95"),
    "staleness/max": Metric("largest staleness", "versions", "max"),
    "staleness/admitted": Metric("lag that may be admitted now; only with staleness.adaptive", "versions"),
    "rollouts/generated": Metric("trajectories admitted", "trajectories"),
    "rollouts/queued": Metric("trajectories admitted and not ended", "trajectories"),
    "rollouts/trained": Metric("trajectories trained on", "trajectories"),
    "rollouts/dropped": Metric("trajectories dropped, for any reason", "trajectories"),
    "rollouts/failed": Metric("trajectories failed, for any reason", "trajectories"),
    "tokens/trained": Metric("sampled tokens trained on", "tokens", "sum"),
    "tokens/padded": Metric("tokens of padding that went through the model", "tokens", "sum"),
    "time/step": Metric("from one step's end to the next one's", "s"),
    "time/wait_batch": Metric("the learner waited for a batch", "s", "sum"),
    "time/forward_backward": Metric("forward and backward of all micro-batches", "s", "sum"),
    "time/sync": Metric("longest update of servers that ended since the row before, 0 if none", "s", "sum"),
    "sync/verified": Metric(
        "updates of servers whose checksums agreed, since the row before; only with rollout.verify_sync",
        "updates",
        "sum",
    ),
    "time/sync_stall": Metric("learner rank 0 stood still to copy the weights that this step starts from", "s"),
    "step/skipped": Metric("1 when parameters were left unchanged (non-finite step), else 0"),
}


class StepMetrics:
    """Collects the observations of one step; ``row`` gives the metrics that were observed."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def observe(self, name: str, *values: float) -> None:
        """Add observations under ``name``; ValueError with the nearest known name when it is not in ``METRICS``."""
        if name not in METRICS:
            near = difflib.get_close_matches(name, METRICS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown metric {name!r}{hint} (known ones are in observability/metrics.py)")
        self._values.setdefault(name, []).extend(float(value) for value in values)

    def distribution(self, prefix: str, values: Iterable[float]) -> None:
        """Observe ``values`` under every documented ``prefix``/min, /mean, /p95 and /max."""
        known = [name for kind in ("min", "mean", "p95", "max") if (name := f"{prefix}/{kind}") in METRICS]
        if not known:
            raise ValueError(f"no metric {prefix}/min, /mean, /p95 or /max is documented")
        values = tuple(values)
        for name in known:
            self.observe(name, *values)

    def row(self) -> dict[str, float]:
        """Reduced values in the order of the table; names without an observation are left out."""
        observed = {name: values for name in METRICS if (values := self._values.get(name))}
        return {name: reduce(METRICS[name].reducer, values) for name, values in observed.items()}
