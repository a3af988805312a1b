"""When the baseline is known: groups in flight, their norms, and how each mode finishes their gradient.

``accumulate``: the gradient of group g is accumulated centred, sum_i (R_i - m_g)/std_g s_i with s_i = w_i g_i; once
|g_i| is known over all shards, (b_g - m_g)/std_g S_g with S_g = sum_i s_i is taken off. m_g may move between two
packs of the group: the sums so far move with it, by the S_g so far (``recentre``). Squared norms are summed over the
replica's ranks, from host to host, without anybody waiting inside the schedule: a stage starts the reduction when its
last backward of the group is done and goes on with the next group, whose S it keeps in another accumulator.

A later stage is ahead of the first one by as many packs as its number, so 1 + ceil(p / packs a group)
accumulators on stage p are enough never to wait. With virtual stages the backwards of one chunk run
through a window of packs before those of the next chunk do, so all groups of a window are open at once.
With a smaller bound (``opob_accumulators``) the stage waits for the oldest group, which drains the pipeline
a little; it cannot deadlock, because everything the first stage needs for that group was sent before.
``deferred`` keeps inputs and output gradients in place of S_g and waits by the same rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.nn import Parameter

from ..batch.packing import Pack
from ..megatron import platform
from ..megatron.host_exchange import Arriving, HostExchange
from ..megatron.parallel import Parallel
from .pack_scores import PackScores
from .weight_gradients import Accumulate, Accumulator, Deferred, NormsOnly, WeightGradients, fp32_scalar, main_gradient


@dataclass
class _GroupInFlight:
    """One group from its first backward on this rank to its last.

    norms   this rank's shares of |g_i|^2 by pack, in the order of the packs
    index   numbers in the batch of the samples, in the same order
    scores  of every pack and chunk
    """

    backwards_left: int
    accumulator: Accumulator
    norms: dict[int, torch.Tensor] = field(default_factory=dict)
    index: list[int] = field(default_factory=list)
    scores: list[PackScores] = field(default_factory=list)


@dataclass
class _Pending:
    """A group whose squared norms are being summed."""

    number: int
    group: _GroupInFlight
    squares: Arriving


#: Called once a group on every rank of the replica with (group, its samples' numbers in the batch, |g_i| float64 [n]).
Found = Callable[[int, Sequence[int], torch.Tensor], torch.Tensor]


class Bucket(Protocol):
    """Megatron's group of buckets, as far as it is used here."""

    params: set[Parameter]

    def start_grad_sync(self) -> None: ...


def accumulators_needed(stage: int, packs_per_group: int, window: int) -> int:
    """Gradient-sized accumulators on pipeline stage ``stage`` that hide the reduction's latency.

    ``window``: packs whose backwards alternate between the rank's chunks; 1 without virtual stages.
    """
    return 1 + -(-(window - 1) // packs_per_group) + -(-stage // packs_per_group)


class GroupNorms:
    """|g_i| of every group of a step, on every rank of the replica: the part that all modes share.

    parameters  name -> parameter, names as in ``attach``
    chunks      model chunks of this rank: as many backwards a pack
    By itself, this is the first of two passes: nothing is kept and nobody waits before the end.
    """

    _found: Found  # of the step at hand, like the next one
    _exchange: HostExchange

    def __init__(self, parameters: Mapping[str, Parameter], chunks: int, parallel: Parallel) -> None:
        self._parameters = dict(parameters)
        self._chunks = chunks
        self._parallel = parallel
        self._gradients: WeightGradients = NormsOnly()
        self._packs: dict[int, int] = {}
        self._open: dict[int, _GroupInFlight] = {}
        self._pending: deque[_Pending] = deque()

    @property
    def accumulators(self) -> int:
        """Gradient-sized accumulators that this rank holds."""
        return 0

    @property
    def accumulator_error(self) -> tuple[float, float]:
        """Squared error and squared size of what the step accumulated in less than fp32."""
        return 0.0, 0.0

    def start_step(self, packs: Sequence[Pack], found: Found, exchange: HostExchange) -> None:
        """Announce the packs of the step in the order of their backward. ``found`` returns what the mode needs of a
        group whose norms are known; ``exchange`` sums them until the step is finished."""
        self._found, self._exchange = found, exchange
        self._pending.clear()
        self._open.clear()
        self._packs = {}
        for pack in packs:
            self._packs[pack.group] = self._packs.get(pack.group, 0) + 1

    def begin(self, scores: PackScores) -> None:
        """The backward of a pack through a chunk starts."""
        group = scores.pack.group
        if group not in self._open:
            self._open[group] = _GroupInFlight(self._packs[group] * self._chunks, self._take())
        scores.gradients, scores.accumulator = self._gradients, self._open[group].accumulator

    def end(self, scores: PackScores) -> None:
        """It is done; after the group's last one its norms go out."""
        number, pack = scores.pack.group, scores.pack
        group = self._open[number]
        group.scores.append(scores)
        share = scores.squared_norms()
        if id(pack) in group.norms:
            group.norms[id(pack)] += share
        else:
            group.norms[id(pack)] = share
            group.index += pack.step_index
        group.backwards_left -= 1
        if group.backwards_left == 0:
            own = platform.start_read(torch.cat(list(group.norms.values())))
            squares = self._exchange.sum(own, self._parallel.statistics_group, f"squared norms of group {number}")
            self._pending.append(_Pending(number, group, squares))
            del self._open[number]

    def finish_step(self, buckets: Sequence[Bucket]) -> None:
        """Wait for every group and finish its gradient; then the reduction of ``buckets`` may start."""
        self._settle(keep=0)
        for bucket in buckets:
            bucket.start_grad_sync()

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
            self._finish(pending.group, self._wait(pending))

    def _wait(self, pending: _Pending) -> torch.Tensor:
        return self._found(pending.number, pending.group.index, pending.squares.wait().sqrt())


class _Bounded(GroupNorms):
    """Groups in flight hold memory: at most ``limit`` of them; None: what hides the latency."""

    def __init__(self, parameters: Mapping[str, Parameter], chunks: int, parallel: Parallel, limit: int | None) -> None:
        super().__init__(parameters, chunks, parallel)
        self._configured_limit = limit
        self._limit = 1

    def start_step(self, packs: Sequence[Pack], found: Found, exchange: HostExchange) -> None:
        super().start_step(packs, found, exchange)
        fewest = min(self._packs.values(), default=1)
        window = self._parallel.pipeline_size if self._chunks > 1 else 1
        needed = accumulators_needed(self._parallel.pipeline_rank, fewest, window)
        self._limit = self._configured_limit or needed

    def _take(self) -> Accumulator:
        """Waits for the oldest group where the bound is reached.

        Never called between a stage's backward and the sending of its input gradient, so what the
        group waited for needs has been sent. Groups settle at fixed points, whatever the timing: the
        sums of a step are formed in the same order in every run.
        """
        self._settle(keep=max(0, self._limit - 1 - len(self._open)))
        return Accumulator()


class OpobSums(_Bounded):
    """``accumulate``: S_g of every group in flight. ``found`` gives the factor by which S_g is added to the gradient.

    Accumulators are reused from step to step.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        chunks: int,
        parallel: Parallel,
        limit: int | None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(parameters, chunks, parallel, limit)
        self._gradients = Accumulate()
        self._dtype = dtype
        self._free: list[Accumulator] = []
        self._made = 0
        self._error: list[torch.Tensor] = []

    @property
    def accumulators(self) -> int:
        return self._made

    @property
    def accumulator_error(self) -> tuple[float, float]:
        if not self._error:
            return 0.0, 0.0
        error, size = platform.read(torch.stack(self._error).sum(0)).tolist()
        return error, size

    def start_step(self, packs: Sequence[Pack], found: Found, exchange: HostExchange) -> None:
        unfinished = [pending.group for pending in self._pending] + list(self._open.values())
        self._free += [group.accumulator for group in unfinished]  # of a step that was aborted
        self._error.clear()
        super().start_step(packs, found, exchange)

    @torch.no_grad()
    def recentre(self, group: int, factor: torch.Tensor) -> None:
        """Add ``factor``, a scalar where the gradients are, times the group's S_g so far to the gradient, between two
        backwards; S_g is 0 before the first. A GPU alone knows when the factor is 0, and adds it all the same."""
        if group in self._open:
            if factor.device.type == "cpu" and not factor:
                return
            single = factor.float()
            for name, total in self._open[group].accumulator.items():
                main_gradient(self._parameters[name]).addcmul_(total, single)

    def finish_step(self, buckets: Sequence[Bucket]) -> None:
        """The last correction goes bucket by bucket: the reduction of each starts as soon as it is final."""
        if not buckets or not self._pending:
            return super().finish_step(buckets)
        self._settle(keep=1)
        last = self._pending.popleft()
        factor = fp32_scalar(float(self._wait(last)))
        for bucket in buckets:
            names = [n for n in last.group.accumulator if self._parameters[n] in bucket.params]
            self._correct(last.group.accumulator, factor, names)
            bucket.start_grad_sync()
        self._release(last.group.accumulator)

    def _take(self) -> Accumulator:
        super()._take()
        if self._free:
            accumulator = self._free.pop()
            accumulator.clear_values()
            return accumulator
        self._made += 1
        return Accumulator.zeros(self._parameters, self._dtype)

    def _finish(self, group: _GroupInFlight, found: torch.Tensor) -> None:
        self._correct(group.accumulator, fp32_scalar(float(found)), list(group.accumulator))
        self._release(group.accumulator)

    @torch.no_grad()
    def _correct(self, sums: Accumulator, factor: float, names: Sequence[str]) -> None:
        if factor == 0.0 or not names:
            return
        gradients = [main_gradient(self._parameters[name]) for name in names]
        if self._dtype is torch.float32:
            torch._foreach_add_(gradients, [sums[name] for name in names], alpha=factor)
        else:
            for gradient, name in zip(gradients, names, strict=True):
                gradient.add_(sums[name], alpha=factor)

    def _release(self, sums: Accumulator) -> None:
        if sums.probe:
            self._error.append(sums.squared_error())
        self._free.append(sums)


class DeferredGradients(_Bounded):
    """``deferred``: no sum at all. ``found`` gives the final coefficients of a group's samples."""

    def __init__(self, parameters: Mapping[str, Parameter], chunks: int, parallel: Parallel, limit: int | None) -> None:
        super().__init__(parameters, chunks, parallel, limit)
        self._gradients = Deferred()

    def _finish(self, group: _GroupInFlight, found: torch.Tensor) -> None:
        place = {sample: i for i, sample in enumerate(group.index)}
        for scores in group.scores:
            own = found[[place[sample] for sample in scores.pack.step_index]]
            final = platform.to_device(torch.nn.functional.pad(own.float(), (0, 1))[None], scores.owned.device)
            for apply in scores.kept:
                apply(final)
            scores.kept.clear()
