"""When the baseline is known: S_g of every group in flight, and its correction of the gradient.

The gradient of group g is accumulated centred, sum_i (R_i - m_g)/std_g s_i; once |s_i| is known over
all shards, (b_g - m_g)/std_g S_g with S_g = sum_i s_i is taken off. Squared norms are summed over the
replica's ranks without anybody waiting inside the schedule: a stage starts the reduction when its last
backward of the group is done and goes on with the next group, whose S it keeps in another accumulator.

A later stage is ahead of the first one by as many packs as its number, so 1 + ceil(p / packs a group)
accumulators on stage p are enough never to wait. With virtual stages the backwards of one chunk run
through a window of packs before those of the next chunk do, so all groups of a window are open at once.
With a smaller bound (``opob_accumulators``) the stage waits for the oldest group, which drains the pipeline
a little; it cannot deadlock, because everything the first stage needs for that group was sent before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch.nn import Parameter

from .packing import Pack
from .parallel import Parallel
from .score_state import PackScores, main_gradient


@dataclass
class _GroupInFlight:
    """One group from its first backward on this rank to its last.

    norms  this rank's shares of |g_i|^2 by pack, in the order of the packs
    """

    backwards_left: int
    sums: dict[str, torch.Tensor]
    norms: dict[int, torch.Tensor] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)


@dataclass
class _Pending:
    """A group whose squared norms are being summed."""

    group: int
    sums: dict[str, torch.Tensor]
    rows: list[int]
    total: torch.Tensor
    work: dist.Work | None


class Bucket(Protocol):
    """Megatron's group of buckets, as far as it is used here."""

    params: set[Parameter]

    def start_grad_sync(self) -> None: ...


def accumulators_needed(stage: int, packs_per_group: int, window: int) -> int:
    """Gradient-sized accumulators on pipeline stage ``stage`` that hide the reduction's latency.

    ``window``: packs whose backwards alternate between the rank's chunks; 1 without virtual stages.
    """
    return 1 + -(-(window - 1) // packs_per_group) + -(-stage // packs_per_group)


class OpobSums:
    """Accumulators of one rank, reused from step to step.

    parameters    name -> parameter, names as in ``PackScores.sums``
    chunks        model chunks of this rank: as many backwards a pack
    correction    called once a group on every rank of the replica with (group, rows of the batch, |g_i|
                  float64 [n]); returns the factor by which S_g is added to the gradient
    limit         bound on accumulators; None: what hides the latency
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], chunks: int, parallel: Parallel,
        correction: Callable[[int, Sequence[int], torch.Tensor], float], limit: int | None,
    ) -> None:  # fmt: skip
        self._parameters = dict(parameters)
        self._chunks = chunks
        self._parallel = parallel
        self._correction = correction
        self._configured_limit = limit
        self._limit = 1
        self._free: list[dict[str, torch.Tensor]] = []
        self._made = 0
        self._packs: dict[int, int] = {}
        self._open: dict[int, _GroupInFlight] = {}
        self._pending: deque[_Pending] = deque()

    @property
    def accumulators(self) -> int:
        """Gradient-sized accumulators that this rank holds."""
        return self._made

    def start_step(self, packs: Sequence[Pack]) -> None:
        """Announce the packs of the step in the order of their backward."""
        for sums in [p.sums for p in self._pending] + [g.sums for g in self._open.values()]:
            self._free.append(sums)  # left over by a step that failed
        self._pending.clear()
        self._open.clear()
        self._packs = {}
        for pack in packs:
            self._packs[pack.group] = self._packs.get(pack.group, 0) + 1
        fewest = min(self._packs.values(), default=1)
        window = self._parallel.pipeline_size if self._chunks > 1 else 1
        needed = accumulators_needed(self._parallel.pipeline_rank, fewest, window)
        self._limit = self._configured_limit or needed

    def begin(self, scores: PackScores) -> None:
        """The backward of a pack through a chunk starts: lend it its group's accumulator."""
        group = scores.pack.group
        if group not in self._open:
            self._open[group] = _GroupInFlight(self._packs[group] * self._chunks, self._take())
        scores.sums = self._open[group].sums

    def end(self, scores: PackScores) -> None:
        """It is done; after the group's last one its norms go out."""
        number, pack = scores.pack.group, scores.pack
        group = self._open[number]
        share = scores.squared_norms()
        if id(pack) in group.norms:
            group.norms[id(pack)] += share
        else:
            group.norms[id(pack)] = share
            group.rows += pack.step_index
        group.backwards_left -= 1
        if group.backwards_left == 0:
            total = torch.cat(list(group.norms.values()))
            alone = dist.get_world_size(self._parallel.statistics_group) == 1
            work = None if alone else dist.all_reduce(total, group=self._parallel.statistics_group, async_op=True)
            self._pending.append(_Pending(number, group.sums, group.rows, total, work))
            del self._open[number]

    def finish_step(self, buckets: Sequence[Bucket]) -> None:
        """Wait for every group and correct the gradient, before it is reduced over data-parallel ranks.

        The last correction goes bucket by bucket: the reduction of each starts as soon as it is final.
        """
        self._settle(keep=1 if buckets else 0)
        last = self._pending.popleft() if self._pending else None
        factor = self._factor(last) if last is not None else 0.0
        for bucket in buckets:
            if last is not None:
                self._correct(last, factor, [n for n in last.sums if self._parameters[n] in bucket.params])
            bucket.start_grad_sync()
        if last is not None:
            self._free.append(last.sums)

    def _take(self) -> dict[str, torch.Tensor]:
        """A zeroed accumulator; waits for the oldest group where the bound is reached.

        Never called between a stage's backward and the sending of its input gradient, so what the
        group waited for needs has been sent. Groups settle at fixed points, whatever the timing: the
        sums of a step are formed in the same order in every run.
        """
        self._settle(keep=max(0, self._limit - 1 - len(self._open)))
        if self._free:
            sums = self._free.pop()
            torch._foreach_zero_(list(sums.values()))
            return sums
        self._made += 1
        return {
            name: torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            for name, parameter in self._parameters.items()
        }

    def _settle(self, keep: int) -> None:
        """Correct the gradient for all but the ``keep`` newest groups, oldest first."""
        while len(self._pending) > keep:
            pending = self._pending.popleft()
            self._correct(pending, self._factor(pending), list(pending.sums))
            self._free.append(pending.sums)

    def _factor(self, pending: _Pending) -> float:
        if pending.work is not None:
            pending.work.wait()
        return self._correction(pending.group, pending.rows, pending.total.sqrt())

    def _correct(self, pending: _Pending, factor: float, names: list[str]) -> None:
        if factor != 0.0 and names:
            gradients = [main_gradient(self._parameters[name]) for name in names]
            torch._foreach_add_(gradients, [pending.sums[name] for name in names], alpha=factor)
