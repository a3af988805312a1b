"""What becomes of one layer's weight gradients, trajectory by trajectory: three exact modes.

With G_i, A_i the output gradients and inputs of trajectory i's tokens, W_i = G_i^T A_i is its share of the
weight gradient. Its squared norm is found by the cheaper of two methods:

    explicit   form W_i and square it           2 T d_in d_out FLOPs
    Gram       <A_i A_i^T, G_i G_i^T>           T^2 (d_in + d_out) FLOPs, by the lower triangle

    Accumulate  |W_i|^2, main gradient += r_i W_i, S_g += q_i W_i     in the backward; explicit W_i serves all three
    Deferred    |W_i|^2, and W_i or (A_i, G_i), whichever is smaller, is kept until the coefficients are final
    NormsOnly   |W_i|^2

Gradients go straight into the parameter's fp32 ``main_grad``; autograd is told that there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from ..megatron import platform
from ..megatron.platform import add_product
from ..megatron.platform import fp32_product as _product

if TYPE_CHECKING:
    from .pack_scores import PackScores, TokenShards


@dataclass(frozen=True)
class Costs:
    """What decides how a norm is taken, in FLOPs of a matrix product that take the same time.

    pass_flops    of one pass (read, scale, add) over one fp32 element
    launch_flops  of the calls that one Gram product is made of
    longest       trajectories of more tokens never share a Gram product
    block         tokens of one block of the triangular Gram product
    """

    pass_flops: int
    launch_flops: float
    longest: int
    block: int


#: Measured on a CPU core: passes in blocks; padded copies of more than 16 tokens cost more than the calls they save.
CPU = Costs(pass_flops=30, launch_flops=2.5e6, longest=16, block=64)
#: An H100-class GPU by its data sheet (12 bytes at 3.3 TB/s, 400 TFLOP/s), and 8 launches of 3 us: a block of less than
#: 1,024 tokens takes less time than its launches.
GPU = Costs(pass_flops=1500, launch_flops=1e10, longest=1 << 20, block=1024)
#: On a CPU an explicit W_i is made in blocks of about this many elements (1 MiB), which stay in cache through
#: the norm and the additions, but of so many rows that the product stays efficient.
BLOCK_ELEMENTS, BLOCK_ROWS = 1 << 18, 128


FP32_MAX = torch.finfo(torch.float32).max


class Accumulator(dict[str, Tensor]):
    """S_g of one group by parameter name. ``probe``: fp32 first rows of matrices whose S_g is not fp32."""

    def __init__(self, values: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(values or {})
        self.probe: dict[str, Tensor] = {}

    @classmethod
    def zeros(cls, parameters: Mapping[str, Parameter], dtype: torch.dtype) -> Accumulator:
        """Zeros of the shapes of ``parameters``."""
        made = cls({n: torch.zeros(p.shape, dtype=dtype, device=p.device) for n, p in parameters.items()})
        matrices = {n: p for n, p in parameters.items() if p.dim() == 2 and dtype is not torch.float32}
        made.probe = {n: torch.zeros(p.shape[1], dtype=torch.float32, device=p.device) for n, p in matrices.items()}
        return made

    def clear_values(self) -> None:
        torch._foreach_zero_([*self.values(), *self.probe.values()])

    def squared_error(self) -> Tensor:
        """Of the probed rows: squared difference to fp32, and their squared size, float64 [2]."""
        kept = torch.cat([self[name][0].float() for name in self.probe])
        rows = torch.cat(list(self.probe.values()))
        return torch.stack([(kept - rows).double().square().sum(), rows.double().square().sum()])


class WeightGradients(Protocol):
    """One of the three modes. ``tokens`` gives the trajectories of a layer's rows; squared norms go to
    ``scores.owned``."""

    def matrix(
        self, scores: PackScores, tokens: TokenShards, name: str, weight: Parameter, inputs: Tensor, grads: Tensor
    ) -> None:
        """A linear weight [d_out, d_in] from inputs [R, d_in] and grads [R, d_out]."""

    def vector(self, scores: PackScores, name: str, weight: Parameter, per: Tensor) -> None:
        """Any weight [...] from fp32 gradients [own n, ...] of this rank's trajectories; norms: the caller's."""

    def rows(
        self, scores: PackScores, name: str, weight: Parameter, owner: Tensor, index: Tensor, rows: Tensor
    ) -> None:
        """An embedding from fp32 rows [m, d]: row j is trajectory owner[j]'s gradient of row index[j]."""


def main_gradient(parameter: Parameter) -> Tensor:
    """The fp32 gradient that Megatron's DDP reduces and its optimizer reads."""
    return parameter.main_grad  # type: ignore[attr-defined]


def fp32_scalar(value: float) -> float:
    """``value`` as a factor of fp32 tensors: infinite where fp32 is, so that the step is skipped; torch would raise."""
    return math.copysign(math.inf, value) if abs(value) > FP32_MAX else value


def crossover(d_in: int, d_out: int) -> int:
    """Tokens from which W_i is smaller than (A_i, G_i) and cheaper to square than by Gram matrices."""
    return d_in * d_out // (d_in + d_out)


def accumulate_limit(d_in: int, d_out: int, pass_flops: int, *, shared: bool = False) -> int:
    """Longest trajectory whose norm is taken by Gram matrices while sums are accumulated.

    An explicit W_i costs three passes over its elements, of ``pass_flops`` each. Against it stand a second product over
    the tokens, for S_g, or, where trajectories share rewards (``shared``), the T^2 (d_in + d_out) FLOPs of the Gram
    product only.
    """
    passes, edge = 3 * pass_flops, crossover(d_in, d_out)
    return min(edge, math.isqrt(passes * edge) if shared else passes // 2)


def costs(*, gpu: bool) -> Costs:
    """Of the device of this kind."""
    return GPU if gpu else CPU


def length_classes(lengths: Sequence[int], limit: int, width: int, *, gpu: bool) -> list[list[int]]:
    """Trajectories of 1 to ``limit`` tokens, together where padding the shorter one costs less than calls of its own.

    From the longest on: one joins the class at hand while the products of its padding, of ``width`` = d_in + d_out
    numbers a token, take less time than the launches that it would need alone.
    """
    chosen = costs(gpu=gpu)
    longest, classes = 0, list[list[int]]()
    for i in sorted((i for i, n in enumerate(lengths) if 0 < n <= limit), key=lambda i: (-lengths[i], i)):
        padding = 2.0 * width * (longest**2 - lengths[i] ** 2)
        if classes and longest <= chosen.longest and padding < chosen.launch_flops:
            classes[-1].append(i)
        else:
            longest = lengths[i]
            classes.append([i])
    return [sorted(members) for members in classes]


def _add_product(total: Tensor, grads: Tensor, factors: Tensor, inputs: Tensor) -> None:
    """total += sum_t factors[t] grads[t]^T inputs[t]."""
    grads, inputs = _scaled(grads, factors, inputs)
    if total.dtype is torch.float32 and grads.dtype is torch.float32:
        total.addmm_(grads.t(), inputs)
    elif total.dtype is torch.float32 and platform.kernels().adds_products:
        add_product(total, grads, inputs)
    else:
        total.add_(_product(grads.t(), inputs))


def _scaled(grads: Tensor, factors: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """grads and inputs with one of them, the narrower, multiplied by ``factors`` row by row, in fp32 inside."""
    if grads.shape[1] <= inputs.shape[1]:
        return torch.mul(grads, factors[:, None], out=torch.empty_like(grads)), inputs
    return grads, torch.mul(inputs, factors[:, None], out=torch.empty_like(inputs))


def add_gram_norms(scores: PackScores, tokens: TokenShards, limit: int, inputs: Tensor, grads: Tensor) -> None:
    """Add |W_i|^2 of trajectories of at most ``limit`` tokens without forming W_i.

    Where ranks hold different tokens of a trajectory, every rank multiplies its rows with all of them.
    """
    all_inputs, all_grads = tokens.gather(inputs), tokens.gather(grads)
    for some in tokens.length_classes(limit, inputs.shape[1] + grads.shape[1]):
        a, g = some.local.of_rows(inputs), some.local.of_rows(grads)
        if tokens.group is None:
            squares = _triangular_gram(a, g)
        else:
            gram = _product(a, some.whole.of_rows(all_inputs).mT)
            gram *= _product(g, some.whole.of_rows(all_grads).mT)
            squares = gram.sum((-1, -2), dtype=torch.float64)
        scores.owned.index_add_(0, some.members, squares.view(-1))


def _triangular_gram(a: Tensor, g: Tensor) -> Tensor:
    """<a a^T, g g^T> of a [..., t, d_in], g [..., t, d_out] by the lower triangle of blocks: float64 [...]."""
    block, total = costs(gpu=platform.has_gpu()).block, None
    for start in range(0, a.shape[-2], block):
        rows_a, rows_g = a[..., start : start + block, :], g[..., start : start + block, :]
        found = _product(rows_a, rows_a.mT).mul_(_product(rows_g, rows_g.mT)).sum((-1, -2), dtype=torch.float64)
        total = found if total is None else total.add_(found)
        if start:
            below = _product(rows_a, a[..., :start, :].mT).mul_(_product(rows_g, g[..., :start, :].mT))
            total.add_(below.sum((-1, -2), dtype=torch.float64), alpha=2)
    assert total is not None
    return total


def _whole(scores: PackScores, tokens: TokenShards, i: int, inputs: Tensor, grads: Tensor) -> Tensor:
    """This rank's summand of W_i [d_out, d_in], fp32; the squared norm of the whole is recorded."""
    rows = tokens.local.rows(i)
    w = _product(grads[rows].t(), inputs[rows])
    scores.owned[i] += tokens.squared_norm(w)
    return w


def _blocks(d_out: int, d_in: int) -> list[slice]:
    """Rows of a weight that are made together."""
    size = d_out if platform.has_gpu() else max(BLOCK_ROWS, BLOCK_ELEMENTS // d_in)
    return [slice(start, start + size) for start in range(0, d_out, size)]


def _in_blocks(
    scores: PackScores, tokens: TokenShards, members: Sequence[int], inputs: Tensor, grads: Tensor
) -> Iterator[tuple[slice, Iterator[tuple[int, Tensor]]]]:
    """Blocks of rows, and (i, W_i[rows]) of all ``members`` in each; all of it is to be taken.

    A block of what W_i is added to is still in cache when the next trajectory's comes. Squared norms are recorded
    in the end.
    """
    if tokens.group is not None:  # the ranks' summands meet in one message
        yield slice(None), ((i, _whole(scores, tokens, i, inputs, grads)) for i in members)
    elif members:
        cuts = [tokens.local.rows(i) for i in members]
        parts = [(i, grads[cut].t(), inputs[cut]) for i, cut in zip(members, cuts, strict=True)]
        norms: list[Tensor] = []
        for rows in _blocks(grads.shape[1], inputs.shape[1]):
            yield rows, _block(parts, rows, norms)
        squares = torch.stack(norms).double().square().view(-1, len(parts)).sum(0)
        scores.owned.index_add_(0, tokens.members(members), squares)


def _block(
    parts: Sequence[tuple[int, Tensor, Tensor]], rows: slice, norms: list[Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """(i, W_i[rows]) of ``parts`` (i, G_i^T, A_i); their norms are added to ``norms``."""
    for i, g, a in parts:
        w = _product(g[rows], a)
        norms.append(torch.linalg.vector_norm(w))
        yield i, w


def _split(tokens: TokenShards, limit: int) -> tuple[list[int], list[int]]:
    """Trajectories of at most ``limit`` tokens, and longer ones; none without tokens."""
    counts = tokens.whole.counts
    short = [i for i, count in enumerate(counts) if 0 < count <= limit]
    return short, [i for i, count in enumerate(counts) if count > limit]


class Accumulate:
    """r_i W_i into the main gradient and q_i W_i into the group's accumulator, in the backward."""

    def matrix(
        self, scores: PackScores, tokens: TokenShards, name: str, weight: Parameter, inputs: Tensor, grads: Tensor
    ) -> None:
        coefficients = scores.coefficients
        assert coefficients is not None
        main, total, probe = main_gradient(weight), scores.accumulator[name], scores.accumulator.probe.get(name)
        d_in, d_out = inputs.shape[1], grads.shape[1]
        classes = coefficients.classes
        shared = classes is not None and 2 * len(classes) <= scores.n
        # where W_i must be reduced over ranks, its size against that of the rows decides
        limit = crossover(d_in, d_out)
        if tokens.group is None:
            limit = accumulate_limit(d_in, d_out, costs(gpu=platform.has_gpu()).pass_flops, shared=shared)
        short, long = _split(tokens, limit)
        if short:
            add_gram_norms(scores, tokens, limit, inputs, grads)
        if shared and classes is not None:
            for number, members in enumerate(classes):
                if chosen := sorted(set(members) & set(short)):
                    rows, ratio = tokens.rows_of(chosen), coefficients.fp32_ratios[number]
                    g, a = _scaled(rows.of(grads), rows.factors(coefficients.table)[1], rows.of(inputs))
                    for cut in _blocks(d_out, d_in):
                        first = None if cut.start else probe
                        self._add(_product(g[:, cut].t(), a), ratio, None, main[cut], total[cut], first)
        elif short:
            rows = tokens.rows_of(short)
            (r, q), a, g = rows.factors(coefficients.table), rows.of(inputs), rows.of(grads)
            _add_product(main, g, r, a)
            _add_product(total, g, q, a)
            if probe is not None:
                probe.add_((q * g[:, 0].float()) @ a.float())
        own, sums = coefficients.table
        for cut, shares in _in_blocks(scores, tokens, long, inputs, grads):
            main_rows, total_rows, first = main[cut], total[cut], None if cut.start else probe
            for i, w in shares:
                self._add(w, own[i], sums[i], main_rows, total_rows, first)

    def _add(self, w: Tensor, r: Tensor, q: Tensor | None, main: Tensor, total: Tensor, probe: Tensor | None) -> None:
        """main += r w and total += q w, q 1 where it is None."""
        main.addcmul_(w, r)
        for sums, rows in ((total, w), (probe, w[0])):
            if sums is not None:
                sums.add_(rows) if q is None else sums.addcmul_(rows, q)

    def vector(self, scores: PackScores, name: str, weight: Parameter, per: Tensor) -> None:
        assert scores.coefficients is not None
        r, q = scores.coefficients.table[:, scores.own].to(per.dtype)
        scores.accumulator[name].add_(torch.tensordot(q, per, 1))
        main_gradient(weight).add_(torch.tensordot(r, per, 1))

    def rows(
        self, scores: PackScores, name: str, weight: Parameter, owner: Tensor, index: Tensor, rows: Tensor
    ) -> None:
        assert scores.coefficients is not None
        r, q = scores.coefficients.table[:, owner].to(rows.dtype)[..., None]
        total, probe = scores.accumulator[name], scores.accumulator.probe.get(name)
        total.index_add_(0, index, (rows * q).to(total.dtype))
        if probe is not None:
            probe.add_(torch.where(index[:, None] == 0, rows * q, 0.0).sum(0))
        main_gradient(weight).index_add_(0, index, rows * r)


class NormsOnly:
    """Nothing but norms: the first of two passes."""

    def matrix(
        self, scores: PackScores, tokens: TokenShards, name: str, weight: Parameter, inputs: Tensor, grads: Tensor
    ) -> None:
        limit = crossover(inputs.shape[1], grads.shape[1])
        short, long = _split(tokens, limit)
        if short:
            add_gram_norms(scores, tokens, limit, inputs, grads)
        for _, shares in _in_blocks(scores, tokens, long, inputs, grads):
            for _ in shares:
                pass  # the norms are all that is wanted

    def vector(self, scores: PackScores, name: str, weight: Parameter, per: Tensor) -> None: ...

    def rows(
        self, scores: PackScores, name: str, weight: Parameter, owner: Tensor, index: Tensor, rows: Tensor
    ) -> None: ...


class Deferred:
    """Keeps what the gradient needs in ``scores.kept``: functions of a table of the final coefficients, fp32
    [1, n + 1], 0 for rows of no trajectory."""

    def matrix(
        self, scores: PackScores, tokens: TokenShards, name: str, weight: Parameter, inputs: Tensor, grads: Tensor
    ) -> None:
        limit = crossover(inputs.shape[1], grads.shape[1])
        main = main_gradient(weight)
        short, long = _split(tokens, limit)
        if short:
            add_gram_norms(scores, tokens, limit, inputs, grads)
            rows = tokens.rows_of(short)
            a, g = rows.of(inputs), rows.of(grads)
            scores.kept.append(lambda final: _add_product(main, g, rows.factors(final)[0], a))
        for i in long:
            scores.kept.append(_later(main, _whole(scores, tokens, i, inputs, grads), i))

    def vector(self, scores: PackScores, name: str, weight: Parameter, per: Tensor) -> None:
        main, own = main_gradient(weight), scores.own
        scores.kept.append(lambda final: main.add_(torch.tensordot(final[0, own].to(per.dtype), per, 1)))

    def rows(
        self, scores: PackScores, name: str, weight: Parameter, owner: Tensor, index: Tensor, rows: Tensor
    ) -> None:
        main = main_gradient(weight)
        scores.kept.append(lambda final: main.index_add_(0, index, rows * final[0, owner, None].to(rows.dtype)))


def _later(main: Tensor, w: Tensor, i: int) -> Callable[[Tensor], Tensor]:
    return lambda final: main.addcmul_(w, final[0, i])
