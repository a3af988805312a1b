"""Held-out accuracy at one version, held for evaluation, beside training.

``Evaluation.run``  consumes: the versions to evaluate, in order    produces: ``eval/accuracy`` for the rows that wait
                    waits for: the evaluating servers at the version held for evaluation, room on them, the answers
                    unblocked by: the weight sync, finished trajectories
``settled``         waits for: all evaluations before a version     unblocked by: ``run``

One sample a prompt at the training temperature; accuracy is the mean reward. While an evaluation runs, updates of its
servers are deferred: they go on serving training requests of that version as far as the staleness bound
admits any. With several servers a quarter of them (one at least) evaluate, the others are updated as usual.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from ...config.process import WARNING_PREFIX
from ...environments.client import EnvironmentClient, Prompt
from ...rollout.agent_loop import run_episode
from ...rollout.fleet.fleet import Fleet
from ...rollout.fleet.server import Server
from ...run.tasks import cancel
from ...run.text import one_line
from ..peers.weight_sync import WeightSync
from .generation import SamplingRules
from .metrics_log import MetricsLog

#: Group id of evaluation trajectories in messages; they are never stored.
EVALUATION_GROUP = -1


def evaluating_servers(servers: Sequence[Server]) -> tuple[Server, ...]:
    """The servers that evaluate."""
    return tuple(servers[: max(1, len(servers) // 4)])


def mean_reward(rewards: Sequence[float], failures: Sequence[str], version: int) -> dict[str, float]:
    """``eval/accuracy`` over the samples that ended; failed ones are left out and said; nan when none ended."""
    if failures and not rewards:
        print(
            f"{WARNING_PREFIX}evaluation of version {version}: all {len(failures)} samples failed, there is no "
            f"accuracy; first: {failures[0]}",
            flush=True,
        )
    elif failures:
        print(
            f"evaluation of version {version}: {len(failures)} of {len(failures) + len(rewards)} samples failed, "
            f"first: {failures[0]}",
            flush=True,
        )
    return {"eval/accuracy": math.fsum(rewards) / len(rewards) if rewards else math.nan}


class Evaluation:
    """Evaluates ``versions`` (ascending) one after the other. A sample that is not done within ``timeout_s`` seconds
    failed: an environment that hangs does not hold up the run for ever."""

    def __init__(
        self,
        environment: EnvironmentClient,
        fleet: Fleet,
        sync: WeightSync,
        rules: SamplingRules,
        log: MetricsLog,
        versions: Sequence[int],
        *,
        timeout_s: float,
    ) -> None:
        self._timeout_s = timeout_s
        self._environment = environment
        self._fleet = fleet
        self._sync = sync
        self._rules = rules
        self._log = log
        self._versions = versions
        self._next = 0  # index of the first that is not done
        self._at = ""

    async def run(self) -> None:
        """Evaluate every version when it is loaded; returns after the last."""
        while (version := self._first_pending()) is not None:
            self._at = f"evaluation waits for version {version}"
            await self._sync.evaluation_loaded(version)
            result = await self._evaluate(version)
            self._log.evaluated(version, result)
            if math.isfinite(result["eval/accuracy"]):
                print(f"version {version}: held-out accuracy {result['eval/accuracy']:.4f}", flush=True)
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

    async def _evaluate(self, version: int) -> dict[str, float]:
        heldout = self._environment.description.heldout
        rewards: list[float | None] = [None] * len(heldout)
        failures: list[str] = []
        tasks: list[asyncio.Task[None]] = []
        among = self._sync.evaluators

        async def sample(index: int, prompt: Prompt) -> None:
            lease = await self._fleet.changes.until(
                lambda: self._fleet.lease(1, among=among, allowed=lambda number: number == version)
            )
            try:
                async with asyncio.timeout(self._timeout_s):
                    trajectory = await run_episode(
                        lease.generate,
                        self._environment,
                        prompt,
                        group_id=EVALUATION_GROUP,
                        sample_index=index,
                        sampling=self._rules.sampling,
                        context_length=self._rules.context_length,
                        seed_for_turn=lambda turn: None,
                    )
                rewards[index] = trajectory.reward
            except TimeoutError:
                failures.append(f"no answer within {self._timeout_s:g} s (staleness.wait_s)")
            except Exception as error:  # fault boundary: one held-out sample fails, it is counted and said
                failures.append(one_line(error))
            finally:
                lease.release()
                done = sum(reward is not None for reward in rewards) + len(failures)
                self._at = f"evaluation of version {version}: {done} of {len(heldout)} samples done"

        try:
            tasks += [asyncio.create_task(sample(index, prompt)) for index, prompt in enumerate(heldout)]
            await asyncio.gather(*tasks)
        finally:
            await cancel(*tasks)
        return mean_reward([reward for reward in rewards if reward is not None], failures, version)

    def describe(self) -> str:
        """One phrase for the watchdog."""
        return self._at
