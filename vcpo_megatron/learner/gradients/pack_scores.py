"""What one pack's backward needs and finds on this rank: ``PackScores``; and which rows belong to which trajectory.

A row of a layer's input or output gradient is a token, and belongs to one trajectory of the micro-step.
``TokenShards`` says to which, for the rows of this rank and for those of all ranks that hold other tokens of the
same trajectories and the same copy of the parameter (context parallelism; sequence parallelism for a
router): only together do they have the trajectory's whole weight gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from ..batch.packing import Pack
from ..megatron.host_exchange import HostExchange
from ..megatron.parallel import Parallel
from .weight_gradients import Accumulator, NormsOnly, WeightGradients

#: Ratios r_i / q_i that differ by no more than this share of themselves are those of one reward.
SAME_RATIO = 1e-12
#: q_i below which r_i W_i is not made of q_i W_i: the anchor's share of r_i would pass through fp32's denormals.
SMALLEST_SHARED = 1e-20


class TokenRows:
    """Rows of a matrix, sorted or not, by trajectory: ``ids`` int64 [R], ``n`` for a row of no trajectory."""

    def __init__(self, ids: Tensor, n: int, counts: list[int] | None = None) -> None:
        self.ids = ids
        self.n = n
        if counts is None:
            counts = torch.bincount(ids, minlength=n + 1)[:n].tolist()
            self._order: Tensor | None = ids.argsort(stable=True)
        else:
            self._order = None  # laid end to end, in order of the trajectories
        self.counts = counts
        self._starts = [0]
        for count in counts:
            self._starts.append(self._starts[-1] + count)

    def rows(self, i: int) -> slice | Tensor:
        """Rows of trajectory i, to index with."""
        cut = slice(self._starts[i], self._starts[i + 1])
        return cut if self._order is None else self._order[cut]

    def positions(self, members: list[int]) -> Tensor:
        """int64 [m, t]: rows of every member, t those of the longest; R (one beyond the last) where one ends."""
        device = self.ids.device
        width = max(1, max(self.counts[i] for i in members))
        start = torch.tensor([self._starts[i] for i in members], device=device)[:, None]
        end = torch.tensor([self._starts[i + 1] for i in members], device=device)[:, None]
        position = start + torch.arange(width, device=device)
        outside = position >= end
        if self._order is not None and len(self._order):
            position = self._order[position.clamp(max=len(self._order) - 1)]
        return torch.where(outside, len(self.ids), position)


class TokenShards:
    """Rows that this rank holds, and those of all ranks of ``group`` (None: of this rank only)."""

    def __init__(self, local: TokenRows, group: dist.ProcessGroup | None, whole: TokenRows | None = None) -> None:
        self.local = local
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._padded = len(local.ids)
        if self.group is None:
            self.whole = local
        elif whole is not None:
            self.whole = whole
        else:  # ranks hold different numbers of rows
            most = torch.tensor(self._padded, device=local.ids.device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
            self._padded = int(most)
            self.whole = TokenRows(self.gather(local.ids, fill=local.n), local.n)
        self._buckets: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}

    def gather(self, values: Tensor, fill: int = 0) -> Tensor:
        """Rows [R, ...] of all ranks of the group, one rank after another, as ``whole`` numbers them."""
        if self.group is None:
            return values
        missing = self._padded - len(values)
        if missing:
            values = torch.cat([values, values.new_full((missing, *values.shape[1:]), fill)])
        return gather_rows(values, self.group)

    def squared_norm(self, weight_gradient: Tensor) -> Tensor:
        """This rank's share of |W|^2 of a W of which every rank of the group holds a summand: float64 scalar."""
        if self.group is not None:
            ranks = dist.get_world_size(self.group)
            flat = weight_gradient.reshape(-1)
            flat = torch.cat([flat, flat.new_zeros(-len(flat) % ranks)])
            weight_gradient = flat.new_empty(len(flat) // ranks)
            dist.reduce_scatter_tensor(weight_gradient, flat, group=self.group)
        return torch.linalg.vector_norm(weight_gradient, dtype=torch.float32).double().square()

    def buckets(self, limit: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Trajectories of at most ``limit`` tokens, by length rounded up to a power of two.

        Each bucket is (trajectories int64 [m], their rows in ``local`` [m, t'], in ``whole`` [m, t]).
        """
        if limit not in self._buckets:
            lengths = self.whole.counts
            uniform = len(set(lengths)) == 1
            by_length: dict[int, list[int]] = {}
            for i, length in enumerate(lengths):
                if 0 < length <= limit:
                    by_length.setdefault(length if uniform else 1 << (length - 1).bit_length(), []).append(i)
            self._buckets[limit] = [
                (
                    torch.tensor(members, device=self.local.ids.device),
                    self.local.positions(members),
                    self.whole.positions(members),
                )
                for _, members in sorted(by_length.items())
            ]
        return self._buckets[limit]


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[R, ...] of every rank, one after another: [ranks R, ...]."""
    out = x.new_empty((x.shape[0] * dist.get_world_size(group), *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


@dataclass(frozen=True)
class Coefficients:
    """Of the n trajectories of a micro-step, float64 [n] each, on the CPU.

    gradient  r_i = w_i (R_i - m_g) / std_g + a: trajectory i's gradient in the total
    sums      q_i = w_i: in its group's sum S_g
    """

    gradient: Tensor
    sums: Tensor

    @cached_property
    def by_ratio(self) -> dict[float, list[int]] | None:
        """Trajectories by r_i / q_i, without those of r_i = q_i = 0; None where some r_i has no q_i to speak of.

        Trajectories of one reward share the ratio (without an anchor it is (R_i - m_g) / std_g, to rounding), and
        so one sum of q_i W_i serves both the gradient and S_g. A class's ratio is that of one of its trajectories,
        whatever its size: rewards have no unit.
        """
        ratios: dict[int, float] = {}
        for i, (r, q) in enumerate(zip(self.gradient.tolist(), self.sums.tolist(), strict=True)):
            if abs(q) < SMALLEST_SHARED and r != 0.0:
                return None
            if q != 0.0:
                ratios[i] = r / q
        shared: dict[int, float] = {}
        first = math.nan
        for i in sorted(ratios, key=ratios.__getitem__):
            if not abs(ratios[i] - first) <= SAME_RATIO * abs(first):  # nan is like nothing
                first = ratios[i]
            shared[i] = first
        classes: dict[float, list[int]] = {}
        for i in ratios:
            classes.setdefault(shared[i], []).append(i)
        return classes


@dataclass
class PackScores:
    """This rank's share of one pack's backward. Trajectories are numbered over the micro-step (``Pack.step_samples``).

    gradients            what becomes of weight gradients; set before the backward, like the next two
    coefficients         r and q
    accumulator          S_g of the group, where sums are accumulated
    kept                 functions of the final coefficients [n] that finish the gradient, where it is deferred
    owned                float64 [n]: squared norms of which this rank alone holds its share
    tied                 rows of the output layer's gradient that the embedding's will meet, where they are one
    exchange             takes messages to other stages; none where there is one
    """

    pack: Pack
    parallel: Parallel
    exchange: HostExchange | None = None
    gradients: WeightGradients = field(default_factory=NormsOnly)
    coefficients: Coefficients | None = None
    accumulator: Accumulator = field(default_factory=Accumulator)
    kept: list[Callable[[Tensor], object]] = field(default_factory=list)
    owned: Tensor = field(init=False)
    tied: Tensor | None = None
    _vectors: dict[str, list[Tensor]] = field(default_factory=lambda: {"owned": [], "replicated": [], "partial": []})

    def __post_init__(self) -> None:
        self.owned = torch.zeros(self.n, dtype=torch.float64, device=self.pack.tokens.device)

    @property
    def n(self) -> int:
        return len(self.pack.step_samples)

    @property
    def own(self) -> slice:
        """Numbers of the trajectories whose tokens this rank holds."""
        return slice(self.pack.offset, self.pack.offset + len(self.pack.samples))

    def _numbered(self, segments: Tensor) -> Tensor:
        """Segments of the pack -> trajectories of the micro-step."""
        return torch.where(segments < len(self.pack.samples), segments + self.pack.offset, self.n)

    @cached_property
    def dense(self) -> Tensor:
        """Trajectory of every token that a linear layer sees: int64 [T]."""
        return self._numbered(self.pack.segments)

    @cached_property
    def sequence(self) -> Tensor:
        """Trajectory of every token outside of tensor-parallel regions; a part of them under sequence parallelism."""
        if not self.parallel.sequence_parallel:
            return self.dense
        return self.dense.chunk(self.parallel.tensor_size)[self.parallel.tensor_rank]

    @cached_property
    def every(self) -> Tensor:
        """Trajectory of the tokens of all context-parallel ranks: int64 [C T]."""
        return self._numbered(self.pack.all_segments)

    @cached_property
    def dense_tokens(self) -> TokenShards:
        """Rows of a linear layer of the dense part."""
        edges = self.pack.boundaries
        lengths = [end - start for start, end in zip(edges, edges[1:], strict=False)]
        before, after = [0] * self.pack.offset, [0] * (self.n - self.pack.offset - len(lengths))
        local = TokenRows(self.dense, self.n, [*before, *lengths, *after])
        if self.parallel.context_size == 1:
            return TokenShards(local, None)
        return TokenShards(local, self.parallel.context_group, TokenRows(self.every, self.n))

    @cached_property
    def router_tokens(self) -> TokenShards:
        """Rows of a router, which sees the tokens outside of tensor-parallel regions."""
        if not self.parallel.sequence_parallel:
            return self.dense_tokens
        return TokenShards(TokenRows(self.sequence, self.n), self.parallel.tensor_context_group)

    def expert_tokens(self, ids: Tensor) -> TokenShards:
        """Rows that the dispatcher brought to one expert, given their trajectories."""
        return TokenShards(TokenRows(ids, self.n), self.parallel.expert_split_group)

    def add_vector(self, name: str, parameter: torch.nn.Parameter, rows: Tensor, ids: Tensor, kind: str) -> None:
        """Gradient of a vector parameter from its per-token gradients ``rows`` [R, d] of trajectories ``ids`` [R].

        ``kind`` says what the tensor ranks hold of it: different parts of the parameter (owned), all of it
        (replicated), or summands of all of it (partial: norms under sequence parallelism, q/k norms).
        """
        per = rows.new_zeros(self.n + 1, rows.shape[1], dtype=torch.float32)
        per = per.index_add_(0, ids, rows.float())[self.own]
        self._vectors[kind].append(per)
        self.gradients.vector(self, name, parameter, per)

    def squared_norms(self) -> Tensor:
        """This rank's share of |g_i|^2, to be summed over the replica: float64 [n]."""
        parallel = self.parallel
        groups = {
            "owned": parallel.context_group,
            "replicated": parallel.context_group,
            "partial": parallel.tensor_context_group,
        }
        for kind, vectors in self._vectors.items():
            if not vectors or not self.pack.samples:
                continue
            whole = torch.cat(vectors, dim=1)
            if dist.get_world_size(groups[kind]) > 1:
                dist.all_reduce(whole, group=groups[kind])
            vectors.clear()
            # what several ranks now hold alike is counted on the first of them
            if parallel.context_rank == 0 and (kind == "owned" or parallel.tensor_rank == 0):
                self.owned[self.own] += whole.double().square().sum(1)
        return self.owned


class ScoreSwitch:
    """Which pack the forward that runs now belongs to; None: plain Megatron gradients.

    It is set around a pack's forward and, for activations that are computed again, during its backward.
    """

    def __init__(self) -> None:
        self.current: PackScores | None = None

    def active(self) -> PackScores | None:
        return self.current if torch.is_grad_enabled() else None
