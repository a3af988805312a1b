"""What other baselines would have given: the second moment of the gradient estimator, from recorded norms and weights.

With s_i = w_i g_i the weighted score gradient of trajectory i, the estimator of a step is the sum over groups g and
their trajectories of (R_i - b_g) s_i / std_g. Trajectories are independent given their prompts and E[s_i] = 0, so its
second moment depends on the baseline by

    V(b) = sum_g 1 / std_g^2 sum_{i in g} w_i^2 |g_i|^2 (R_i - b_g)^2

(VCPO, arXiv 2602.17616, which minimises it over b; std_g only where ``algorithm.normalize_std``). All of it is in
rollouts.sqlite: R_i, w_i, log ratio, |g_i| and the b_g that the run used. Groups of equal rewards are left out, as they
are of the gradient; so is a group in which a norm is not known.

An in-sample baseline sees the very trajectory whose advantage it enters: ``least`` is least for that reason alone, too.
The two leave-one-out columns take each trajectory's baseline from the others of its group, which a new one would meet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config.load import load_resolved
from ..config.schema import RunConfig
from ..orchestrator.store.schema import TRAINED, StoreError
from ..orchestrator.store.store import RolloutStore
from ..run.directory import RunDirectory
from ..run.errors import ConfigError
from ..types.rewards import has_variance

Values = NDArray[np.float64]

#: Columns of the table, as they are compared with ``least``.
BASELINES = ("none", "group mean", "leave-one-out", "OPOB", "OPOB leave-one-out", "as trained")
#: A run has so many rows.
PARTS = 4


@dataclass(frozen=True)
class WeightedGroup:
    """Trajectories of a group of which all norms are known, float64 [n] each.

    log_w   log of the weight that multiplies the gradient; log_u: of the one in OPOB (``algorithm.opob_weights``)
    norms   |g_i|; baseline: that the run used
    """

    rewards: Values
    log_w: Values
    log_u: Values
    norms: Values
    baseline: Values

    def second_moments(self, *, normalize: bool) -> dict[str, float]:
        """V of this group under each of ``BASELINES``, and under "least", the b that makes V least."""
        with np.errstate(divide="ignore"):
            log_norms = np.log(self.norms)
        terms = np.exp(2 * (self.log_w + log_norms))
        scale = float(np.var(self.rewards)) if normalize else 1.0
        baselines = {
            "none": np.zeros_like(self.rewards),
            "group mean": np.full_like(self.rewards, self.rewards.mean()),
            "leave-one-out": without_each(self.rewards, np.zeros_like(self.rewards)),
            "OPOB": np.full_like(self.rewards, averaged(self.rewards, 2 * (self.log_u + log_norms))),
            "OPOB leave-one-out": without_each(self.rewards, 2 * (self.log_u + log_norms)),
            "as trained": self.baseline,
            "least": np.full_like(self.rewards, averaged(self.rewards, 2 * (self.log_w + log_norms))),
        }
        return {name: float((terms * (self.rewards - b) ** 2).sum()) / scale for name, b in baselines.items()}


def averaged(rewards: Values, log_terms: Values) -> float:
    """Mean of ``rewards`` [n] with weights softmax(``log_terms``); the plain mean where none of them is finite."""
    largest = log_terms.max()
    if not math.isfinite(largest):
        return float(rewards.mean())
    weights = np.exp(log_terms - largest)
    return float(rewards[0] + (weights * (rewards - rewards[0])).sum() / weights.sum())


def without_each(rewards: Values, log_terms: Values) -> Values:
    """[n]: for each trajectory, ``averaged`` over the others of its group; n at least 2."""
    others = [np.delete(np.arange(len(rewards)), index) for index in range(len(rewards))]
    return np.array([averaged(rewards[kept], log_terms[kept]) for kept in others])


@dataclass(frozen=True)
class RunVariance:
    """Of one run from step ``first`` to ``last``: by baseline, median and 90th percentile over steps of V over that of
    ``least``; ``moment``: the median of V under OPOB itself; ``steps``: those that had a group with norms."""

    run: str
    method: str
    lag: int
    first: int
    last: int
    steps: int
    moment: float
    ratios: Mapping[str, tuple[float, float]]


def run_variance(name: str, config: RunConfig, steps: Mapping[int, Sequence[WeightedGroup]]) -> RunVariance | None:
    """The study of a run of ``config``; None where no step has anything to compare."""
    normalize = config.algorithm.preset.normalize_std
    totals = []
    for groups in steps.values():
        moments = [group.second_moments(normalize=normalize) for group in groups]
        total = {column: math.fsum(moment[column] for moment in moments) for column in (*BASELINES, "least")}
        if total["least"] > 0:  # else one trajectory has all the weight, and b is its reward
            totals.append(total)
    if not totals:
        return None
    ratios = {
        column: (float(np.median(values)), float(np.quantile(values, 0.9)))
        for column in BASELINES
        for values in [np.array([total[column] / total["least"] for total in totals])]
    }
    moment = float(np.median([total["OPOB"] for total in totals]))
    lag = config.staleness.max_staleness
    return RunVariance(name, config.algorithm.method, lag, min(steps), max(steps), len(totals), moment, ratios)


def parts(steps: Mapping[int, Sequence[WeightedGroup]], of: int) -> Iterator[dict[int, Sequence[WeightedGroup]]]:
    """``steps`` of a run of ``of`` steps in ``PARTS`` parts of like length, empty ones left out: how much a baseline
    matters changes as the policy becomes sure, and lag grows over the first steps of a run."""
    for part in range(PARTS):
        inside = range(part * of // PARTS, (part + 1) * of // PARTS)
        if found := {step: groups for step, groups in steps.items() if step in inside}:
            yield found


def groups_by_step(history: Iterator[Mapping[str, Any]], config: RunConfig) -> dict[int, list[WeightedGroup]]:
    """From rows of ``StoreReader.history``: by step, the groups of which every norm is known.

    With weights by token the norm is that of the weighted gradient already, and nothing multiplies it.
    """
    weighs = config.algorithm.preset.is_level == "sequence"
    raw = config.algorithm.opob_weights == "raw"
    members: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in history:
        if row["state"] == TRAINED and row["step"] is not None:
            members.setdefault((row["step"], row["group_id"]), []).append(row)
    found: dict[int, list[WeightedGroup]] = {}
    for (step, _), rows in members.items():
        unknown = any(row["grad_norm"] is None or row["weight"] is None for row in rows)
        if unknown or not has_variance([row["reward"] for row in rows]):
            continue
        columns = {
            key: np.array([row[key] for row in rows], dtype=np.float64)
            for key in ("reward", "weight", "log_ratio", "grad_norm", "baseline")
        }
        nothing = np.zeros(len(rows))
        with np.errstate(divide="ignore"):
            log_w = np.log(columns["weight"]) if weighs else nothing
        log_u = (columns["log_ratio"] if raw else log_w) if weighs else nothing
        group = WeightedGroup(columns["reward"], log_w, log_u, columns["grad_norm"], columns["baseline"])
        found.setdefault(step, []).append(group)
    return found


def study(paths: Sequence[Path]) -> str:
    """A Markdown table, rows for each run directory of ``paths``, by lag; ConfigError for one that cannot be read."""
    rows, without = [], []
    for path in paths:
        directory = RunDirectory(path)
        config = load_resolved(directory.resolved)
        try:
            with RolloutStore.open_readonly(directory.store) as store:
                steps = groups_by_step(store.history(), config)
        except StoreError as error:
            raise ConfigError([str(error)]) from None
        of_run = [run_variance(path.name, config, part) for part in parts(steps, config.train.steps)]
        known = [row for row in of_run if row is not None]
        rows += known
        if not known:
            without.append(f"- {path.name}: no norms of trajectories are recorded; its method takes none")
    lines = []
    if rows:
        lines += [*_table(sorted(rows, key=lambda row: (row.lag, row.method, row.run, row.first))), "", _EXPLAINED]
    if without:
        lines += [*([""] if lines else []), *without]
    return "\n".join(lines) + "\n"


_EXPLAINED = (
    "Median over steps, in brackets the 90th percentile, of the second moment of the gradient estimator under each "
    "baseline over the least that a constant of each group reaches on the same samples. as trained: the baseline that "
    "the run used. V(OPOB): the second moment itself. of them: steps that had a group with norms."
)


def _table(rows: Sequence[RunVariance]) -> list[str]:
    names = ["run", "method", "lag", "steps", "of them", *BASELINES, "V(OPOB)"]
    table = [names, ["---"] * len(names)]
    for row in rows:
        cells = [f"{median:.3g} ({high:.3g})" for median, high in (row.ratios[column] for column in BASELINES)]
        table.append(
            [row.run, row.method, str(row.lag), f"{row.first}-{row.last}", str(row.steps), *cells, f"{row.moment:.2g}"]
        )
    return [f"| {' | '.join(cells)} |" for cells in table]
