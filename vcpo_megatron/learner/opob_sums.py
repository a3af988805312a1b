"""When the baseline is known: groups in flight, their norms, and how each mode finishes their gradient.

``accumulate``: the gradient of group g is accumulated centred, sum_i (R_i - m_g)/std_g s_i; once |s_i| is known over
all shards, (b_g - m_g)/std_g S_g with S_g = sum_i s_i is taken off. Squared norms are summed over the
replica's tensor ranks and pipeline stages without anybody waiting inside the schedule: a stage starts
the reduction when its last backward of the group is done and goes on with the next group, whose S it
keeps in another accumulator. A later stage is ahead of the first one by as many packs as its number,
so 1 + ceil(p / packs a group) accumulators on stage p are enough never to wait. With a smaller bound
(``opob_accumulators``) the stage waits for the oldest group, which drains the pipeline a little; it
cannot deadlock, because everything the first stage needs for that group was sent before. ``deferred``
keeps inputs and output gradients in place of S and waits by the same rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.nn import Parameter

from .packing import Pack
from .parallel import Parallel
from .score_gradients import PackScores
from .weight_gradients import Accumulate, Accumulator, Deferred, NormsOnly, WeightGradients


@dataclass
class _GroupInFlight:
    """One group from its first backward on this stage to its correction."""

    packs_left: int
    accumulator: Accumulator
    scores: list[PackScores] = field(default_factory=list)
    squared_norms: list[torch.Tensor] = field(default_factory=list)

    @property
    def rows(self) -> list[int]:
        """Rows of the batch, in the order of their backward."""
        return [row.index for scores in self.scores for row in scores.pack.rows]


@dataclass
class _Pending:
    """A group whose squared norms are being summed."""

    number: int
    group: _GroupInFlight
    total: torch.Tensor
    work: dist.Work | None


def accumulators_needed(stage: int, packs_per_group: int) -> int:
    """Gradient-sized accumulators on pipeline stage ``stage`` that hide the reduction's latency."""
    return 1 + -(-stage // packs_per_group)


class GroupNorms:
    """|g_i| of every group of a step, on every rank of the replica: the part that all modes share.

    parameters  name -> parameter, names as in ``score_gradients.attach``
    found       called once a group on every rank of the replica with (group, rows of the batch, |g_i|
                float64 [n]); returns what the mode needs of it
    Alone, this is the first of two passes: nothing is kept and nobody waits before the end.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], parallel: Parallel,
        found: Callable[[int, Sequence[int], torch.Tensor], torch.Tensor],
    ) -> None:  # fmt: skip
        self._parameters = dict(parameters)
        self._parallel = parallel
        self._found = found
        self._gradients: WeightGradients = NormsOnly()
        self._packs_left: dict[int, int] = {}
        self._current: _GroupInFlight | None = None
        self._pending: deque[_Pending] = deque()

    @property
    def accumulators(self) -> int:
        """Gradient-sized accumulators that this rank holds."""
        return 0

    @property
    def accumulator_error(self) -> tuple[float, float]:
        """Squared error and squared size of what the step accumulated in less than fp32."""
        return 0.0, 0.0

    def start_step(self, packs: Sequence[Pack]) -> None:
        """Announce the packs of the step in the order of their backward."""
        self._pending.clear()
        self._current = None
        self._packs_left = {}
        for pack in packs:
            self._packs_left[pack.group] = self._packs_left.get(pack.group, 0) + 1

    def begin(self, scores: PackScores) -> None:
        """The backward of a pack starts."""
        if self._current is None:
            self._current = _GroupInFlight(self._packs_left[scores.pack.group], self._take())
        scores.gradients, scores.accumulator = self._gradients, self._current.accumulator

    def end(self, scores: PackScores) -> None:
        """The backward of a pack is done on this stage; after the group's last one its norms go out."""
        group = self._current
        assert group is not None
        group.scores.append(scores)
        group.squared_norms.append(scores.squared_norms(self._parallel.tensor_group))
        group.packs_left -= 1
        if group.packs_left == 0:
            total = torch.cat(group.squared_norms)
            alone = dist.get_world_size(self._parallel.statistics_group) == 1
            work = None if alone else dist.all_reduce(total, group=self._parallel.statistics_group, async_op=True)
            self._pending.append(_Pending(scores.pack.group, group, total, work))
            self._current = None

    def finish_step(self) -> None:
        """Wait for every group and finish its gradient; before it is reduced over data-parallel ranks."""
        self._settle(keep=0)

    def _take(self) -> Accumulator:
        """What the backward of the next group may write to."""
        return Accumulator()

    def _finish(self, group: _GroupInFlight, found: torch.Tensor) -> None:
        """The group's norms are known everywhere."""

    @torch.no_grad()
    def _settle(self, keep: int) -> None:
        """Finish all but the ``keep`` newest groups, oldest first."""
        while len(self._pending) > keep:
            pending = self._pending.popleft()
            if pending.work is not None:
                pending.work.wait()
            self._finish(pending.group, self._found(pending.number, pending.group.rows, pending.total.sqrt()))


class _Bounded(GroupNorms):
    """Groups in flight hold memory: at most ``limit`` of them; None: what hides the latency."""

    def __init__(
        self, parameters: Mapping[str, Parameter], parallel: Parallel,
        found: Callable[[int, Sequence[int], torch.Tensor], torch.Tensor], limit: int | None,
    ) -> None:  # fmt: skip
        super().__init__(parameters, parallel, found)
        self._configured_limit = limit
        self._limit = 1

    def start_step(self, packs: Sequence[Pack]) -> None:
        super().start_step(packs)
        fewest = min(self._packs_left.values(), default=1)
        self._limit = self._configured_limit or accumulators_needed(self._parallel.pipeline_rank, fewest)

    def _take(self) -> Accumulator:
        """Waits for the oldest group where the bound is reached.

        Never called between a stage's backward and the sending of its input gradient, so what the
        group waited for needs has been sent. Groups settle at fixed points, whatever the timing: the
        sums of a step are formed in the same order in every run.
        """
        self._settle(keep=self._limit - 1)
        return Accumulator()


class OpobSums(_Bounded):
    """``accumulate``: S_g of every group in flight. ``found`` gives the factor by which S_g is added to the gradient.

    Accumulators are reused from step to step.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], parallel: Parallel,
        found: Callable[[int, Sequence[int], torch.Tensor], torch.Tensor], limit: int | None,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__(parameters, parallel, found, limit)
        self._gradients = Accumulate(self._parameters)
        self._dtype = dtype
        self._free: list[Accumulator] = []
        self._made = 0
        self._error = (0.0, 0.0)

    @property
    def accumulators(self) -> int:
        return self._made

    @property
    def accumulator_error(self) -> tuple[float, float]:
        return self._error

    def start_step(self, packs: Sequence[Pack]) -> None:
        self._free += [pending.group.accumulator for pending in self._pending]  # left over by a step that failed
        self._error = (0.0, 0.0)
        super().start_step(packs)

    def _take(self) -> Accumulator:
        super()._take()
        if self._free:
            accumulator = self._free.pop()
            accumulator.clear_values()
            return accumulator
        self._made += 1
        return Accumulator.zeros(self._parameters, self._dtype)

    def _finish(self, group: _GroupInFlight, found: torch.Tensor) -> None:
        factor, sums = float(found), group.accumulator
        if factor != 0.0:
            gradients = [self._parameters[name].main_grad for name in sums]  # type: ignore[attr-defined]
            if self._dtype is torch.float32:
                torch._foreach_add_(gradients, list(sums.values()), alpha=factor)
            else:
                for gradient, total in zip(gradients, sums.values(), strict=True):
                    gradient.add_(total, alpha=factor)
        if sums.probe:
            error, size = sums.squared_error()
            self._error = (self._error[0] + error, self._error[1] + size)
        self._free.append(sums)


class DeferredGradients(_Bounded):
    """``deferred``: no sum at all. ``found`` gives the final coefficient of every row, and the gradient is formed."""

    def __init__(
        self, parameters: Mapping[str, Parameter], parallel: Parallel,
        found: Callable[[int, Sequence[int], torch.Tensor], torch.Tensor], limit: int | None,
    ) -> None:  # fmt: skip
        super().__init__(parameters, parallel, found, limit)
        self._gradients = Deferred(self._parameters)

    def _finish(self, group: _GroupInFlight, found: torch.Tensor) -> None:
        coefficients = found.split([scores.n for scores in group.scores])
        for scores, final in zip(group.scores, coefficients, strict=True):
            for apply in scores.kept:
                apply(final)
            scores.kept.clear()
