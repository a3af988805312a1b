"""From a batch of groups to packed micro-batches: who trains what, in which order.

Every rank plans the whole batch alike, from token counts only, so nothing has to be agreed on.
A group stays on one data-parallel replica (with expert parallelism, on the replicas that share experts).
A pack is one micro-batch: several trajectories of ONE group laid end to end in one sequence, with
block-diagonal attention; padding is only what context and sequence parallelism must divide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...types import Batch, Trajectory


@dataclass(frozen=True)
class Sample:
    """One trajectory of the batch: ``index`` is its number in the batch (0..N-1), ``group`` that of its group."""

    index: int
    group: int
    trajectory: Trajectory

    @property
    def cost(self) -> int:
        """Tokens that go through the model: the last one is only ever a label."""
        return len(self.trajectory.tokens) - 1


@dataclass(frozen=True)
class Share:
    """How the tokens of a pack are cut: ``rank`` of ``size`` context-parallel ranks, and what lengths must divide.

    multiple  tokens that every context-parallel rank holds are a multiple of this (sequence parallelism)
    """

    rank: int = 0
    size: int = 1
    multiple: int = 1


@dataclass(frozen=True)
class PackLayout:
    """Where the tokens of sequences laid end to end lie on one context-parallel rank.

    With C context-parallel ranks every sequence is padded to a multiple of 2C and cut into 2C chunks; rank
    r holds chunks r and 2C-1-r of each, so that causal attention costs every rank the same and Megatron's
    rotary positions of packed sequences fit. What is left to ``Share.multiple`` becomes one more sequence.

    lengths     padded length of every sequence, the one of padding at the end included; they sum to ``total``
    boundaries  sequence i holds the tokens boundaries[i] to boundaries[i+1] of THIS rank; padding is not listed
    take        int64 [total / C]: where in the whole pack the tokens of this rank are
    ranks, rank  C, and which of them this is
    """

    lengths: tuple[int, ...]
    boundaries: tuple[int, ...]
    take: np.ndarray
    ranks: int
    rank: int

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def positions(self) -> np.ndarray:
        """Of the tokens of this rank in their own sequences: int64 [total / C]."""
        return np.concatenate([np.arange(length) for length in self.lengths])[self.take]

    @classmethod
    def of(cls, sequences: Sequence[int], share: Share, at_least: int = 0) -> PackLayout:
        """Lay sequences of these many tokens end to end, padded to ``at_least`` tokens, which is more than none."""
        chunk = 2 * share.size if share.size > 1 else 1
        padded = [-(-length // chunk) * chunk for length in sequences]
        whole = share.size * share.multiple
        if chunk > 1 and whole % chunk:
            whole *= 2  # the padding is cut into chunks, too
        wanted = max(sum(padded), at_least, 1)
        rest = -(-wanted // whole) * whole - sum(padded)
        lengths = (*padded, rest) if rest else tuple(padded)
        boundaries = np.concatenate([[0], np.cumsum(padded)]) // share.size
        take = np.concatenate(_chunks_of_rank(lengths, share)) if share.size > 1 else np.arange(sum(lengths))
        return cls(lengths, tuple(int(b) for b in boundaries), take, share.size, share.rank)


def _chunks_of_rank(lengths: Sequence[int], share: Share) -> list[np.ndarray]:
    starts = np.concatenate([[0], np.cumsum(lengths)])
    pieces = []
    for start, length in zip(starts, lengths, strict=False):
        size = length // (2 * share.size)
        for chunk in (share.rank, 2 * share.size - 1 - share.rank):
            pieces.append(np.arange(start + chunk * size, start + (chunk + 1) * size))
    return pieces


@dataclass(frozen=True)
class AttentionPlan:
    """Which keys the queries of a context-parallel rank attend to, in the terms of causal variable-length kernels.

    The rank's queries lie end to end in spans. A span of n queries has m keys, m >= n, and its query i sees the first
    m - n + i + 1 of them: causal, with the ends aligned (kernels call it bottom right). Without context parallelism a
    span is a sequence and its own keys; with it, a chunk, whose keys are the prefix of its sequence that ends with it.
    So no mask is needed, and every length is known to the host.

    spans      (n, m) of every span, in the order of the queries
    queries, keys  int32 [spans + 1], on the device: where the spans begin, and where the last one ends
    rows       int64 [sum of m], on the device: the keys, as rows of those of all ranks, one rank's after another's;
               None where the keys of this rank are all there are
    sequences  int32 [sequences + 1], on the device: where they begin and end, over the tokens of all ranks
    longest    tokens of the longest sequence
    """

    spans: tuple[tuple[int, int], ...]
    queries: torch.Tensor
    keys: torch.Tensor
    rows: torch.Tensor | None
    sequences: torch.Tensor
    longest: int

    @property
    def longest_queries(self) -> int:
        return max(n for n, _ in self.spans)

    @property
    def longest_keys(self) -> int:
        return max(m for _, m in self.spans)

    @classmethod
    def of(cls, layout: PackLayout, device: torch.device) -> AttentionPlan:
        """The plan of every layer that sees this pack: its tensors are copied to ``device`` here and nowhere else."""
        spans = [(length, length) for length in layout.lengths]
        rows = None
        if layout.ranks > 1:
            chunks = (layout.rank, 2 * layout.ranks - 1 - layout.rank)
            sizes = [length // (2 * layout.ranks) for length in layout.lengths]
            spans = [(size, (chunk + 1) * size) for size in sizes for chunk in chunks]
            rows = torch.from_numpy(_prefix_rows(layout, chunks)).to(device)
        sequences = _boundaries(layout.lengths, device)
        return cls(
            spans=tuple(spans),
            queries=sequences if rows is None else _boundaries([n for n, _ in spans], device),
            keys=sequences if rows is None else _boundaries([m for _, m in spans], device),
            rows=rows,
            sequences=sequences,
            longest=max(layout.lengths),
        )


def _boundaries(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)


def _prefix_rows(layout: PackLayout, chunks: Sequence[int]) -> np.ndarray:
    """int64: of every sequence the prefixes that end with ``chunks``, as rows of the tokens of all ranks."""
    held = [
        piece for rank in range(layout.ranks) for piece in _chunks_of_rank(layout.lengths, Share(rank, layout.ranks))
    ]
    row = np.empty(layout.total, np.int64)
    row[np.concatenate(held)] = np.arange(layout.total)
    starts = np.cumsum([0, *layout.lengths])
    return np.concatenate(
        [
            row[start : start + (chunk + 1) * length // (2 * layout.ranks)]
            for start, length in zip(starts, layout.lengths, strict=False)
            for chunk in chunks
        ]
    )


@dataclass(frozen=True)
class Pack:
    """Tensors of one micro-batch of n trajectories of one group, as this rank holds them (CPU or device).

    tokens             int64   [T]   model inputs (every trajectory without its last token)
    labels             int64   [T]   the token that follows each
    positions          int64   [T]   position in its own trajectory
    mask               bool    [T]   True where the label was sampled by the policy
    behavior_logprobs  float32 [T]   log mu(label), meaningful where ``mask``
    recorded_logprobs  float32 [T]   the same of what the learner gave it when the group was complete; None where a
                       trajectory has no such record
    current            bool    [T]   True where the label was sampled by the version that the step starts from
    segments           int64   [T]   which of the n trajectories; n for padding at the end
    boundaries         ints    [n+1] trajectory i holds tokens boundaries[i] to boundaries[i+1]
    turns              int64   [T]   which of the pack's U turns the label is in; U for none
    turn_tokens        int64   [U]   sampled tokens of each turn, on whichever context-parallel rank they are
    experts            int32   [T, layers, k], on the CPU, or None: experts that a server sent each token to, -1 where
                       nothing was recorded
    all_tokens, all_segments  int64 [C T], on the host: those of every context-parallel rank, one rank after another
    attention          what attends to what
    samples            the n trajectories, in the order of the tokens
    step_samples       those of all ranks that work on the group in the same micro-step (expert parallelism);
                       this rank's are those from ``offset`` on
    """

    samples: tuple[Sample, ...]
    group: int
    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    behavior_logprobs: torch.Tensor
    current: torch.Tensor
    segments: torch.Tensor
    turns: torch.Tensor
    turn_tokens: torch.Tensor
    all_tokens: np.ndarray
    all_segments: np.ndarray
    layout: PackLayout
    attention: AttentionPlan
    step_samples: tuple[Sample, ...]
    offset: int
    experts: torch.Tensor | None = None
    recorded_logprobs: torch.Tensor | None = None

    @property
    def boundaries(self) -> tuple[int, ...]:
        return self.layout.boundaries

    @property
    def length(self) -> int:
        """Tokens of the micro-batch on all context-parallel ranks, padding included."""
        return self.layout.total

    @property
    def padded(self) -> int:
        """Tokens of padding, on all context-parallel ranks."""
        return self.length - sum(sample.cost for sample in self.samples)

    @property
    def index(self) -> list[int]:
        """Numbers in the batch of ``samples``."""
        return [sample.index for sample in self.samples]

    @property
    def step_index(self) -> list[int]:
        """Numbers in the batch of ``step_samples``."""
        return [sample.index for sample in self.step_samples]

    def label_places(self, starts: Sequence[int]) -> np.ndarray:
        """int64 [T]: where the labels of this rank are among all tokens of the batch, laid end to end, of which
        trajectory number i has those from ``starts[i]`` on; -1 for padding."""
        whole: np.ndarray = np.full(self.layout.total, -1, np.int64)
        first = 0
        for sample, length in zip(self.samples, self.layout.lengths, strict=False):
            whole[first : first + sample.cost] = starts[sample.index] + 1 + np.arange(sample.cost)
            first += length
        return whole[self.layout.take]


def batch_samples(batch: Batch) -> list[list[Sample]]:
    """Samples of every group, numbered over the batch."""
    groups, index = [], 0
    for number, group in enumerate(batch.groups):
        groups.append([Sample(index + i, number, t) for i, t in enumerate(group.trajectories)])
        index += len(group.trajectories)
    return groups


def assign_groups(costs: Sequence[int], replicas: int) -> list[list[int]]:
    """Divide groups among replicas by cost, largest first to the least loaded; indices ascending.

    Ties go to the lower index and the lower replica, so every rank finds the same plan.
    """
    shares: list[list[int]] = [[] for _ in range(replicas)]
    loads = [0] * replicas
    for group in sorted(range(len(costs)), key=lambda g: (-costs[g], g)):
        replica = min(range(replicas), key=lambda r: (loads[r], r))
        shares[replica].append(group)
        loads[replica] += costs[group]
    return [sorted(share) for share in shares]


def split_into_packs(samples: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    """Cut the samples of one group into packs of at most ``max_tokens`` (a longer sample gets its own).

    Longest first into the fullest pack that still has room (best fit); samples of a pack keep the order
    of the batch.
    """
    packs: list[list[Sample]] = []
    room: list[int] = []
    for sample in sorted(samples, key=lambda s: (-s.cost, s.index)):
        fitting = [i for i, free in enumerate(room) if free >= sample.cost]
        if fitting:
            best = min(fitting, key=lambda i: (room[i], i))
            packs[best].append(sample)
            room[best] -= sample.cost
        else:
            packs.append([sample])
            room.append(max_tokens - sample.cost)
    ordered = [sorted(pack, key=lambda s: s.index) for pack in packs]
    return sorted(ordered, key=lambda pack: pack[0].index)


def plan_steps(samples: Sequence[Sample], ranks: int, max_tokens: int) -> list[list[list[Sample]]]:
    """Micro-steps of one group that is divided among ``ranks``: samples of every rank in every step.

    Ranks that share experts run equal numbers of micro-batches; a rank without samples gets an empty one.
    """
    shares = [[samples[i] for i in share] for share in assign_groups([sample.cost for sample in samples], ranks)]
    packs = [split_into_packs(share, max_tokens) for share in shares]
    steps = max(len(own) for own in packs)
    return [[own[step] if step < len(own) else [] for own in packs] for step in range(steps)]


def make_pack(
    samples: Sequence[Sample],
    share: Share,
    device: torch.device,
    *,
    group: int | None = None,
    step_samples: Sequence[Sample] | None = None,
    offset: int = 0,
    at_least: int = 0,
    version: int | None = None,
) -> Pack:
    """Lay ``samples`` end to end and keep what context-parallel rank ``share.rank`` holds of them.

    ``version`` is the number of the learner's policy. An empty pack (expert parallelism, virtual stages) is padding
    alone and needs ``group``.
    """
    costs = [sample.cost for sample in samples]
    layout = PackLayout.of(costs, share, at_least)

    def filled(pieces: Sequence[np.ndarray], fill: float, dtype: type) -> np.ndarray:
        """Pieces at their places in the whole pack, ``fill`` in between."""
        whole: np.ndarray = np.full(layout.total, fill, dtype)
        start = 0
        for piece, length in zip(pieces, layout.lengths, strict=False):
            whole[start : start + len(piece)] = piece
            start += length
        return whole

    def own(whole: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(whole[layout.take]).to(device)

    def every(whole: np.ndarray) -> np.ndarray:
        order = [
            PackLayout.of(costs, dataclasses.replace(share, rank=rank), at_least).take for rank in range(share.size)
        ]
        return whole[np.concatenate(order)]

    trajectories = [sample.trajectory for sample in samples]
    recorded = _recorded(trajectories)
    tokens = filled([t.tokens[:-1] for t in trajectories], 0, np.int64)
    # padding inside a trajectory (context parallelism) counts as its own: no gradient ever reaches it
    segments = np.repeat(np.arange(len(layout.lengths)), layout.lengths)
    turns, turn_tokens = _turns(trajectories)
    return Pack(
        samples=tuple(samples),
        group=samples[0].group if group is None else group,
        tokens=own(tokens),
        labels=own(filled([t.tokens[1:] for t in trajectories], 0, np.int64)),
        positions=torch.from_numpy(layout.positions).to(device),
        mask=own(filled([t.loss_mask[1:] for t in trajectories], 0, np.bool_)),
        behavior_logprobs=own(filled([t.behavior_logprobs[1:] for t in trajectories], 0.0, np.float32)),
        current=own(filled([_sampled_by(t, version)[1:] for t in trajectories], 0, np.bool_)),
        segments=own(segments),
        turns=own(filled([of[1:] for of in turns], len(turn_tokens), np.int64)),
        turn_tokens=torch.from_numpy(turn_tokens).to(device),
        all_tokens=every(tokens),
        all_segments=every(segments),
        layout=layout,
        attention=AttentionPlan.of(layout, device),
        step_samples=tuple(samples if step_samples is None else step_samples),
        offset=offset,
        experts=_experts(trajectories, layout),
        recorded_logprobs=None if recorded is None else own(filled(recorded, 0.0, np.float32)),
    )


def _sampled_by(trajectory: Trajectory, version: int | None) -> np.ndarray:
    return np.zeros(len(trajectory.tokens), np.bool_) if version is None else trajectory.sampled_by(version)


def _turns(trajectories: Sequence[Trajectory]) -> tuple[list[np.ndarray], np.ndarray]:
    """Of each trajectory the turn of every token, int64 [L]: numbered over all trajectories in order, their number U
    for none. And sampled tokens of each turn: int64 [U]."""
    count = sum(len(t.turns) for t in trajectories)
    found, sampled, first = [], np.zeros(count + 1, np.int64), 0
    for trajectory in trajectories:
        own = trajectory.turn_of_token
        found.append(np.where(own < 0, count, own + first))
        np.add.at(sampled, found[-1][trajectory.loss_mask], 1)
        first += len(trajectory.turns)
    return found, sampled[:count]


def _recorded(trajectories: Sequence[Trajectory]) -> list[np.ndarray] | None:
    """The learner's own log-probs of the labels; None when a trajectory has none."""
    found = [trajectory.recorded for trajectory in trajectories]
    known = [recorded.logprobs[1:] for recorded in found if recorded is not None]
    return known if len(known) == len(found) else None


def _experts(trajectories: Sequence[Trajectory], layout: PackLayout) -> torch.Tensor | None:
    """``Pack.experts`` of this rank's tokens; None when no trajectory has a record."""
    shapes = [t.routed_experts.shape[1:] for t in trajectories if t.routed_experts is not None]
    if not shapes:
        return None
    whole: np.ndarray = np.full((layout.total, *shapes[0]), -1, np.int32)
    start = 0
    for trajectory, length in zip(trajectories, layout.lengths, strict=False):
        if (routed := trajectory.routed_experts) is not None:
            known = routed[:-1] != np.iinfo(routed.dtype).max
            whole[start : start + len(routed) - 1] = np.where(known, routed[:-1].astype(np.int32), -1)
        start += length
    return torch.from_numpy(whole[layout.take])
