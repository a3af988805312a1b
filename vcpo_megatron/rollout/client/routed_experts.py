"""Routed experts as a server answers them: base64 of int32 [P + G - 1, layers, k], every token but the last."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...models.shape import ModelShape
from ...types import routing_dtype
from .protocol import ProtocolError


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """``experts`` routed experts, ``top_k`` a token and layer; ``dense_layers`` have none: what is answered for them
    says nothing and becomes 0."""

    layers: int
    top_k: int
    experts: int
    dense_layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, shape: ModelShape) -> RoutingShape:
        """ValueError for a model without experts."""
        if shape.experts is None:
            raise ValueError("a model without experts routes nothing")
        return cls(shape.num_layers, shape.experts.top_k, shape.experts.count, tuple(shape.experts.dense_layers))

    def unknown(self, tokens: int) -> np.ndarray:
        """[tokens, layers, k] of tokens of which nothing was recorded."""
        dtype = routing_dtype(self.experts)
        return np.full((tokens, self.layers, self.top_k), np.iinfo(dtype).max, dtype)

    def parse(self, reply: Any, tokens: int) -> np.ndarray:
        """Experts of all but the last of the ``tokens`` of prompt and answer, uint8 or uint16 [tokens - 1, layers, k].

        ProtocolError when ``reply``, one answer of /generate, lacks them or holds another number of them.
        """
        meta = reply.get("meta_info") if isinstance(reply, dict) else None
        text = meta.get("routed_experts") if isinstance(meta, dict) else None
        if not isinstance(text, str):
            raise ProtocolError(
                "meta_info has no 'routed_experts': start the server with --enable-return-routed-experts (an "
                "sglang-router in front of it drops them)"
            )
        try:
            ids = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
        except (binascii.Error, ValueError) as error:
            raise ProtocolError(f"routed_experts: not base64 of int32: {error}") from error
        shape = (tokens - 1, self.layers, self.top_k)
        if ids.size != np.prod(shape):
            raise ProtocolError(f"routed_experts: {ids.size} numbers, expected {list(shape)}")
        ids = ids.reshape(shape)
        if self.dense_layers:
            ids = ids.copy()
            ids[:, self.dense_layers] = 0
        if ids.size and (ids.min() < 0 or ids.max() >= self.experts):
            raise ProtocolError(f"routed_experts: {ids.min()} to {ids.max()}, the model has {self.experts} experts")
        return ids.astype(routing_dtype(self.experts))


def encode(experts: np.ndarray) -> str:
    """What a server writes for experts [tokens, layers, k] of any integer dtype."""
    return base64.b64encode(np.ascontiguousarray(experts, "<i4").tobytes()).decode()
