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
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from ..megatron import platform
from ..megatron.platform import add_product
from ..megatron.platform import fp32_product as _product

if TYPE_CHECKING:
    from .pack_scores import PackScores, TokenShards

#: FLOPs of a matrix product in the time of one pass (read, scale, add) over one fp32 element. Measured on a
#: CPU core, in blocks: 30. An H100-class GPU by its data sheet (12 bytes at 3.3 TB/s, 400 TFLOP/s): about 1,500.
PASS_FLOPS_CPU, PASS_FLOPS_GPU = 30, 1500
#: Trajectories of at most this many tokens share one batched Gram product, padded to powers of two. On a CPU
#: the padded copies cost more than the calls that they save.
BATCHED_TOKENS_CPU, BATCHED_TOKENS_GPU = 16, 64
#: Tokens of one block of the triangular Gram product.
GRAM_BLOCK_CPU, GRAM_BLOCK_GPU = 64, 256
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

    def squared_error(self) -> tuple[float, float]:
        """Of the probed rows: squared difference to fp32, and their squared size."""
        pairs = [(self[name][0].float(), row) for name, row in self.probe.items()]
        error = sum(float((kept - row).double().square().sum()) for kept, row in pairs)
        return error, sum(float(row.double().square().sum()) for _, row in pairs)


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


def constants(*, gpu: bool) -> tuple[int, int, int]:
    """FLOPs of a pass, longest trajectory of a batched Gram product, and block of a triangular one."""
    if gpu:
        return PASS_FLOPS_GPU, BATCHED_TOKENS_GPU, GRAM_BLOCK_GPU
    return PASS_FLOPS_CPU, BATCHED_TOKENS_CPU, GRAM_BLOCK_CPU


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
    """grads and inputs with one of them, the narrower, multiplied by ``factors`` row by row."""
    if grads.shape[1] <= inputs.shape[1]:
        return (grads.float() * factors[:, None]).to(grads.dtype), inputs
    return grads, (inputs.float() * factors[:, None]).to(inputs.dtype)


def add_gram_norms(scores: PackScores, tokens: TokenShards, limit: int, inputs: Tensor, grads: Tensor) -> None:
    """Add |W_i|^2 of trajectories of at most ``limit`` tokens without forming W_i.

    Where ranks hold different tokens of a trajectory, every rank multiplies its rows with all of them.
    """
    one_rank, batched = tokens.group is None, constants(gpu=platform.has_gpu())[1]
    buckets = tokens.buckets(min(limit, batched) if one_rank else limit)
    if buckets:
        all_inputs, all_grads = tokens.gather(inputs), tokens.gather(grads)
        for members, local, whole in buckets:
            gram = _product(_picked(inputs, local), _picked(all_inputs, whole).transpose(1, 2))
            gram *= _product(_picked(grads, local), _picked(all_grads, whole).transpose(1, 2))
            scores.owned.index_add_(0, members, gram.sum((1, 2), dtype=torch.float64))
    if one_rank:
        for i, length in enumerate(tokens.whole.counts):
            if batched < length <= limit:
                rows = tokens.local.rows(i)
                scores.owned[i] += _triangular_gram(inputs[rows], grads[rows])


def _picked(values: Tensor, positions: Tensor) -> Tensor:
    """values [R, d] at positions [m, t] -> [m, t, d]; position R reads as zeros."""
    if not len(values):
        return values.new_zeros(*positions.shape, values.shape[1])
    inside = positions < values.shape[0]
    return values[positions.clamp(max=values.shape[0] - 1)] * inside[..., None]


def _triangular_gram(a: Tensor, g: Tensor) -> Tensor:
    """<a a^T, g g^T> of a [t, d_in], g [t, d_out] by the lower triangle of blocks, float64 scalar."""
    total, block = torch.zeros((), dtype=torch.float64, device=a.device), constants(gpu=platform.has_gpu())[2]
    for start in range(0, len(a), block):
        rows_a, rows_g = a[start : start + block], g[start : start + block]
        total += _product(rows_a, rows_a.t()).mul_(_product(rows_g, rows_g.t())).sum(dtype=torch.float64)
        if start:
            below = _product(rows_a, a[:start].t()).mul_(_product(rows_g, g[:start].t()))
            total += 2 * below.sum(dtype=torch.float64)
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
        scores.owned.index_add_(0, torch.tensor(members, device=squares.device), squares)


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


def _rows_of(tokens: TokenShards, members: Sequence[int], *values: Tensor) -> list[Tensor]:
    """This rank's rows of ``members``; the tensors themselves where these are all rows."""
    if sum(tokens.local.counts[i] for i in members) == len(values[0]):
        return list(values)
    return [torch.cat([value[tokens.local.rows(i)] for i in members]) for value in values]


def _on_rows(factors: Tensor, ids: Tensor) -> Tensor:
    """[n] -> one a row of trajectories ``ids``, 0 for a row of none; fp32."""
    return torch.nn.functional.pad(factors.float(), (0, 1)).to(ids.device)[ids]


class Accumulate:
    """r_i W_i into the main gradient and q_i W_i into the group's accumulator, in the backward."""

    def matrix(
        self, scores: PackScores, tokens: TokenShards, name: str, weight: Parameter, inputs: Tensor, grads: Tensor
    ) -> None:
        assert scores.coefficients is not None
        r, q = scores.coefficients.gradient, scores.coefficients.sums
        main, total, probe = main_gradient(weight), scores.accumulator[name], scores.accumulator.probe.get(name)
        d_in, d_out = inputs.shape[1], grads.shape[1]
        classes = scores.coefficients.by_ratio
        shared = classes is not None and 2 * len(classes) <= scores.n
        # where W_i must be reduced over ranks, its size against that of the rows decides
        limit = crossover(d_in, d_out)
        if tokens.group is None:
            limit = accumulate_limit(d_in, d_out, constants(gpu=platform.has_gpu())[0], shared=shared)
        short, long = _split(tokens, limit)
        if short:
            add_gram_norms(scores, tokens, limit, inputs, grads)
        if shared and classes is not None:
            for ratio, members in classes.items():
                if chosen := sorted(set(members) & set(short)):
                    a, g, ids = _rows_of(tokens, chosen, inputs, grads, tokens.local.ids)
                    g, a = _scaled(g, _on_rows(q, ids), a)
                    for rows in _blocks(d_out, d_in):
                        first = None if rows.start else probe
                        self._add(_product(g[:, rows].t(), a), fp32_scalar(ratio), 1.0, main[rows], total[rows], first)
        elif short:
            a, g, ids = _rows_of(tokens, short, inputs, grads, tokens.local.ids)
            _add_product(main, g, _on_rows(r, ids), a)
            _add_product(total, g, _on_rows(q, ids), a)
            if probe is not None:
                probe.add_((_on_rows(q, ids) * g[:, 0].float()) @ a.float())
        factors = [(fp32_scalar(own), fp32_scalar(sums)) for own, sums in zip(r.tolist(), q.tolist(), strict=True)]
        for rows, shares in _in_blocks(scores, tokens, long, inputs, grads):
            main_rows, total_rows, first = main[rows], total[rows], None if rows.start else probe
            for i, w in shares:
                self._add(w, *factors[i], main_rows, total_rows, first)

    def _add(self, w: Tensor, r: float, q: float, main: Tensor, total: Tensor, probe: Tensor | None) -> None:
        main.add_(w, alpha=r)
        total.add_(w, alpha=q)
        if probe is not None:
            probe.add_(w[0], alpha=q)

    def vector(self, scores: PackScores, name: str, weight: Parameter, per: Tensor) -> None:
        assert scores.coefficients is not None
        r, q = (c[scores.own].to(per) for c in (scores.coefficients.gradient, scores.coefficients.sums))
        scores.accumulator[name].add_(torch.tensordot(q, per, 1))
        main_gradient(weight).add_(torch.tensordot(r, per, 1))

    def rows(
        self, scores: PackScores, name: str, weight: Parameter, owner: Tensor, index: Tensor, rows: Tensor
    ) -> None:
        assert scores.coefficients is not None
        r, q = (c.to(rows) for c in (scores.coefficients.gradient, scores.coefficients.sums))
        total, probe = scores.accumulator[name], scores.accumulator.probe.get(name)
        total.index_add_(0, index, (rows * q[owner, None]).to(total.dtype))
        if probe is not None:
            probe.add_((rows * q[owner, None])[index == 0].sum(0))
        main_gradient(weight).index_add_(0, index, rows * r[owner, None])


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
    """Keeps what the gradient needs in ``scores.kept``: functions of the final coefficients [n]."""

    def matrix(
        self, scores: PackScores, tokens: TokenShards, name: str, weight: Parameter, inputs: Tensor, grads: Tensor
    ) -> None:
        limit = crossover(inputs.shape[1], grads.shape[1])
        main = main_gradient(weight)
        short, long = _split(tokens, limit)
        if short:
            add_gram_norms(scores, tokens, limit, inputs, grads)
            a, g, ids = _rows_of(tokens, short, inputs, grads, tokens.local.ids)
            scores.kept.append(lambda final: _add_product(main, g, _on_rows(final, ids), a))
        for i in long:
            scores.kept.append(_later(main, _whole(scores, tokens, i, inputs, grads), i))

    def vector(self, scores: PackScores, name: str, weight: Parameter, per: Tensor) -> None:
        main, own = main_gradient(weight), scores.own
        scores.kept.append(lambda final: main.add_(torch.tensordot(final[own].to(per), per, 1)))

    def rows(
        self, scores: PackScores, name: str, weight: Parameter, owner: Tensor, index: Tensor, rows: Tensor
    ) -> None:
        main = main_gradient(weight)
        scores.kept.append(lambda final: main.index_add_(0, index, rows * final.to(rows)[owner, None]))


def _later(main: Tensor, w: Tensor, i: int) -> Callable[[Tensor], Tensor]:
    return lambda final: main.add_(w, alpha=fp32_scalar(float(final[i])))
