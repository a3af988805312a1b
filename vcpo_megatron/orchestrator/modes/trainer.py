"""What every kind of run does with a batch: have the learner take the step, record it, write its row, checkpoint.

``take``        consumes: a batch            produces: trained marks in the store, the step's result
                waits for: StepDone          unblocked by: the learner, or its deadline; after a stop by StepAborted
``score``       consumes: whole groups       produces: the learner's own log-probs of their tokens
                waits for: GroupsScored      unblocked by: the learner, or its deadline
``checkpoint``  waits for: CheckpointDone    unblocked by: the learner, or its deadline

A step's trained marks are durable before a checkpoint that contains the step is asked for. The learner copies its
state and goes on: a checkpoint that is due is waited for only when the next one is, or at the end.

A step that would outlast its part of ``launch.grace_s`` after a stop is aborted, as if it had not begun: the
checkpoint is that of the last step, and the batch's groups, which are in the store, are trained after a resume.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from ...config.process import WARNING_PREFIX
from ...config.schema import RunConfig
from ...observability.learning import LearningWatch
from ...observability.mismatch import MismatchWatch
from ...observability.weights import WeightWatch
from ...run.directory import RunDirectory
from ...run.tasks import RunError, StopRequest, cancel
from ...types import Batch, Group, StepResult
from ..peers.learner import LearnerLink
from ..store.ledger import GroupLedger
from ..store.reader import Counts
from ..store.recorder import Recorder
from .metrics_log import MetricsLog, step_row
from .staleness import Pacer

#: So many skipped steps in a row end the run: it does not come back by itself.
MOST_SKIPPED = 10
#: Seconds that a run which ends in an error waits until what a written checkpoint has made superfluous is removed.
_TIDY_S = 10.0


class Trainer:
    """Steps of the learner on the ledger's groups."""

    def __init__(
        self,
        config: RunConfig,
        link: LearnerLink,
        ledger: GroupLedger,
        recorder: Recorder,
        log: MetricsLog,
        directory: RunDirectory,
        *,
        fingerprint: str,
        stop: StopRequest,
    ) -> None:
        self._config = config
        self._link = link
        self._ledger = ledger
        self._recorder = recorder
        self.log = log
        self._directory = directory
        self._saved = ledger.version
        #: Adaptive staleness, where it is on; it learns of every step.
        self.pacer: Pacer | None = None
        self._saving: asyncio.Task[None] | None = None
        self._written = False  # the checkpoint of ``_saving``, which may still tidy up after it
        self._fingerprint = fingerprint
        self._stop = stop
        self._last_step_s = 0.0
        self._step_ended = time.monotonic()
        self._skipped_in_a_row = 0
        self._score_s = 0.0  # since the last row
        self._mismatch = MismatchWatch(config)
        self._weights = WeightWatch()
        self._learning = LearningWatch()

    @property
    def version(self) -> int:
        """The learner's, equal to the number of steps done."""
        return self._ledger.version

    def begin(self) -> None:
        """Everything is started: the first step's time counts from here."""
        self._step_ended = time.monotonic()

    async def score(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """``groups`` with the log-probs that the learner, at the version that it holds, gives their tokens; not durable
        yet."""
        started = time.monotonic()
        scored = await self._link.score(Batch(self.version, tuple(groups)))
        self._score_s += time.monotonic() - started
        return scored

    async def take(self, batch: Batch, *, may_go_on: Callable[[], bool] = lambda: True) -> StepResult | None:
        """One optimizer step on ``batch``; None when it was aborted because of a stop. ControlError when the learner
        fails. ``may_go_on()``, asked at a stop: whether the step is worth to be waited for."""
        began, started = time.time(), time.monotonic()
        aborting = asyncio.create_task(self._abort_in_time(batch.step, started, may_go_on))
        try:
            result = await self._link.train(batch)
        finally:
            await cancel(aborting)
        if result is None:
            print(
                f"step {batch.step} was aborted (launch.grace_s = {self._stop.grace_s:g} s); its "
                f"{len(batch.groups)} groups are trained after a resume",
                flush=True,
            )
            return None
        self._last_step_s = time.monotonic() - started
        await self._ledger.train(batch, result, (began, began + self._last_step_s))
        if self.pacer is not None:
            ratio, on_policy = (result.metrics.get(name) for name in ("ess/ratio", "ess/ratio_on_policy"))
            self.pacer.observe(math.nan if ratio is None else ratio, on_policy=on_policy)
        warnings = [watch.observe(batch.step, result.metrics) for watch in (self._mismatch, self._weights)]
        for warning in filter(None, [*warnings, self._learning.observe(batch)]):
            print(f"{WARNING_PREFIX}{warning}", flush=True)
        if result.skipped:
            print(f"step {batch.step} was skipped: {result.skipped}", flush=True)
        return result

    async def _abort_in_time(self, step: int, started: float, may_go_on: Callable[[], bool]) -> None:
        """After a stop, have the step aborted: at once when the last one says that it needs longer than it has,
        else when its time is over."""
        await self._stop.wait()
        expected = started + self._last_step_s - time.monotonic()
        if may_go_on() and expected < self._stop.seconds_for_step():
            await asyncio.sleep(self._stop.seconds_for_step())
        await self._link.abort(step)

    async def record(self, batch: Batch, result: StepResult, *, wait_s: float, sync: Mapping[str, float]) -> None:
        """Write the row of the step that was taken last, with what ``sync`` measured; RunError when it was one skipped
        step too many."""
        counts: Counts = await self._recorder.write(lambda store: store.counts())
        now = time.monotonic()
        times = {"time/step": now - self._step_ended, "time/wait_batch": wait_s, **sync}
        self._step_ended = now
        if self._config.algorithm.mismatch == "recorded":
            times["time/score"], self._score_s = self._score_s, 0.0
        row = step_row(batch, result, counts, times)
        if self.pacer is not None:
            row["staleness/admitted"] = self.pacer.lag
        self.log.add(row)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result.skipped else 0
        if self._skipped_in_a_row >= MOST_SKIPPED:
            raise RunError(
                f"{self._skipped_in_a_row} steps in a row were skipped, up to step {batch.step} ({result.skipped}): "
                "the run has diverged; go back with --resume --from-step N to a checkpoint before it did, with a lower "
                "optimizer.lr"
            )

    async def checkpoint_if_due(self) -> None:
        """Begin a checkpoint after every ``checkpoint.every`` steps; training goes on while it is written."""
        every = self._config.checkpoint.every
        if every and self.version % every == 0:
            await self._begin_checkpoint()

    async def checkpoint(self) -> None:
        """Checkpoint the current version unless that was done; returns when everything that was begun is complete."""
        await self._begin_checkpoint()
        await self.saved()

    async def saved(self) -> None:
        """Wait for the checkpoint that is being written, if any."""
        if self._saving is not None:
            await self._saving
            self._saving = None

    async def _begin_checkpoint(self) -> None:
        await self.saved()
        if self.version == self._saved:
            return
        self._saved = self.version
        store = await self._recorder.write(lambda store: store.state())
        state: dict[str, Any] = {
            "store": store,
            "requeue": list(self._ledger.cursor.requeue),  # the store does not know it
            "rows": [dict(row) for row in self.log.held],
            "environment": self._fingerprint,
        }
        if self.pacer is not None:
            state["pacer"] = self.pacer.state()
        done = await self._link.checkpoint(self.version, state)
        self._written = False
        self._saving = asyncio.create_task(self._save(self.version, done))

    async def _save(self, step: int, done: Coroutine[Any, Any, float]) -> None:
        seconds = await done
        self._written = True
        print(f"checkpoint step_{step} written in {seconds:.1f} s", flush=True)
        await self.tidy()

    async def close(self) -> None:
        """The run is over, and its store closes next: a checkpoint that was written is tidied up after, one that was
        not stays as it is. What fails in this is dropped: another error has ended the run."""
        if self._saving is None:
            return
        if self._written:
            await asyncio.wait([self._saving], timeout=_TIDY_S)
        await cancel(self._saving)

    async def end(self) -> None:
        """The last step is done, and evaluated: tidy up, and say so where there was nothing to learn."""
        await self.tidy()
        if warning := self._learning.summary():
            print(f"{WARNING_PREFIX}{warning}", flush=True)

    async def tidy(self) -> None:
        """Mark the checkpoint of the highest held-out accuracy, and remove those that are not to be kept; the same for
        the tokens of old rollouts, but for those that the newest checkpoints may go back to."""
        best = await asyncio.to_thread(self._directory.mark_best, self.log.accuracy)
        keep = () if best is None or not self._config.checkpoint.keep_best else (best,)
        for line in await asyncio.to_thread(self._directory.prune, self._config.checkpoint.keep_last, keep):
            print(f"{WARNING_PREFIX}{line}", flush=True)
        steps = await asyncio.to_thread(self._directory.complete_steps)
        if not steps:
            return
        oldest = steps[-self._config.checkpoint.keep_last :][0]  # groups that ended before it never come back
        if self._config.rollout.routing_replay:
            await self._recorder.write(lambda store: store.prune_routing(oldest))
        rollouts = self._config.checkpoint.keep_rollouts
        if rollouts is not None:
            before = min(oldest, self.version - rollouts)
            await self._recorder.write(lambda store: store.prune_samples(before))
