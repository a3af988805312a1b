"""The names in ``metrics.jsonl``: what each means, its unit, and how several observations become one number.

The orchestrator does not average by hand: it hands raw observations to ``StepMetrics.observe``, and the table here
says whether the row holds their mean, their maximum, ... A vector that is a distribution is observed under each of
its names at once with ``StepMetrics.distribution``. The learner's numbers are those of a whole batch, over all ranks,
when they come: ``learner/step/results.py`` makes them, and for them the reducer only says what they are.

Not-a-number is never averaged away: one nan among the observations makes the result nan, for every reducer. What
is legitimately absent (the gradient norm of a trajectory without a backward) is left out by who observes.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .buckets import AGES, FEWEST, LENGTHS


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
    """``unit`` is "" for pure numbers; ``reducer`` is a key of ``REDUCERS``. ``healthy``: values of a run that is well;
    ``otherwise``: what other values mean, and what to do. All of it is in docs/metrics.md, which is made from here."""

    description: str
    unit: str = ""
    reducer: str = "last"
    healthy: str = ""
    otherwise: str = ""


_BY_AGE = {
    bucket.key: Metric(
        f"`ess/ratio` of those trajectories alone whose oldest token is {bucket.range} versions old; "
        f"absent for fewer than {FEWEST}",
        healthy="1 but for mismatch" if bucket.most == 0 else "at most that of younger ones",
        otherwise="near 1/N: what is so old no longer counts; a smaller `staleness.max_staleness`",
    )
    for bucket in AGES
}
_BY_LENGTH = {
    bucket.key: Metric(
        f"`ess/ratio` of those trajectories alone that have {bucket.range} sampled tokens; "
        f"absent for fewer than {FEWEST}",
        healthy="at most that of shorter ones",
        otherwise="falls with the length at any age: mismatch of learner and servers (method.md)",
    )
    for bucket in LENGTHS
}

#: Every key that a row of ``metrics.jsonl`` may hold. Counters ("rollouts/...") count trajectories since the start
#: of the run, attempts before a resume included; everything else speaks of the one step of its row.
METRICS: Mapping[str, Metric] = {
    "step": Metric(
        "index of the optimizer step, from 0; it makes policy version step + 1",
        healthy="counts up by 1",
    ),
    "policy_version": Metric(
        "number of the policy version that the step made",
        healthy="step + 1",
    ),
    "loss": Metric(
        "- sum of (R_i - b_g) / std_g w_i times the normalised log-prob",
        reducer="sum",
        healthy="around 0 with either sign: it is no measure of progress",
        otherwise="look at `eval/accuracy`",
    ),
    "reward/mean": Metric(
        "reward of the trajectories trained on",
        reducer="mean",
        healthy="rises; it is up to `max_staleness` versions old",
        otherwise="flat from the start: is the reward ever above 0? see `groups/zero_variance`",
    ),
    "eval/accuracy": Metric(
        "mean reward over held-out samples, one a prompt, that did not fail; only where it was evaluated",
        healthy="rises, with a standard error of sqrt(p (1 - p) / prompts)",
        otherwise="falls while `reward/mean` rises: the reward is being gamed, or the prompts are few",
    ),
    "eval/failed": Metric(
        "held-out samples that failed, which eval/accuracy leaves out",
        unit="samples",
        healthy="0",
        otherwise="`vcpo report RUN_DIR --eval` says why; above 5 % of `eval/samples` the version is never `best`",
    ),
    "eval/samples": Metric(
        "held-out samples of the evaluation, failed ones included",
        unit="samples",
        healthy="the number of held-out prompts",
    ),
    "eval/version": Metric(
        "number of the policy version that eval/accuracy speaks of",
        healthy="a multiple of `train.eval_every`",
    ),
    "ess/ratio": Metric(
        "effective sample size of the raw sequence weights over N, in [1/N, 1]",
        healthy="0.6 to 1 in nine steps of ten",
        otherwise=(
            "below 0.3 for many steps: `optimizer.lr` is too high for `staleness.max_staleness`; lower "
            "either, or `staleness.adaptive`"
        ),
    ),
    "ess/ratio_truncated": Metric(
        "the same with weights truncated at is_threshold",
        healthy="near `ess/ratio`",
        otherwise="far above it: a few weights beyond `algorithm.is_threshold` make the difference",
    ),
    "ess/ratio_on_policy": Metric(
        "the ratio that mismatch alone would give answers of these lengths, by the noise of tokens of the current "
        'version; absent before the first one, and with algorithm.mismatch = "recorded"',
        healthy="1 in float32; falls as answers grow",
        otherwise=(
            "`ess/ratio` is as low: mismatch of learner and servers, not staleness, takes the rate (method.md); "
            '`base_ess_ratio = "auto"` divides by it'
        ),
    ),
    **_BY_AGE,
    **_BY_LENGTH,
    "ess/lr_scale": Metric(
        "factor on the learning rate: min(1, ratio / base_ess_ratio) ^ p, times `bound/lr_scale` where there is one",
        healthy="0.8 to 1",
        otherwise="as for `ess/ratio`; always 1: `algorithm.ess_scaling` is off",
    ),
    "bound/lr_scale": Metric(
        "factor on the learning rate by `algorithm.step_bound`, in [1e-4, 1]; it opens from 0.02 in the first steps",
        healthy="at 1, or steady below it",
        otherwise="below 0.1 for long: the bound holds, but `optimizer.lr` is far too high for the lag",
    ),
    "bound/kl": Metric(
        "estimate of KL(behaviour, policy) of an answer, with weights truncated at is_threshold",
        unit="nats",
        healthy="below `algorithm.step_bound_target` times `bound/entropy`, on average",
        otherwise="as for `bound/lr_scale`",
    ),
    "bound/entropy": Metric(
        "mean of -log mu of an answer: the entropy of the behaviour",
        unit="nats",
        healthy="falls as the policy becomes sure",
    ),
    "bound/grad_norm": Metric(
        "largest norm of this step's gradient, by `algorithm.spike_clip` and `optimizer.clip_grad`",
        healthy="well above `grad_norm/total` in most steps",
        otherwise="always below it: gradients grow; see `ess/ratio`",
    ),
    "lr/effective": Metric(
        "learning rate used: schedule times ess/lr_scale",
        healthy="follows the schedule",
    ),
    "weight/mean": Metric(
        "mean of the truncated importance weights: of trajectories where is_level is sequence, else of sampled tokens, "
        "each with its own or its turn's",
        healthy="near 1, its expectation; less where `algorithm.is_threshold` truncates",
        otherwise=(
            "below 0.1, of which the log warns: the policy has left its data, or learner and servers disagree (see "
            "`mismatch/mean`); below 1e-6 the step is skipped"
        ),
    ),
    "weight/max": Metric(
        "largest truncated importance weight",
        reducer="max",
        healthy="1 to 4",
        otherwise="at `algorithm.is_threshold` step after step: as for `ess/ratio`",
    ),
    "grad_norm/total": Metric(
        "norm of the whole gradient before clipping",
        healthy="mostly below `optimizer.clip_grad`",
        otherwise=(
            "always above it: every step is clipped; lower `optimizer.lr`, or raise `optimizer.clip_grad`; above 1e19 "
            "the step is skipped"
        ),
    ),
    "grad_norm/trajectory_mean": Metric(
        "norm of a trajectory's unweighted score gradient |g_i|, of groups with variance; only with an OPOB baseline "
        "or algorithm.record_norms",
        reducer="mean",
        healthy="falls as the policy becomes sure",
    ),
    "grad_norm/trajectory_max": Metric(
        "largest |g_i|",
        reducer="max",
        healthy="within a few tens of the mean",
        otherwise=(
            "one trajectory dominates: OPOB takes its reward as baseline; very long answers want "
            '`loss_normalization = "sequence_token_mean"`'
        ),
    ),
    "baseline/fallbacks": Metric(
        "groups whose OPOB baseline had no finite term: group mean used",
        unit="groups",
        reducer="sum",
        healthy="0",
        otherwise="norms of 0 or not finite: is a layer frozen, is `step/skipped` 1?",
    ),
    "baseline/accumulator_error": Metric(
        "relative error of bf16 accumulators against fp32 on one row a parameter; 0 in fp32",
        reducer="max",
        healthy="below 0.01",
        otherwise='`algorithm.opob_accumulator_dtype = "float32"`',
    ),
    "groups/zero_variance": Metric(
        "groups of equal rewards (max R - min R at most 1e-6 max |R|): no backward",
        unit="groups",
        reducer="sum",
        healthy="well below `train.groups_per_step` until the end",
        otherwise=(
            "all of them at the start: prompts are too hard or too easy; `train.drop_zero_variance`, a "
            "larger `train.group_size`"
        ),
    ),
    "kl/behavior": Metric(
        "mean over trained tokens of log mu - log pi, estimate of KL(mu, pi)",
        unit="nats",
        reducer="mean",
        healthy="0 to 0.1",
        otherwise="large although answers are young: look at `mismatch/mean`",
    ),
    "kl/behavior_trajectory": Metric(
        "the same of whole trajectories: mean of the sum of log mu - log pi",
        unit="nats",
        reducer="mean",
        healthy="below 0.7; grows with the lag, and with the length of answers",
        otherwise="above 1: the policy has left its data, whatever `ess/ratio` says; lower `optimizer.lr`",
    ),
    "mismatch/mean": Metric(
        "mean |log pi - log mu| over trained tokens that the version before the step sampled",
        unit="nats",
        reducer="mean",
        healthy="rounding: 1e-6 in float32",
        otherwise="above `observability.mismatch_warning` the log names likely causes (method.md)",
    ),
    "mismatch/max": Metric(
        "the largest of them",
        unit="nats",
        reducer="max",
        healthy="a few times the mean",
        otherwise="one token far off: a sampling option that changes the distribution",
    ),
    "mismatch/tokens": Metric(
        "trained tokens that the version before the step sampled",
        unit="tokens",
        reducer="sum",
        healthy="above 0 now and then",
        otherwise="always 0: nothing is young enough to be compared; evaluate at `staleness.max_staleness = 0` once",
    ),
    "mismatch/spread": Metric(
        "standard deviation over trajectories of the mismatch: the sum of the learner's log-prob, recorded when the "
        'group was complete, less the server\'s; only with algorithm.mismatch = "recorded"',
        unit="nats",
        healthy="`mismatch/mean` times the root of the answers' length, and more with `mismatch/versions`",
        otherwise="far above it: drift between sampling and record; the weights do not see it, tokens correct for it",
    ),
    "mismatch/versions": Metric(
        "version whose log-probs of a token the learner recorded - version that sampled it, mean over sampled tokens; "
        'only with algorithm.mismatch = "recorded"',
        unit="versions",
        healthy="well below `staleness/token_mean`",
        otherwise="near it: most of the lag passes while answers are sampled, and counts as mismatch",
    ),
    "lag/spread": Metric(
        "standard deviation over trajectories of the lag: the sum of log pi less the learner's recorded log-prob; only "
        'with algorithm.mismatch = "recorded"',
        unit="nats",
        healthy="below 0.5",
        otherwise="as for `ess/ratio`, which follows it: exp(- spread^2) where it is normal",
    ),
    "kl/reference": Metric(
        "mean over trained tokens of the estimate of KL(pi, reference)",
        unit="nats",
        reducer="mean",
        healthy="grows slowly; 0 without `algorithm.kl_reference`",
        otherwise="raise `algorithm.kl_coef` or lower `optimizer.lr`",
    ),
    "entropy": Metric(
        "entropy of the policy, mean over trained tokens",
        unit="nats",
        reducer="mean",
        healthy="falls slowly",
        otherwise=(
            "near 0 while accuracy stands still: the policy has collapsed; lower `optimizer.lr`, set "
            "`algorithm.entropy_coef`"
        ),
    ),
    "experts/balance": Metric(
        "mean over layers of E sum f_e P_e, f_e and P_e an expert's shares of tokens and of "
        "probability: 1 when even; only with global_aux_loss",
        reducer="mean",
        healthy="near 1",
        otherwise="raise `algorithm.global_aux_loss`",
    ),
    "staleness/mean": Metric(
        "learner version at use - oldest version that sampled a token",
        unit="versions",
        reducer="mean",
        healthy="below `max_staleness` once the queue of the start is used up",
        otherwise="at the bound: the learner is the slower side; more learner ranks, or a smaller bound costs no time",
    ),
    "staleness/p95": Metric(
        "95th percentile of the staleness, nearest rank",
        unit="versions",
        reducer="p95",
        healthy="near the mean",
        otherwise="far above it: a few very long answers; `rollout.max_new_tokens`",
    ),
    "staleness/max": Metric(
        "largest staleness",
        unit="versions",
        reducer="max",
        healthy="never above `staleness.max_staleness`",
        otherwise="that would be a defect: please report it",
    ),
    "staleness/token_mean": Metric(
        "learner version at use - version that sampled the token, mean over sampled tokens",
        unit="versions",
        reducer="last",
        healthy="near `staleness/mean`",
        otherwise="below it: the bound is used up by the first tokens of long answers; above it: by the long answers",
    ),
    "staleness/admitted": Metric(
        "lag that may be admitted now; only with staleness.adaptive",
        unit="versions",
        healthy="moves between 0 and the bound",
        otherwise="always 0: the run is synchronous; lower `optimizer.lr`",
    ),
    "rollouts/generated": Metric(
        "trajectories admitted",
        unit="trajectories",
        healthy="grows steadily",
    ),
    "rollouts/queued": Metric(
        "trajectories admitted and not ended",
        unit="trajectories",
        healthy="at most (max_staleness + 1) x batch",
        otherwise="near 0: servers are the slower side",
    ),
    "rollouts/trained": Metric(
        "trajectories trained on",
        unit="trajectories",
        healthy="grows by a batch a step",
    ),
    "rollouts/dropped": Metric(
        "trajectories dropped, for any reason",
        unit="trajectories",
        healthy="0, or few after a resume",
        otherwise="`vcpo report RUN_DIR` says why: `expired` wants a longer `staleness.wait_s`",
    ),
    "rollouts/failed": Metric(
        "trajectories failed, for any reason",
        unit="trajectories",
        healthy="0",
        otherwise="`vcpo report RUN_DIR` says why; environments.md",
    ),
    "tokens/trained": Metric(
        "sampled tokens trained on",
        unit="tokens",
        reducer="sum",
        healthy="answers x their length",
        otherwise="at the limit: answers are cut at `rollout.max_new_tokens`",
    ),
    "tokens/padded": Metric(
        "tokens of padding that went through the model",
        unit="tokens",
        reducer="sum",
        healthy="below a tenth of all tokens",
        otherwise="raise `train.max_pack_tokens`; layouts that cut packs pad more (layouts.md)",
    ),
    "time/step": Metric(
        "from one step's end to the next one's",
        unit="s",
        healthy="`time/forward_backward` and little more",
        otherwise="see the four below",
    ),
    "time/wait_batch": Metric(
        "the learner waited for a batch",
        unit="s",
        reducer="sum",
        healthy="near 0",
        otherwise="servers are the slower side: more of them, or a larger `staleness.max_staleness`",
    ),
    "time/score": Metric(
        'the learner scored complete groups, a part of time/wait_batch; only with algorithm.mismatch = "recorded"',
        unit="s",
        reducer="sum",
        healthy="a third of `time/forward_backward`, or less",
        otherwise="groups come one by one: fewer and larger ones (`train.group_size`) fill the learner's ranks better",
    ),
    "time/forward_backward": Metric(
        "forward and backward of all micro-batches",
        unit="s",
        reducer="sum",
        healthy="most of `time/step`",
        otherwise="learner ranks, layout, `algorithm.opob_mode` (per_trajectory_gradients.md)",
    ),
    "time/sync": Metric(
        "longest update of servers that ended since the row before, 0 if none",
        unit="s",
        reducer="sum",
        healthy="below `time/step`: it runs beside the next step",
        otherwise="above it, versions arrive late and staleness grows",
    ),
    "sync/verified": Metric(
        "updates of servers whose checksums agreed, since the row before; only with rollout.verify_sync",
        unit="updates",
        reducer="sum",
        healthy="servers times versions, over several rows",
        otherwise="0 row after row: nothing could be compared, see weight_sync.md",
    ),
    "time/sync_stall": Metric(
        "learner rank 0 stood still to copy the weights that this step starts from",
        unit="s",
        healthy="the time of one copy of its shards, well below `time/step`",
        otherwise="far above it, versions wait to be taken over: `time/sync` is too long, see weight_sync.md",
    ),
    "step/skipped": Metric(
        "1 when parameters were left unchanged (non-finite step, vanishing weights), else 0",
        healthy="0",
        otherwise=(
            "once in a while: harmless; 10 in a row end the run: lower `optimizer.lr`, look at "
            "`grad_norm/trajectory_max` of the steps before"
        ),
    ),
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
