"""Are two models the same? Configuration, names, shapes, dtypes and values; then log-probs of prompts.

Tensors are compared one at a time and the first difference is described, so that a fault can be named: an
expert in another's place, a padded row that was exported, a bias that is missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..models.families.registry import tensors
from .dtypes import TORCH_DTYPES, dtype_name
from .families.registry import open_model
from .hf import HFFolder
from .shards import unconsumed

#: Keys of config.json that do not change the function a model computes.
_IGNORED = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"}


class Tensors(Protocol):
    """A model's tensors by their Hugging Face names, read one at a time."""

    config: Mapping[str, Any]

    @property
    def computes_in(self) -> torch.dtype:
        """Dtype whose rounding log-probs have: that of the parameters they are computed with."""
        ...

    def order(self) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes, in the order in which they are read best."""
        ...

    def tensor(self, name: str) -> Tensor: ...


class FolderTensors:
    """``Tensors`` of a Hugging Face folder; ConversionError when it does not hold exactly what its model has."""

    def __init__(self, path: Path) -> None:
        self._folder = HFFolder(path)
        self.config = self._folder.config
        family, self._shape = open_model(self.config)
        unconsumed(self._folder, family, self._shape)

    @property
    def computes_in(self) -> torch.dtype:
        """transformers takes what config.json states, or else the dtype of the first tensor."""
        stated = self.config.get("dtype") or self.config.get("torch_dtype")
        found = TORCH_DTYPES.get(stated) if stated else self._folder.dtype("model.embed_tokens.weight")
        return torch.float32 if found is None else found

    def order(self) -> Mapping[str, tuple[int, ...]]:
        return tensors(self._shape)

    def tensor(self, name: str) -> Tensor:
        return self._folder.tensor(name)


@dataclass(frozen=True)
class Same:
    """What was compared: tensors, bytes, and the SHA-256 over all names and values in order of names."""

    tensors: int
    bytes: int
    digest: str


def compare(a: Tensors, b: Tensors, *, cast: bool = False) -> Same | str:
    """``Same``, or the first difference in one line. ``cast`` compares in the narrower of two dtypes."""
    if (difference := _config_difference(a.config, b.config)) is not None:
        return difference
    ours, theirs = a.order(), b.order()
    for here, there, side in ((ours, theirs, "A"), (theirs, ours, "B")):
        if only := [name for name in here if name not in there]:
            return f"{only[0]} is only in {side} ({len(only)} such tensors)"
    digests, size = dict[str, bytes](), 0
    for name, shape in ours.items():
        if shape != theirs[name]:
            return f"{name} has shape {list(shape)} in A and {list(theirs[name])} in B"
        left, right = a.tensor(name), b.tensor(name)
        if left.dtype != right.dtype:
            if not cast:
                kinds = f"{dtype_name(left.dtype)} in A and {dtype_name(right.dtype)} in B"
                return f"{name} is {kinds} (--cast compares in the narrower one)"
            narrow = min((left.dtype, right.dtype), key=lambda kind: (kind.itemsize, kind is torch.float16))
            left, right = left.to(narrow), right.to(narrow)
        if not torch.equal(left, right):
            return _values_difference(name, left, right) + _elsewhere(name, left, shape, a, b, cast=cast)
        data = left.contiguous().view(torch.uint8).numpy()
        digests[name] = hashlib.sha256(data.reshape(-1).data).digest()
        size += data.size
    whole = hashlib.sha256(b"".join(name.encode() + digests[name] for name in sorted(digests)))
    return Same(len(ours), size, whole.hexdigest())


def compare_logprobs(a: Sequence[Tensor], b: Sequence[Tensor], tolerance: float) -> float | str:
    """The largest difference of a log-prob, or the first one above ``tolerance`` in one line.

    a, b  for each prompt float [L - 1]: log-probs of tokens 1..L-1 given those before
    """
    largest = 0.0
    for prompt, (left, right) in enumerate(zip(a, b, strict=True)):
        if left.shape != right.shape:
            return f"prompt {prompt}: {len(left)} log-probs in A and {len(right)} in B"
        distance = (left.double() - right.double()).abs()
        over = (~(distance <= tolerance)).nonzero()
        if len(over):
            at = int(over[0])
            return (
                f"prompt {prompt}, token {at + 1}: log-prob {float(left[at]):.6f} in A and {float(right[at]):.6f} in B "
                f"({len(over)} of {len(left)} tokens differ by more than {tolerance:g})"
            )
        largest = max(largest, float(distance.max()) if len(distance) else 0.0)
    return largest


def _config_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    for key in sorted((a.keys() | b.keys()) - _IGNORED):
        if a.get(key) != b.get(key):
            return f"config.json: {key} is {a.get(key)!r} in A and {b.get(key)!r} in B"
    return None


def _values_difference(name: str, left: Tensor, right: Tensor) -> str:
    different = (left != right).nonzero()
    at = tuple(different[0].tolist())
    largest = (left.double() - right.double()).abs().max()
    return (
        f"{name}{list(at)} is {float(left[at]):g} in A and {float(right[at]):g} in B "
        f"({len(different)} of {left.numel()} elements differ, by {float(largest):.3g} at most)"
    )


def _elsewhere(name: str, wanted: Tensor, shape: tuple[int, ...], a: Tensors, b: Tensors, *, cast: bool) -> str:
    """Where B holds the values that A has under ``name``: the sign of a permutation, within one layer.

    Where A has the same values (two norms of ones) nothing has moved.
    """
    layer = ".".join(name.split(".")[:3])

    def is_wanted(found: Tensor) -> bool:
        return torch.equal(found.to(wanted.dtype) if cast else found, wanted)

    for other, size in b.order().items():
        if other != name and size == shape and other.startswith(layer + "."):
            if is_wanted(b.tensor(other)) and not is_wanted(a.tensor(other)):
                return f"; B has the values of A under {other}"
    return ""
