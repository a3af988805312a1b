"""How a group's baseline b_g meets its gradient: one class a mode, chosen in ``baseline_mode`` only.

    plain       b_g is known from rewards: coefficients are known in the forward and multiply the loss
    proxy       plain, with |g_i| estimated from logits in a forward: not exact
    two_pass    one backward for |g_i|, then plain with the b_g found
    accumulate  one backward: sum_i (R_i - m_g)/std_g s_i and S_g = sum_i s_i; (b_g - m_g)/std_g S_g is taken off once
                |g_i| and so b_g are known; m_g is the reward of the trajectory with the largest l_i so far
    deferred    one backward: what weight gradients are made of is kept until b_g is known

The last three are exact: |g_i| is the norm of the unweighted score gradient, summed over all shards of the model.
Before ``plain`` and ``proxy``, ``record_norms`` puts a backward for |g_i| alone, of which only the record is kept.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from ..batch.packing import Pack
from ..gradients.attach import attach_chunks
from ..gradients.group_sums import Bucket, DeferredGradients, GroupNorms, OpobSums
from ..gradients.pack_scores import ScoreSwitch
from .batch_state import BatchState, SampleNumbers
from .pack_terms import Scored
from .passes import Passes
from .per_trajectory_backward import ExactBackward
from .plan import StepPlan, pack_tokens


class BaselineMode(Protocol):
    """Both methods are called in this order, on all ranks of a replica alike; ReplicaAborted ends either."""

    @property
    def max_pack_tokens(self) -> int:
        """Most tokens of a pack that the mode can serve."""

    @property
    def accumulators(self) -> int:
        """Gradient-sized accumulators that this rank holds."""

    @property
    def accumulator_error(self) -> tuple[float, float]:
        """Squared error and squared size of what the step accumulated in less than fp32."""

    def find_baselines(self, state: BatchState, plan: StepPlan) -> None:
        """|g_i| -> b_g, where passes of their own come first."""

    def add_gradient(self, state: BatchState, plan: StepPlan, buckets: Sequence[Bucket]) -> None:
        """-G, with all other terms of the loss, into the main gradients; then the reduction of ``buckets`` starts."""


class PlainMode:
    """No norms: b_i comes from rewards."""

    accumulators = 0
    accumulator_error = (0.0, 0.0)

    def __init__(self, passes: Passes) -> None:
        self.max_pack_tokens = passes.config.train.max_pack_tokens
        self._passes = passes

    def find_baselines(self, state: BatchState, plan: StepPlan) -> None: ...

    def add_gradient(self, state: BatchState, plan: StepPlan, buckets: Sequence[Bucket]) -> None:
        self._passes.add_plain_gradient(state, plan)
        start_reductions(buckets)


class ProxyMode(PlainMode):
    """Every forward estimates |g_i| from its logits; the device has b_g of a pack that holds its whole group before the
    pack's loss is formed, and the host learns it with the rest of what is recorded."""

    def __init__(self, passes: Passes) -> None:
        super().__init__(passes)
        passes.terms.observer = self._estimate

    def find_baselines(self, state: BatchState, plan: StepPlan) -> None:
        """A forward of the groups that are cut into several packs: their norms are not known inside one forward."""
        cut = [pack for pack in plan.trained if len(pack.samples) < state.group_sizes[pack.group]]
        self._passes.score(state, cut)
        for group in dict.fromkeys(pack.group for pack in cut):
            members = state.members(group)
            norms = state.estimated_norm[members]
            if not bool(norms.isnan().any()):  # on the last stage
                self._passes.objective.set_baselines(state, members, norms)

    def _estimate(
        self, state: BatchState, pack: Pack, logits: Tensor, scored: Scored
    ) -> tuple[SampleNumbers, dict[str, Tensor]]:
        numbers, is_whole = scored.numbers, len(pack.samples) == state.group_sizes[pack.group]
        known = not bool(state.estimated_norm[pack.index].isnan().any())
        if not state.scales[pack.group].has_variance or (known and not is_whole):
            return numbers, {}
        norms = self._passes.terms.estimated_norms(pack, logits, scored)
        if not is_whole:
            return numbers, {"estimated_norm": norms}
        found = self._passes.objective.baselines(scored.log_ratio, numbers.threshold_growth, norms, numbers.rewards)
        fell_back = found.plain.any().double().expand_as(norms)
        rows = {"estimated_norm": norms, "baseline": found.values, "fell_back": fell_back}
        return dataclasses.replace(numbers, baseline=found.values), rows


class _ExactMode(ABC):
    """Layers are attached so that a backward separates its weight gradients by trajectory."""

    def __init__(self, passes: Passes) -> None:
        trainable, switch = passes.trainable, ScoreSwitch()
        attached = attach_chunks(trainable.chunks, switch, passes.parallel, tied=trainable.shape.tie_word_embeddings)
        self.max_pack_tokens = pack_tokens(attached.per_sample, passes.config, passes.parallel)
        self._passes = passes
        self._groups = self._make_groups(attached.parameters)
        self._backward = ExactBackward(passes, switch, self._groups, self._starts)

    @property
    def accumulators(self) -> int:
        return self._groups.accumulators

    @property
    def accumulator_error(self) -> tuple[float, float]:
        return self._groups.accumulator_error

    @abstractmethod
    def _make_groups(self, parameters: Mapping[str, Parameter]) -> GroupNorms:
        """What the mode keeps of groups in flight."""

    def _starts(self, state: BatchState, pack: Pack, numbers: SampleNumbers, log_ratio: Tensor) -> SampleNumbers:
        """A backward of ``pack`` starts, whose l_i are known; most modes need nothing of them before |g_i|."""
        return numbers

    def _set_baselines(self, state: BatchState, group: int, index: Sequence[int], norms: Tensor) -> Tensor:
        """b_i of a group whose exact |g_i| are known: called alike on all ranks of the replica."""
        self._passes.terms.collect()  # packs of the group: their l_i are older than its norms
        state.has_norm[list(index)] = True
        state.grad_norm[list(index)] = norms
        self._passes.objective.set_baselines(state, index, norms)
        return norms


class TwoPassMode(_ExactMode):
    """A backward for the norms, then a plain one."""

    def find_baselines(self, state: BatchState, plan: StepPlan) -> None:
        self._backward.run(state, plan.trained, partial(self._set_baselines, state), [])

    def add_gradient(self, state: BatchState, plan: StepPlan, buckets: Sequence[Bucket]) -> None:
        self._passes.add_plain_gradient(state, plan)
        start_reductions(buckets)

    def _make_groups(self, parameters: Mapping[str, Parameter]) -> GroupNorms:
        return _norms_alone(parameters, self._passes)


class RecordedNorms(_ExactMode):
    """``record_norms``: a backward for |g_i|, then ``mode`` as if there had been none. The step does not depend on
    them: one that is not finite does not skip it."""

    def __init__(self, passes: Passes, mode: BaselineMode) -> None:
        super().__init__(passes)
        self._mode = mode
        self._norm_pack_tokens, self.max_pack_tokens = self.max_pack_tokens, mode.max_pack_tokens

    @property
    def accumulators(self) -> int:
        return self._mode.accumulators

    @property
    def accumulator_error(self) -> tuple[float, float]:
        return self._mode.accumulator_error

    def find_baselines(self, state: BatchState, plan: StepPlan) -> None:
        terms, packs = self._passes.terms, plan.trained
        if self._norm_pack_tokens != self.max_pack_tokens:
            packs = plan.repacked(self._passes.config, self._passes.parallel, self._norm_pack_tokens)
        observer, terms.observer = terms.observer, None  # what it sees decides on the step
        try:
            self._backward.run(state, packs, partial(self._record, state), [])
        finally:
            terms.observer = observer
        self._mode.find_baselines(state, plan)

    def add_gradient(self, state: BatchState, plan: StepPlan, buckets: Sequence[Bucket]) -> None:
        self._mode.add_gradient(state, plan, buckets)

    def _make_groups(self, parameters: Mapping[str, Parameter]) -> GroupNorms:
        return _norms_alone(parameters, self._passes)

    def _record(self, state: BatchState, group: int, index: Sequence[int], norms: Tensor) -> Tensor:
        state.grad_norm[list(index)] = norms
        return norms


class _OneBackwardMode(_ExactMode):
    """Norms and gradient come of one backward, in which every group's gradient is finished by its b_g."""

    def find_baselines(self, state: BatchState, plan: StepPlan) -> None: ...

    def add_gradient(self, state: BatchState, plan: StepPlan, buckets: Sequence[Bucket]) -> None:
        self._passes.add_regularizers(state, plan)
        self._backward.run(state, plan.trained, partial(self._finish, state), buckets)

    @abstractmethod
    def _finish(self, state: BatchState, group: int, index: Sequence[int], norms: Tensor) -> Tensor:
        """What the group's gradient is finished with, from its |g_i|."""


@dataclass(frozen=True)
class _Centre:
    """m_g of a group, and the l_i that it has it from: float64 scalars, on the host or the device."""

    reward: Tensor
    log_ratio: Tensor

    @classmethod
    def first(cls, numbers: SampleNumbers) -> _Centre:
        """Before any l_i is known."""
        return cls(numbers.baseline[0], torch.full_like(numbers.baseline[0], -math.inf))

    def moved(self, log_ratio: Tensor, rewards: Tensor) -> _Centre:
        """To the largest of ``log_ratio`` [n] where that is above all before; of equal ones, the largest reward's."""
        if not len(log_ratio):
            return self
        largest = log_ratio.max()
        above = largest > self.log_ratio
        reward = torch.where(log_ratio == largest, rewards, -math.inf).max()
        return _Centre(torch.where(above, reward, self.reward), torch.where(above, largest, self.log_ratio))


class AccumulateMode(_OneBackwardMode):
    """The gradient is summed up centred at m_g, and S_g beside it.

    Where one trajectory outweighs its group, b_g comes close to its reward: (R - m) w g and (b - m) w g of it would
    cancel in fp32, and with them what the others say. So m_g is the reward of the trajectory with the largest l so far,
    until b_g is known. When a larger one arrives the sums so far, which are small beside it, move to the new centre.
    Every rank follows its own order of packs: whatever its m_g, what is taken off in the end is counted from it. The
    device finds m_g, since a pack's backward follows its l_i at once; the host finds it again, by the same numbers,
    when the group is finished.
    """

    _groups: OpobSums

    def __init__(self, passes: Passes) -> None:
        super().__init__(passes)
        #: of every group of the step at hand: m_g and its l, on the device, and samples of its packs as they began
        self._centres: dict[int, _Centre] = {}
        self._begun: dict[int, list[list[int]]] = {}

    def add_gradient(self, state: BatchState, plan: StepPlan, buckets: Sequence[Bucket]) -> None:
        self._centres.clear()
        self._begun.clear()
        super().add_gradient(state, plan, buckets)

    def _starts(self, state: BatchState, pack: Pack, numbers: SampleNumbers, log_ratio: Tensor) -> SampleNumbers:
        """Move m_g to the pack's trajectory with the largest l, where that is larger than before."""
        group = pack.group
        if not pack.step_samples:
            return numbers
        if group not in self._centres:
            self._centres[group] = _Centre.first(numbers)
            self._begun[group] = []
        before = self._centres[group]
        after = before.moved(log_ratio, numbers.rewards)
        self._centres[group] = after
        self._begun[group].append(pack.step_index)
        self._groups.recentre(group, (before.reward - after.reward) * state.scales[group].inverse_std)
        return dataclasses.replace(numbers, baseline=after.reward.expand_as(numbers.baseline))

    def _make_groups(self, parameters: Mapping[str, Parameter]) -> OpobSums:
        passes, algorithm = self._passes, self._passes.config.algorithm
        dtype, chunks = getattr(torch, algorithm.opob_accumulator_dtype), len(passes.trainable.chunks)
        return OpobSums(parameters, chunks, passes.parallel, algorithm.opob_accumulators, dtype)

    def _finish(self, state: BatchState, group: int, index: Sequence[int], norms: Tensor) -> Tensor:
        """The factor of S_g in what is minimised.

        The sums hold -s_i (a loss is minimised): adding -(b - m)/std of them takes (b - m)/std s_i off G.
        """
        centre = _Centre.first(state.of_samples(index))
        self._set_baselines(state, group, index, norms)
        for begun in self._begun[group]:
            centre = centre.moved(state.log_ratio[begun], state.rewards[begun])
        return -(state.baseline[index[0]] - centre.reward) * state.scales[group].inverse_std


class DeferredMode(_OneBackwardMode):
    """Inputs and output gradients of layers are kept, or W_i where it is smaller."""

    def _make_groups(self, parameters: Mapping[str, Parameter]) -> GroupNorms:
        passes, limit = self._passes, self._passes.config.algorithm.opob_accumulators
        return DeferredGradients(parameters, len(passes.trainable.chunks), passes.parallel, limit)

    def _finish(self, state: BatchState, group: int, index: Sequence[int], norms: Tensor) -> Tensor:
        """The final coefficients of the group's samples."""
        self._set_baselines(state, group, index, norms)
        return self._passes.objective.trajectory_coefficients(state.of_samples(index), state.log_ratio[list(index)])


_MODES: Mapping[str, Callable[[Passes], BaselineMode]] = {
    "accumulate": AccumulateMode,
    "deferred": DeferredMode,
    "two_pass": TwoPassMode,
    "proxy": ProxyMode,
}


def baseline_mode(passes: Passes) -> BaselineMode:
    """The mode that the configuration asks for; plain where the baseline needs no norms. Collective."""
    algorithm = passes.config.algorithm
    mode = _MODES[algorithm.opob_mode](passes) if algorithm.preset.needs_norms else PlainMode(passes)
    return RecordedNorms(passes, mode) if algorithm.record_norms else mode


def _norms_alone(parameters: Mapping[str, Parameter], passes: Passes) -> GroupNorms:
    """What nothing is kept of but norms."""
    return GroupNorms(parameters, len(passes.trainable.chunks), passes.parallel)


def start_reductions(buckets: Sequence[Bucket]) -> None:
    """Of gradients that are final."""
    for bucket in buckets:
        bucket.start_grad_sync()
