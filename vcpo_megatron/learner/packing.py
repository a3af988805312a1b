"""From a batch of groups to packed micro-batches: who trains what, in which order.

Every rank plans the whole batch alike, from token counts only, so nothing has to be agreed on.
A group stays on one data-parallel replica. A pack is one micro-batch: several trajectories of ONE
group laid end to end in one sequence, with block-diagonal attention and no padding between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..types import Batch, Trajectory


@dataclass(frozen=True)
class Row:
    """One trajectory of the batch: ``index`` numbers it over the whole batch (0..N-1)."""

    index: int
    group: int
    trajectory: Trajectory

    @property
    def cost(self) -> int:
        """Tokens that go through the model: the last one is only ever a label."""
        return len(self.trajectory.tokens) - 1


@dataclass(frozen=True)
class Pack:
    """Tensors of one micro-batch of n trajectories and T tokens (CPU or device).

    tokens             int64   [T]   model inputs (every trajectory without its last token)
    labels             int64   [T]   the token that follows each
    positions          int64   [T]   position in its own trajectory
    mask               bool    [T]   True where the label was sampled by the policy
    behavior_logprobs  float32 [T]   log mu(label), meaningful where ``mask``
    segments           int64   [T]   which of the n trajectories; n for padding at the end
    boundaries         ints    [n+1] trajectory i holds tokens boundaries[i] to boundaries[i+1]
    """

    rows: tuple[Row, ...]
    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    behavior_logprobs: torch.Tensor
    segments: torch.Tensor
    boundaries: tuple[int, ...]

    @property
    def group(self) -> int:
        return self.rows[0].group

    @property
    def length(self) -> int:
        """Tokens of the micro-batch, padding included."""
        return len(self.tokens)

    @property
    def padded(self) -> int:
        """Tokens of padding."""
        return self.length - self.boundaries[-1]


def batch_rows(batch: Batch) -> list[list[Row]]:
    """Rows of every group, numbered over the batch."""
    groups, index = [], 0
    for number, group in enumerate(batch.groups):
        groups.append([Row(index + i, number, t) for i, t in enumerate(group.trajectories)])
        index += len(group.trajectories)
    return groups


def assign_groups(costs: Sequence[int], replicas: int) -> list[list[int]]:
    """Spread groups over replicas by cost, largest first to the least loaded; indices ascending.

    Ties go to the lower index and the lower replica, so every rank finds the same plan.
    """
    shares: list[list[int]] = [[] for _ in range(replicas)]
    loads = [0] * replicas
    for group in sorted(range(len(costs)), key=lambda g: (-costs[g], g)):
        replica = min(range(replicas), key=lambda r: (loads[r], r))
        shares[replica].append(group)
        loads[replica] += costs[group]
    return [sorted(share) for share in shares]


def split_into_packs(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Cut the rows of one group into packs of at most ``max_tokens`` (a longer row gets its own).

    Longest first into the fullest pack that still has room (best fit); rows of a pack keep the order
    of the batch.
    """
    packs: list[list[Row]] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda r: (-r.cost, r.index)):
        fitting = [i for i, free in enumerate(room) if free >= row.cost]
        if fitting:
            best = min(fitting, key=lambda i: (room[i], i))
            packs[best].append(row)
            room[best] -= row.cost
        else:
            packs.append([row])
            room.append(max_tokens - row.cost)
    ordered = [sorted(pack, key=lambda r: r.index) for pack in packs]
    return sorted(ordered, key=lambda pack: pack[0].index)


def make_pack(rows: Sequence[Row], multiple: int, device: torch.device) -> Pack:
    """Lay ``rows`` end to end; the sequence is padded to a multiple of ``multiple`` (sequence parallelism)."""
    lengths = [row.cost for row in rows]
    total = sum(lengths)
    padding = -total % multiple
    boundaries = np.concatenate([[0], np.cumsum(lengths)])

    def joined(pieces: list[np.ndarray], fill: float, dtype: torch.dtype) -> torch.Tensor:
        array = np.concatenate([*pieces, np.full(padding, fill, pieces[0].dtype)])
        return torch.from_numpy(array).to(device=device, dtype=dtype)

    trajectories = [row.trajectory for row in rows]
    segments = np.repeat(np.arange(len(rows)), lengths)
    return Pack(
        rows=tuple(rows),
        tokens=joined([t.tokens[:-1] for t in trajectories], 0, torch.int64),
        labels=joined([t.tokens[1:] for t in trajectories], 0, torch.int64),
        positions=joined([np.arange(n) for n in lengths], 0, torch.int64),
        mask=joined([t.loss_mask[1:] for t in trajectories], False, torch.bool),
        behavior_logprobs=joined([t.behavior_logprobs[1:] for t in trajectories], 0.0, torch.float32),
        segments=joined([segments], len(rows), torch.int64),
        boundaries=tuple(int(b) for b in boundaries),
    )
