"""The load-balancing loss of a mixture of experts over the global batch, exact whatever the packs and the layout.

    L = coef sum_layers E sum_e f_e P_e,   f_e = n_e / (T k),   P_e = 1/T sum_t softmax(router logits of t)_e

over ALL T tokens of the batch, padding not counted, n_e of them sent to expert e (arXiv 2501.11873; Switch Transformer,
arXiv 2101.03961, has it over a micro-batch). n_e is a constant of the loss; a forward of the batch counts it before any
backward. With n_e known the loss is a sum over tokens, so that packs and ranks only add up. Megatron's own
``global_aux_loss`` takes the running mean of n_e over the micro-batches so far, which depends on their order.

No reward scales the loss and no trajectory's norm holds it: it belongs to the backward of KL and entropy.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from ..batch.packing import Pack
from ..megatron import platform
from ..megatron.parallel import Parallel, agree_sum
from .pack_context import PackContext


class LoadBalance:
    """Built once for the chunks of a model of ``layers`` layers. In a step: passes that count, ``agree``, that pull."""

    def __init__(self, chunks: Sequence[torch.nn.Module], coefficient: float, layers: int, parallel: Parallel) -> None:
        routers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, TopKRouter)]
        self._coefficient, self._layers, self._parallel = coefficient, layers, parallel
        self._tokens = PackContext[Tensor]()
        self._mode = ""
        #: layer -> float64 [2, E]: tokens sent to each expert, and the sum of its scores
        self._counts: dict[int, Tensor] = {}
        #: of the whole batch, in every layer
        self._sent = math.nan
        self._value = math.nan
        for router in routers:
            self._attach(router)

    @contextmanager
    def passes(self, mode: Literal["count", "pull"]) -> Iterator[None]:
        """Passes inside count the tokens of this rank's packs, from none on; or add the loss's gradient."""
        if mode == "count":
            self._counts = {}
        self._mode = mode
        try:
            yield
        finally:
            self._mode = ""

    def agree(self, experts: int, aborted: bool) -> bool:
        """Sum what all ranks counted; whether any has ``aborted`` the step, and then it is worth nothing."""
        table = torch.zeros(2 * self._layers * experts + 1, dtype=torch.float64)
        rows = table[:-1].view(self._layers, 2, experts)
        table[-1] = float(aborted)
        layers = list(self._counts)
        if layers:
            counted = torch.stack(list(self._counts.values()))
            rows[layers] = platform.read(counted)
        agree_sum(table, self._parallel)
        if layers:
            self._counts = dict(zip(layers, platform.to_device(rows[layers], counted.device), strict=True))
            self._sent = float(rows[layers[0], 0].sum())
        sent, scores = rows[rows.sum((1, 2)) > 0].unbind(1)
        shares = sent / sent.sum(1, keepdim=True) * (scores / scores.sum(1, keepdim=True))
        self._value = experts * float(shares.sum(1).mean())
        return bool(table[-1] > 0)

    @property
    def metrics(self) -> dict[str, float]:
        """Of the batch that was counted last."""
        return {"experts/balance": self._value}

    def during(self, pack: Pack, forward: Callable[[], Tensor]) -> Tensor:
        """The output of ``forward`` on ``pack``."""
        costs = torch.tensor([*(sample.cost for sample in pack.samples), 0])
        costs = platform.to_device(costs, pack.positions.device)
        real = pack.positions < costs[pack.segments.clamp(max=len(pack.samples))]
        if self._parallel.sequence_parallel:
            real = real.chunk(self._parallel.tensor_size)[self._parallel.tensor_rank]
        return self._tokens.during(real, forward)

    def _attach(self, router: Any) -> None:
        original, layer = router.routing, router.layer_number - 1

        def routing(self_: Any, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            probs, chosen = original(logits, *args, **kwargs)
            real = self._tokens.current
            if real is None or not self._mode:
                return probs, chosen
            logits = logits.flatten(0, -2)
            if self._mode == "count":
                sent = (chosen & real[:, None]).sum(0)
                found = torch.stack([sent, _scores(logits, real).detach()]).double()
                self._counts[layer] = self._counts[layer] + found if layer in self._counts else found
                return probs, chosen
            return _WithLoss.apply(probs, self._loss(layer, logits, real, router.topk)), chosen

        router.routing = types.MethodType(routing, router)

    def _loss(self, layer: int, logits: Tensor, real: Tensor, top_k: int) -> Tensor:
        """Of this rank's tokens: logits [t, experts], bool [t] which of them are no padding."""
        sent = self._counts[layer][0]
        tokens = self._sent / top_k
        return (_scores(logits, real) * sent).sum() * (self._coefficient * len(sent) / (top_k * tokens**2))


def _scores(logits: Tensor, real: Tensor) -> Tensor:
    """Sums over real tokens of their probabilities: [experts], fp32."""
    return torch.where(real[:, None], torch.softmax(logits, -1, dtype=torch.float32), 0.0).sum(0)


class _WithLoss(torch.autograd.Function):
    """``values`` as they are; in the backward ``loss`` gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)
