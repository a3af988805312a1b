"""What becomes of one layer's weight gradients, trajectory by trajectory: three exact ways.

With G_i, A_i the output gradients and inputs of trajectory i's tokens, W_i = G_i^T A_i is its share of the
weight gradient. Its squared norm is found in one of two ways, whichever costs less:

    explicit   form W_i and square it           2 T d_in d_out FLOPs
    Gram       <A_i A_i^T, G_i G_i^T>           T^2 (d_in + d_out) FLOPs, by the lower triangle

    Accumulate  |W_i|^2, main gradient += r_i W_i, S_g += q_i W_i     in the backward; explicit W_i serves all three
    Deferred    |W_i|^2, and W_i or (A_i, G_i), whichever is smaller, is kept until the coefficients are final
    NormsOnly   |W_i|^2

Gradients go straight into the parameter's fp32 ``main_grad``; autograd is told that there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from . import platform

if TYPE_CHECKING:
    from .score_gradients import PackScores

#: FLOPs of a matrix product in the time of one pass (read, scale, add) over one fp32 element. Measured on a
#: CPU core: 13. An H100-class GPU by its data sheet (12 bytes at 3.3 TB/s, 400 TFLOP/s): about 1,500.
PASS_FLOPS_CPU, PASS_FLOPS_GPU = 13, 1500
#: Trajectories of at most this many tokens share one batched Gram product, padded to powers of two.
BATCHED_TOKENS = 64
#: Tokens of one block of the triangular Gram product.
GRAM_BLOCK = 256


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
    """One of the three ways. Every method records the squared norm where it is its business to."""

    def matrix(self, scores: PackScores, name: str, inputs: Tensor, grads: Tensor) -> None:
        """A linear weight [d_out, d_in] from inputs [T, d_in] and grads [T, d_out]."""

    def vector(self, scores: PackScores, name: str, per: Tensor) -> None:
        """A bias or norm weight [d] from fp32 per-trajectory gradients [n, d]; their norms are the caller's."""

    def rows(self, scores: PackScores, name: str, owner: Tensor, index: Tensor, rows: Tensor) -> None:
        """An embedding from fp32 rows [m, d]: row j is trajectory owner[j]'s gradient of row index[j]."""


def crossover(d_in: int, d_out: int) -> int:
    """Tokens from which W_i is smaller than (A_i, G_i) and cheaper to square than by Gram matrices."""
    return d_in * d_out // (d_in + d_out)


def accumulate_limit(d_in: int, d_out: int) -> int:
    """Longest trajectory whose norm is taken by Gram matrices while sums are accumulated.

    An explicit W_i saves the second product over the tokens that S_g needs, and costs three passes over its
    elements: 2 T < 3 PASS_FLOPS decides.
    """
    passes = PASS_FLOPS_GPU if platform.has_gpu() else PASS_FLOPS_CPU
    return min(crossover(d_in, d_out), 3 * passes // 2)


def add_gram_norms(scores: PackScores, members: Sequence[int], inputs: Tensor, grads: Tensor) -> None:
    """Add |W_i|^2 of ``members`` to ``scores.owned`` without forming W_i."""
    short = [i for i in members if scores.length(i) <= BATCHED_TOKENS]
    for chosen, positions in scores.gram_buckets(short):
        a, g = _picked(inputs, positions), _picked(grads, positions)
        gram = torch.bmm(a, a.transpose(1, 2)).mul_(torch.bmm(g, g.transpose(1, 2)))
        scores.owned.index_add_(0, chosen, gram.sum((1, 2), dtype=torch.float64))
    for i in members:
        if scores.length(i) > BATCHED_TOKENS:
            scores.owned[i] += _triangular_gram(inputs[scores.segment(i)], grads[scores.segment(i)])


def _picked(values: Tensor, positions: Tensor) -> Tensor:
    """values [T, d] at positions [m, t] -> [m, t, d]; a position beyond the end reads as zeros."""
    inside = positions < values.shape[0]
    return values[positions.clamp(max=values.shape[0] - 1)] * inside[..., None]


def _triangular_gram(a: Tensor, g: Tensor) -> Tensor:
    """<a a^T, g g^T> of a [t, d_in], g [t, d_out] by the lower triangle of blocks, float64 scalar."""
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for start in range(0, len(a), GRAM_BLOCK):
        rows_a, rows_g = a[start : start + GRAM_BLOCK], g[start : start + GRAM_BLOCK]
        total += (rows_a @ rows_a.t()).mul_(rows_g @ rows_g.t()).sum(dtype=torch.float64)
        if start:
            total += 2 * (rows_a @ a[:start].t()).mul_(rows_g @ g[:start].t()).sum(dtype=torch.float64)
    return total


def _explicit(scores: PackScores, i: int, inputs: Tensor, grads: Tensor) -> Tensor:
    """W_i [d_out, d_in]; its squared norm is recorded."""
    w = grads[scores.segment(i)].t() @ inputs[scores.segment(i)]
    scores.owned[i] += torch.linalg.vector_norm(w, dtype=torch.float32).double().square()
    return w


def _rows_of(scores: PackScores, members: Sequence[int], *tensors: Tensor) -> list[Tensor]:
    """The tokens of ``members`` only; the tensors themselves where these are all tokens."""
    if len(members) == scores.n and scores.segment(scores.n - 1).stop == len(tensors[0]):
        return list(tensors)
    return [torch.cat([tensor[scores.segment(i)] for i in members]) for tensor in tensors]


def _add_product(total: Tensor, grads: Tensor, factors: Tensor, inputs: Tensor) -> None:
    """total += sum_t factors[t] grads[t]^T inputs[t]."""
    scaled = grads * factors.to(grads)[:, None]
    if total.dtype == scaled.dtype:
        total.addmm_(scaled.t(), inputs)
    else:
        total.add_(scaled.t() @ inputs)


class _Main:
    """Access to the parameters' main gradients."""

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._parameters = parameters

    def gradient(self, name: str) -> Tensor:
        return self._parameters[name].main_grad  # type: ignore[attr-defined]


class Accumulate(_Main):
    """r_i W_i into the main gradient and q_i W_i into the group's accumulator, in the backward."""

    def matrix(self, scores: PackScores, name: str, inputs: Tensor, grads: Tensor) -> None:
        limit = accumulate_limit(inputs.shape[1], grads.shape[1])
        r, q = scores.factors
        main, total, probe = self.gradient(name), scores.accumulator[name], scores.accumulator.probe.get(name)
        for i in range(scores.n):
            if scores.length(i) > limit:
                w = _explicit(scores, i, inputs, grads)
                main.add_(w, alpha=r[i])
                total.add_(w, alpha=q[i])
                if probe is not None:
                    probe.add_(w[0], alpha=q[i])
        short = [i for i in range(scores.n) if 0 < scores.length(i) <= limit]
        if short:
            add_gram_norms(scores, short, inputs, grads)
            a, g, segments = _rows_of(scores, short, inputs, grads, scores.pack.segments)
            _add_product(main, g, scores.on_tokens(r, segments), a)
            _add_product(total, g, scores.on_tokens(q, segments), a)
            if probe is not None:
                probe.add_((scores.on_tokens(q, segments).to(g) * g[:, 0]) @ a)

    def vector(self, scores: PackScores, name: str, per: Tensor) -> None:
        r, q = (per.new_tensor(factors) for factors in scores.factors)
        scores.accumulator[name].add_(q @ per)
        self.gradient(name).add_(r @ per)

    def rows(self, scores: PackScores, name: str, owner: Tensor, index: Tensor, rows: Tensor) -> None:
        r, q = (rows.new_tensor(factors) for factors in scores.factors)
        total, probe = scores.accumulator[name], scores.accumulator.probe.get(name)
        total.index_add_(0, index, (rows * q[owner, None]).to(total.dtype))
        if probe is not None:
            probe.add_((rows * q[owner, None])[index == 0].sum(0))
        self.gradient(name).index_add_(0, index, rows * r[owner, None])


class NormsOnly:
    """Nothing but norms: the first of two passes."""

    def matrix(self, scores: PackScores, name: str, inputs: Tensor, grads: Tensor) -> None:
        limit = crossover(inputs.shape[1], grads.shape[1])
        add_gram_norms(scores, [i for i in range(scores.n) if 0 < scores.length(i) <= limit], inputs, grads)
        for i in range(scores.n):
            if scores.length(i) > limit:
                _explicit(scores, i, inputs, grads)

    def vector(self, scores: PackScores, name: str, per: Tensor) -> None: ...

    def rows(self, scores: PackScores, name: str, owner: Tensor, index: Tensor, rows: Tensor) -> None: ...


class Deferred(_Main):
    """Keeps what the gradient needs in ``scores.kept``: functions of the final coefficients [n]."""

    def matrix(self, scores: PackScores, name: str, inputs: Tensor, grads: Tensor) -> None:
        limit = crossover(inputs.shape[1], grads.shape[1])
        main = self.gradient(name)
        for i in range(scores.n):
            if scores.length(i) > limit:
                scores.kept.append(_later(main, _explicit(scores, i, inputs, grads), i))
        short = [i for i in range(scores.n) if 0 < scores.length(i) <= limit]
        if short:
            add_gram_norms(scores, short, inputs, grads)
            a, g, segments = _rows_of(scores, short, inputs, grads, scores.pack.segments)

            def product(final: Tensor) -> None:
                _add_product(main, g, scores.on_tokens(final.tolist(), segments), a)

            scores.kept.append(product)

    def vector(self, scores: PackScores, name: str, per: Tensor) -> None:
        main = self.gradient(name)
        scores.kept.append(lambda final: main.add_(final.to(per) @ per))

    def rows(self, scores: PackScores, name: str, owner: Tensor, index: Tensor, rows: Tensor) -> None:
        main = self.gradient(name)
        scores.kept.append(lambda final: main.index_add_(0, index, rows * final.to(rows)[owner, None]))


def _later(main: Tensor, w: Tensor, i: int) -> Callable[[Tensor], Tensor]:
    return lambda final: main.add_(w, alpha=float(final[i]))
