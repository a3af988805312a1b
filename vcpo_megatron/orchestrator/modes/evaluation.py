"""Held-out accuracy at one version, held for evaluation, beside training.

``Evaluation.run``  consumes: the versions to evaluate, in order    produces: ``eval/...`` for the rows that wait, and
                                                                    the answers, in the store
                    waits for: the evaluating servers at the version held for evaluation, room on them, the answers
                    unblocked by: the weight sync, finished trajectories
``settled``         waits for: all evaluations before a version     unblocked by: ``run``

One sample a prompt at the training temperature; accuracy is the mean reward of the samples that did not fail, how many
did stands beside it. One that is lost with an environment worker by another one's fault begins anew. While an
evaluation runs, updates of its servers are deferred: they go on serving training requests of that version as far as the
staleness bound admits any. With several servers a quarter of them (one at least) evaluate, the others are updated as
usual.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence

from ...config.process import WARNING_PREFIX
from ...environments.client import EnvironmentClient, Prompt
from ...rollout.agent_loop import Generate, run_episode
from ...rollout.fleet.fleet import Fleet
from ...rollout.fleet.server import Server
from ...run.tasks import cancel
from ...run.text import printable
from ...types import Trajectory
from ..peers.weight_sync import WeightSync
from ..store.recorder import Recorder
from ..store.records import HeldOutSample
from ..store.schema import StoreFullError
from .failures import failure_reason
from .generation import SamplingRules
from .metrics_log import MOST_FAILED, MetricsLog, may_be_best
from .partial_rollouts import led_through

#: Group id of evaluation trajectories: they belong to no group.
EVALUATION_GROUP = -1


def evaluating_servers(servers: Sequence[Server]) -> tuple[Server, ...]:
    """The servers that evaluate."""
    return tuple(servers[: max(1, len(servers) // 4)])


def summary(version: int, samples: Sequence[HeldOutSample]) -> dict[str, float]:
    """``eval/...`` of one evaluation: accuracy is over the samples that ended, nan when none did. A warning says how
    many failed, and why the first did."""
    rewards = [sample.trajectory.reward for sample in samples if sample.trajectory is not None]
    reasons = [sample.reason for sample in samples if sample.trajectory is None]
    result = {
        "eval/accuracy": math.fsum(rewards) / len(rewards) if rewards else math.nan,
        "eval/failed": len(reasons),
        "eval/samples": len(samples),
    }
    if reasons:
        what = f"{WARNING_PREFIX}evaluation of version {version}:"
        count = f"{len(reasons)} of {len(samples)} samples failed"
        if not rewards:
            text = f"all {len(reasons)} samples failed, there is no accuracy; first: {reasons[0]}"
        elif may_be_best(result):
            text = f"{count}, first: {reasons[0]}; accuracy is over the others"
        else:
            text = (
                f"{count}, first: {reasons[0]}; accuracy is over the others, and too many are missing for this version "
                f"to be `best` (more than {MOST_FAILED:.0%})"
            )
        print(printable(f"{what} {text}"), flush=True)
    return result


class EvaluationResults:
    """Takes what evaluations gave: answers go into the store, numbers into the rows that wait for them."""

    def __init__(self, recorder: Recorder, log: MetricsLog) -> None:
        self._recorder, self._log = recorder, log

    async def add(self, version: int, samples: Sequence[HeldOutSample]) -> None:
        """All of the evaluation of ``version``; the answers are durable before the row is written."""
        try:
            await self._recorder.write(lambda store: store.add_evaluation(version, samples))
        except StoreFullError as error:  # at a stop, when nothing waits for the disk any more
            print(f"{WARNING_PREFIX}held-out answers of version {version} are not kept: {error}", flush=True)
        result = summary(version, samples)
        self._log.evaluated(version, result)
        if math.isfinite(result["eval/accuracy"]):
            print(f"version {version}: held-out accuracy {result['eval/accuracy']:.4f}", flush=True)


class Evaluation:
    """Evaluates ``versions`` (ascending) one after the other. A sample that is not done within ``timeout_s`` seconds
    failed: an environment that hangs does not hold up the run for ever."""

    def __init__(
        self,
        environment: EnvironmentClient,
        fleet: Fleet,
        sync: WeightSync,
        rules: SamplingRules,
        results: EvaluationResults,
        versions: Sequence[int],
        *,
        timeout_s: float,
    ) -> None:
        self._timeout_s = timeout_s
        self._environment = environment
        self._fleet = fleet
        self._sync = sync
        self._rules = rules
        self._results = results
        self._versions = versions
        self._next = 0  # index of the first that is not done
        self._at = ""

    async def run(self) -> None:
        """Evaluate every version when it is loaded; returns after the last."""
        while (version := self._first_pending()) is not None:
            self._at = f"evaluation waits for version {version}"
            await self._sync.evaluation_loaded(version)
            await self._results.add(version, await self._evaluate(version))
            self._next += 1
            self._sync.end_evaluation()
        self._at = "no evaluation is due any more"

    def may_train(self, version: int) -> bool:
        """Whether the step that makes ``version`` + 1 may be taken: an evaluation due at that version must not come
        while an earlier one still runs."""
        return version + 1 not in self._versions or self.is_settled(before=version + 1)

    def is_settled(self, before: int) -> bool:
        """Whether every evaluation of a version below ``before`` is done."""
        first = self._first_pending()
        return first is None or first >= before

    def _first_pending(self) -> int | None:
        return self._versions[self._next] if self._next < len(self._versions) else None

    async def _evaluate(self, version: int) -> list[HeldOutSample]:
        heldout = self._environment.description.heldout
        samples: list[HeldOutSample] = []
        tasks: list[asyncio.Task[None]] = []
        among = self._sync.evaluators

        async def sample(index: int, prompt: Prompt) -> None:
            def play(generate: Generate) -> Awaitable[Trajectory]:
                return run_episode(
                    generate,
                    self._environment,
                    prompt,
                    group_id=EVALUATION_GROUP,
                    sample_index=index,
                    sampling=self._rules.sampling,
                    context_length=self._rules.context_length,
                    seed_for_turn=lambda turn: None,
                )

            lease = await self._fleet.changes.until(
                lambda: self._fleet.lease(1, among=among, allowed=lambda number: number == version)
            )
            try:
                async with asyncio.timeout(self._timeout_s):
                    trajectory = await led_through(lease.generate, play)
                samples.append(HeldOutSample(index, prompt.prompt_id, trajectory))
            except TimeoutError:
                reason = f"no answer within {self._timeout_s:g} s (staleness.wait_s)"
                samples.append(HeldOutSample(index, prompt.prompt_id, reason=reason))
            except Exception as error:  # fault boundary: one held-out sample fails, it is counted and said
                samples.append(HeldOutSample(index, prompt.prompt_id, reason=failure_reason(error)))
            finally:
                lease.release()
                self._at = f"evaluation of version {version}: {len(samples)} of {len(heldout)} samples done"

        try:
            tasks += [asyncio.create_task(sample(index, prompt)) for index, prompt in enumerate(heldout)]
            await asyncio.gather(*tasks)
        finally:
            await cancel(*tasks)
        return sorted(samples, key=lambda sample: sample.position)

    def describe(self) -> str:
        """One phrase for the watchdog."""
        return self._at
