"""What one pack's backward needs and finds on this rank: ``PackScores``; and which rows belong to which trajectory.

A row of a layer's input or output gradient is a token, and belongs to one trajectory of the micro-step.
``TokenShards`` says to which, for the rows of this rank and for those of all ranks that hold other tokens of the
same trajectories and the same copy of the parameter (context parallelism; sequence parallelism for a
router): only together do they have the trajectory's whole weight gradient. The host knows all of it when the pack is
made, or from one read of a mixture's dispatcher; a device learns it once a pack and never answers for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..batch.packing import Pack
from ..megatron import platform
from ..megatron.host_exchange import HostExchange
from ..megatron.parallel import Parallel
from .weight_gradients import Accumulator, NormsOnly, WeightGradients, length_classes

if TYPE_CHECKING:
    from .tied import TokenPairs

#: (trajectory, rows): neighbouring rows of one trajectory; n for rows of none.
Run = tuple[int, int]


class TokenRows:
    """Rows of a matrix by trajectory, told by their ``runs`` in order; ``ids`` int64 [R] says the same on the device,
    ``n`` for a row of no trajectory."""

    def __init__(self, runs: Iterable[Run], n: int, ids: Tensor) -> None:
        self.ids = ids
        self.counts = [0] * n
        self.size = 0
        self._cuts: list[list[slice]] = [[] for _ in range(n)]
        for trajectory, rows in runs:
            if trajectory < n and rows:
                self.counts[trajectory] += rows
                self._cuts[trajectory].append(slice(self.size, self.size + rows))
            self.size += rows
        self._numbers: dict[int, Tensor] = {}

    def rows(self, i: int) -> slice | Tensor:
        """Rows of trajectory i, to index with."""
        cuts = self._cuts[i]
        if len(cuts) == 1:
            return cuts[0]
        if i not in self._numbers:
            self._numbers[i] = platform.to_device(torch.from_numpy(self.numbers(i)), self.ids.device)
        return self._numbers[i]

    def numbers(self, i: int) -> np.ndarray:
        """The same as numbers, on the host: int64 [counts[i]]."""
        cuts = [np.arange(cut.start, cut.stop) for cut in self._cuts[i]]
        return np.concatenate(cuts) if cuts else np.zeros(0, np.int64)


@dataclass
class RowChoice:
    """Rows of some trajectories. ``index`` int64 [r] numbers them, None: all rows, those of no trajectory included;
    ``ids`` int64 [r]: their trajectories."""

    index: Tensor | None
    ids: Tensor
    _factors: tuple[Tensor, Tensor] | None = None

    def of(self, values: Tensor) -> Tensor:
        """values [R, ...] -> [r, ...]."""
        return values if self.index is None else values.index_select(0, self.index)

    def factors(self, table: Tensor) -> Tensor:
        """Columns of ``table`` [k, n + 1] for the rows: [k, r], found once a table."""
        if self._factors is None or self._factors[0] is not table:
            self._factors = (table, table[:, self.ids])
        return self._factors[1]


@dataclass(frozen=True)
class RowBlocks:
    """Rows [m, t] of m trajectories, padded to the longest. Where they lie end to end and are of one length, from
    ``start`` on; else ``index`` int64 [m t] numbers them, and ``inside`` bool [m t, 1] says which are no padding (None:
    all are)."""

    m: int
    t: int
    start: int | None
    index: Tensor | None = None
    inside: Tensor | None = None

    @classmethod
    def of(cls, rows: TokenRows, members: Sequence[int]) -> RowBlocks:
        numbers = [rows.numbers(i) for i in members]
        m, t = len(members), max(1, max(len(own) for own in numbers))
        joined = np.concatenate(numbers)
        if len(joined) == m * t and joined[-1] - joined[0] == m * t - 1 and bool((np.diff(joined) == 1).all()):
            return cls(m, t, int(joined[0]))
        inside = np.arange(t) < np.array([[len(own)] for own in numbers])
        index = np.zeros((m, t), np.int64)
        index[inside] = joined
        device = rows.ids.device
        kept = None if inside.all() else platform.to_device(torch.from_numpy(inside.reshape(-1, 1)), device)
        return cls(m, t, None, platform.to_device(torch.from_numpy(index.reshape(-1)), device), kept)

    def of_rows(self, values: Tensor) -> Tensor:
        """values [R, d] -> [m, t, d], or [t, d] of one; padding reads as zeros."""
        if self.start is not None:
            found = values[self.start : self.start + self.m * self.t]
        elif not len(values):
            found = values.new_zeros(self.m * self.t, values.shape[1])
        else:
            assert self.index is not None
            found = values.index_select(0, self.index)
            if self.inside is not None:
                found.mul_(self.inside)
        return found if self.m == 1 else found.view(self.m, self.t, -1)


@dataclass(frozen=True)
class LengthClass:
    """Trajectories whose norms are taken together: ``members`` int64 [m], and their rows here and on all ranks."""

    members: Tensor
    local: RowBlocks
    whole: RowBlocks


class TokenShards:
    """Rows that this rank holds, and ``whole``: those of all ranks of ``group``, one rank after another, each padded to
    ``padded`` rows (None: of this rank only)."""

    def __init__(
        self,
        local: TokenRows,
        group: dist.ProcessGroup | None,
        whole: TokenRows | None = None,
        padded: int | None = None,
    ) -> None:
        self.local = local
        self.group = group if whole is not None else None
        self.whole = local if whole is None else whole
        self._padded = local.size if padded is None else padded
        self._classes: dict[tuple[int, int], list[LengthClass]] = {}
        self._choices: dict[tuple[int, ...], RowChoice] = {}
        self._members: dict[tuple[int, ...], Tensor] = {}

    def gather(self, values: Tensor) -> Tensor:
        """Rows [R, ...] of all ranks of the group, one rank after another, as ``whole`` numbers them."""
        if self.group is None:
            return values
        missing = self._padded - len(values)
        if missing:
            values = torch.cat([values, values.new_zeros((missing, *values.shape[1:]))])
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

    def members(self, members: Sequence[int]) -> Tensor:
        """Numbers of trajectories on the device: int64 [m]."""
        key = tuple(members)
        if key not in self._members:
            self._members[key] = platform.to_device(torch.tensor(key), self.local.ids.device)
        return self._members[key]

    def length_classes(self, limit: int, width: int) -> list[LengthClass]:
        """Trajectories of at most ``limit`` tokens, those together whose Gram products of ``width`` = d_in + d_out
        numbers a token are formed in one call."""
        if (limit, width) not in self._classes:
            self._classes[limit, width] = [
                LengthClass(
                    self.members(members),
                    RowBlocks.of(self.local, members),
                    RowBlocks.of(self.whole, members),
                )
                for members in length_classes(self.whole.counts, limit, width, gpu=platform.has_gpu())
            ]
        return self._classes[limit, width]

    def rows_of(self, members: Sequence[int]) -> RowChoice:
        """This rank's rows of ``members``, all rows where these are all that have any."""
        key = tuple(members)
        if key not in self._choices:
            numbers = [self.local.numbers(i) for i in key]
            if sum(map(len, numbers)) == sum(self.local.counts):
                self._choices[key] = RowChoice(None, self.local.ids)
            else:
                index = platform.to_device(torch.from_numpy(np.concatenate(numbers)), self.local.ids.device)
                self._choices[key] = RowChoice(index, self.local.ids.index_select(0, index))
        return self._choices[key]


def cut_runs(runs: Sequence[Run], start: int, end: int) -> list[Run]:
    """Those of the rows ``start`` to ``end``."""
    found, first = [], 0
    for trajectory, rows in runs:
        kept = min(end, first + rows) - max(start, first)
        if kept > 0:
            found.append((trajectory, kept))
        first += rows
    return found


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[R, ...] of every rank, one after another: [ranks R, ...]."""
    out = x.new_empty((x.shape[0] * dist.get_world_size(group), *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


@dataclass(frozen=True)
class Coefficients:
    """Of the n trajectories of a micro-step, float64 [n] each, where their gradients are.

    gradient  r_i = w_i (R_i - m_g) / std_g + a: trajectory i's gradient in the total
    sums      q_i = w_i: in its group's sum S_g
    classes   trajectories of one reward, as the host knows them; None where an anchor a takes part in r_i
    ratios    r_i / q_i of each class: (R_i - m_g) / std_g

    Without an anchor one sum of q_i W_i over a class serves both the gradient and S_g. With one, r_i W_i is not made of
    q_i W_i: of a vanishing q_i the anchor's share of r_i would pass through fp32's denormals.
    """

    gradient: Tensor
    sums: Tensor
    classes: tuple[tuple[int, ...], ...] | None = None
    ratios: Tensor | None = None

    @cached_property
    def table(self) -> Tensor:
        """r and q in fp32, infinite beyond it, and 0 for rows of no trajectory: [2, n + 1]."""
        return torch.nn.functional.pad(torch.stack([self.gradient, self.sums]).float(), (0, 1))

    @cached_property
    def fp32_ratios(self) -> Tensor:
        assert self.ratios is not None
        return self.ratios.float()


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
    token_pairs          plans of the embedding's rows (``tied``), by the part of the vocabulary
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
    token_pairs: dict[tuple[int, int], TokenPairs] = field(default_factory=dict)
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

    @property
    def _runs(self) -> list[Run]:
        """Of the tokens that this context-parallel rank holds, and each of the others as well."""
        edges, offset = self.pack.boundaries, self.pack.offset
        runs = [(offset + i, end - start) for i, (start, end) in enumerate(zip(edges, edges[1:], strict=False))]
        return [*runs, (self.n, len(self.pack.tokens) - edges[-1])]

    @cached_property
    def dense_tokens(self) -> TokenShards:
        """Rows of a linear layer of the dense part."""
        local, ranks = TokenRows(self._runs, self.n, self.dense), self.parallel.context_size
        if ranks == 1:
            return TokenShards(local, None)
        return TokenShards(local, self.parallel.context_group, TokenRows(self._runs * ranks, self.n, self.dense))

    @cached_property
    def router_tokens(self) -> TokenShards:
        """Rows of a router, which sees the tokens outside of tensor-parallel regions."""
        if not self.parallel.sequence_parallel:
            return self.dense_tokens
        parallel = self.parallel
        size = len(self.pack.tokens) // parallel.tensor_size
        local = TokenRows(
            cut_runs(self._runs, parallel.tensor_rank * size, (parallel.tensor_rank + 1) * size), self.n, self.sequence
        )
        # tensor-parallel ranks are neighbours: their parts in order are what one context-parallel rank holds
        whole = TokenRows(self._runs * parallel.context_size, self.n, self.sequence)
        return TokenShards(local, parallel.tensor_context_group, whole)

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
