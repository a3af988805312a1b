"""The experts that a transformers model sends its tokens to, taken from its routers while it computes."""

from __future__ import annotations

from typing import Any

import torch

from .errors import ModelError


class RouterCapture:
    """Watches the routers of a model; ``take`` gives what the last forward chose.

    A layer without experts is answered with zeros, as SGLang answers it.
    """

    def __init__(self, model: Any) -> None:
        """ModelError when the model has no router that says which experts it chose."""
        self._chosen: dict[int, torch.Tensor] = {}
        layers = model.model.layers
        routers = {
            number: router
            for number, layer in enumerate(layers)
            if (router := getattr(layer.mlp, "gate", None)) is not None and hasattr(router, "top_k")
        }
        if not routers:
            raise ModelError("--enable-return-routed-experts: the model has no experts, or no routers that name them")
        self._layers = len(layers)
        for number, router in routers.items():
            router.register_forward_hook(self._watch(number))

    def _watch(self, number: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            if not isinstance(output, tuple) or len(output) != 3:
                raise ModelError(f"--enable-return-routed-experts: {type(module).__name__} does not name its experts")
            self._chosen[number] = output[2]

        return hook

    def take(self) -> torch.Tensor:
        """int64 [T, layers, k] of the T tokens of the last forward."""
        found, self._chosen = self._chosen, {}
        none = torch.zeros_like(next(iter(found.values())))
        return torch.stack([found.get(number, none) for number in range(self._layers)], dim=1)
