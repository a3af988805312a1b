"""Weights that arrive over HTTP: safe unpickling, checks before anything changes, one atomic swap.

A bucket is base64 of a pickled [(name, tensor), ...]. Pickle can run code, so only the few
functions that rebuild a plain tensor are let through, and the storage bytes inside are read with
torch's own weights-only loader.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..client.protocol import COMPUTED
from .errors import RequestError

NamedTensors = list[tuple[str, torch.Tensor]]


def _load_storage(data: bytes) -> Any:
    """torch.storage._load_from_bytes without its unrestricted unpickling."""
    return torch.load(io.BytesIO(data), weights_only=True)


_ALLOWED = {
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("torch.storage", "_load_from_bytes"): _load_storage,
    ("collections", "OrderedDict"): OrderedDict,
}


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise RequestError(f"serialized_named_tensors: {module}.{name} is not allowed in a weight bucket") from None


def decode_bucket(text: object) -> NamedTensors:
    """The tensors of one bucket; RequestError when it is anything but base64 of a pickled [(name, tensor)]."""
    if not isinstance(text, str):
        raise RequestError(f"serialized_named_tensors: expected base64 text, got {type(text).__name__}")
    try:
        data = base64.b64decode(text, validate=True)
        value = _TensorUnpickler(io.BytesIO(data)).load()
    except RequestError:
        raise
    except binascii.Error as error:
        raise RequestError(f"serialized_named_tensors: not base64: {error}") from error
    except Exception as error:  # fault boundary: hostile or torn bytes may raise anything in the unpickler
        raise RequestError(f"serialized_named_tensors: not a pickled list of tensors: {error}") from error
    if not isinstance(value, list) or not all(_is_named_tensor(item) for item in value):
        raise RequestError("serialized_named_tensors: expected a pickled list of (name, tensor)")
    return value


def _is_named_tensor(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], torch.Tensor)


def named_tensors(model: Any) -> NamedTensors:
    """The parameters of a transformers model under the names of its files, which are those that a learner sends.

    transformers stacks the experts of a layer in memory, gate and up projection in one: each is a view here.
    """
    named: NamedTensors = []
    mixtral = model.config.model_type == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for name, tensor in model.state_dict().items():
        name = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        base, stacked, kind = name.rpartition(".experts.")
        if not stacked or kind not in ("gate_up_proj", "down_proj"):
            named.append((name, tensor))
            continue
        for expert, one in enumerate(tensor):
            parts = [(down, one)] if kind == "down_proj" else zip((gate, up), one.chunk(2), strict=True)
            named += [(f"{base}.experts.{expert}.{part}.weight", view) for part, view in parts]
    return named


class Parameters:
    """The model's tensors under their Hugging Face names; tied names share one tensor."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def check(self, named: NamedTensors) -> None:
        """RequestError naming the first tensor that does not fit; nothing is changed."""
        for name, tensor in named:
            target = self._tensors.get(name)
            if target is None:
                raise RequestError(f"unknown parameter {name!r}: the model has no tensor of that name")
            if tensor.shape != target.shape:
                raise RequestError(
                    f"parameter {name!r} has shape {list(tensor.shape)}, the model's is {list(target.shape)}"
                )
            if tensor.dtype != target.dtype:
                raise RequestError(f"parameter {name!r} is {tensor.dtype}, the model's is {target.dtype}")

    @torch.inference_mode()
    def load(self, named: NamedTensors) -> None:
        """Copies checked tensors in place."""
        for name, tensor in named:
            self._tensors[name].copy_(tensor)

    def items(self) -> NamedTensors:
        return list(self._tensors.items())

    def checksums(self) -> dict[str, str]:
        """As SGLang's on CPUs: the first 8 bytes, in hexadecimal, of the SHA-256 of every tensor's bytes."""
        return {name: _digest(tensor) for name, tensor in sorted(self._tensors.items())}


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()[:16]


def combined_checksum(checksums: Mapping[str, str]) -> str:
    """One checksum over those of all tensors, as SGLang's."""
    return hashlib.sha256("".join(name + checksums[name] for name in sorted(checksums)).encode()).hexdigest()


class UpdateSession:
    """Tensors between ``begin`` and ``end``: staged, checked one by one, and taken together.

    A client that dies half-way leaves the old weights whole; the next ``begin`` starts anew. So does a
    bucket that was refused: ``end`` then loads nothing, for what is left is no version.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._staged: NamedTensors = []
        self._memory: list[torch.Tensor] = []
        self._version: str | None = None
        self._refused = ""
        self.open = False

    def begin(self) -> int:
        """Opens a session; returns how many tensors of an unfinished one were discarded."""
        discarded = len(self._staged)
        self._close()
        self.open = True
        return discarded

    def require_open(self, endpoint: str) -> None:
        if not self.open:
            raise RequestError(
                f"{endpoint} needs a weight update that is open, and there is none: /begin_weight_update was not sent, "
                "or another run that uses this server has ended it; a server serves one run at a time"
            )

    def refuse(self, reason: str) -> None:
        """Marks the open session as spoiled."""
        self._refused = self._refused or reason

    def stage(self, bucket: NamedTensors, version: str | None, memory: Sequence[torch.Tensor] = ()) -> None:
        """Adds a bucket and the ``memory`` that its tensors are views of, where that is to be used again; RequestError,
        with nothing added, when a tensor does not fit the model. What the model computes for itself is left out."""
        bucket = [(name, tensor) for name, tensor in bucket if COMPUTED not in name]
        self._parameters.check(bucket)
        self._staged.extend(bucket)
        self._memory.extend(memory)
        self._version = self._version if version is None else version

    def end(self) -> tuple[NamedTensors, str | None, list[torch.Tensor]]:
        """Closes the session and hands over its tensors, version and memory; RequestError when a bucket was refused."""
        staged, version, memory, refused = self._staged, self._version, self._memory, self._refused
        self._close()
        if refused:
            raise RequestError(f"no weights were loaded: a bucket of this update was refused: {refused}")
        return staged, version, memory

    def _close(self) -> None:
        self._staged, self._memory, self._version, self._refused, self.open = [], [], None, "", False
