"""Names and torch dtypes of weights: the one map between them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..models.dtypes import SAFETENSORS_NAMES

#: Name in a configuration -> torch's dtype.
TORCH_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in SAFETENSORS_NAMES}


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called ``name``; ValueError for anything that weights are not trained from."""
    if name not in TORCH_DTYPES:
        raise ValueError(f"dtype {name!r}: expected one of {', '.join(TORCH_DTYPES)}")
    return TORCH_DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """torch's own name of any dtype, without "torch."."""
    return str(dtype).removeprefix("torch.")
