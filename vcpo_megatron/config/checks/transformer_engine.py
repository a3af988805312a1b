"""What TransformerEngine's layers and attention need of a run; everything else is refused by name."""

from __future__ import annotations

from collections.abc import Iterator

from ...models.shape import ModelShape
from ..fused_kernels import find_kernels
from ..schema import RunConfig

_KEYS = {"transformer_impl": "local", "core_attention": "torch"}


def engine_problems(config: RunConfig) -> Iterator[str]:
    """Of the configuration alone, and of what is installed."""
    model, parallel = config.model, config.parallel
    for key, other in _KEYS.items():
        if getattr(model, key) != "transformer_engine":
            continue
        named = f'model.{key} = "transformer_engine"'
        if not find_kernels().transformer_engine:
            yield (
                f"{named}: TransformerEngine's part for PyTorch is not installed "
                f"(pip install 'transformer-engine[pytorch]'); install it, or use \"{other}\""
            )
        if model.dtype != "bfloat16":
            yield f'{named}: takes packs in 16 bits; use model.dtype = "bfloat16"'
        if parallel.context > 1:
            yield f'{named}: not checked with parallel.context = {parallel.context}; use context = 1, or "{other}"'
    if model.transformer_impl == "transformer_engine" and parallel.tensor > 1:
        yield (
            f'model.transformer_impl = "transformer_engine": not checked with parallel.tensor = {parallel.tensor}; use '
            'tensor = 1, or "local", whose layers model.core_attention = "transformer_engine" may join'
        )


def engine_model_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Of the model."""
    model = config.model
    parts = {"latent attention": shape.latent is not None, "sliding windows": shape.window is not None}
    if model.core_attention == "transformer_engine":
        for part in (name for name, has in parts.items() if has):
            yield (
                f'model.core_attention = "transformer_engine": not checked with the {part} of {model.path}; use "torch"'
            )
    if model.transformer_impl == "transformer_engine" and (shape.latent is not None or shape.experts is not None):
        part = "latent attention" if shape.experts is None else "experts"
        yield f'model.transformer_impl = "transformer_engine": not checked with the {part} of {model.path}; use "local"'
