"""What ``/weights_checker`` of a server must answer for weights that the learner streamed to it.

A checksum is the first 8 bytes, in hexadecimal, of the SHA-256 of a parameter's bytes (SGLang's on CPUs, and the
embedded engine's). The embedded engine has the tensors of the Hugging Face files. SGLang fuses them: q, k, v into one
matrix, gate and up into another, gate and up of all experts of a layer into a third and their down into a fourth, and
pads the vocabulary, and on CPUs the units of experts, with zeros; the stream has the parts in that order, so the fused
ones are hashed as it passes, one whole tensor at a time.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Literal

import torch

from ..models.shape import ModelShape
from .plan import Stream

#: Rows of SGLang's vocabulary on one rank are a multiple of this.
SGLANG_VOCABULARY_MULTIPLE = 64
#: Units of an expert on CPUs are a multiple of this.
SGLANG_UNITS_MULTIPLE = 32
#: The first that fits counts. Mixtral calls an expert's gate, up and down w1, w3 and w2.
_EXPERT_DOWN = re.compile(r"\.experts\.\d+\.(down_proj|w2)\.")
_FUSED = (
    (_EXPERT_DOWN, ".experts.w2_"),
    (re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\."), ".experts.w13_"),
    (re.compile(r"\.self_attn\.[qkv]_proj\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
)
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


class ExpectedChecksums:
    """``add`` every tensor of the stream, then ask for ``result``."""

    def __init__(self, engine: Literal["embedded", "sglang"], shape: ModelShape) -> None:
        self._fuses = engine == "sglang"
        self._tied = shape.tie_word_embeddings
        self._hashes: dict[str, Any] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Count in the next tensor (CPU), under its Hugging Face name."""
        digest = self._hashes.setdefault(self._served(name), hashlib.sha256())
        served = self._padded(name, tensor.detach())
        digest.update(served.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def result(self) -> dict[str, str]:
        """Name of a server's parameter -> checksum."""
        found = {name: digest.hexdigest()[:16] for name, digest in self._hashes.items()}
        if self._tied and not self._fuses:  # one tensor under two names
            found["lm_head.weight"] = found["model.embed_tokens.weight"]
        return found

    def _padded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """With the zeros that a server puts behind rows, or behind columns of an expert's down."""
        if not self._fuses or name not in _VOCABULARY and ".experts." not in name:
            return tensor
        dim, multiple = 0, SGLANG_VOCABULARY_MULTIPLE
        if name not in _VOCABULARY:
            dim, multiple = int(_EXPERT_DOWN.search(name) is not None), SGLANG_UNITS_MULTIPLE
        zeros = -tensor.shape[dim] % multiple
        return torch.nn.functional.pad(tensor, (0, zeros) if dim == 1 else (0, 0, 0, zeros)) if zeros else tensor

    def _served(self, name: str) -> str:
        if self._fuses:
            for pattern, fused in _FUSED:
                if pattern.search(name):
                    return pattern.sub(fused, name)
        return name


class CheckedStream:
    """``tensors`` as they come; what has passed is counted into ``expected``, if that is given."""

    def __init__(self, tensors: Stream, expected: ExpectedChecksums | None) -> None:
        self._tensors, self._expected = tensors, expected

    def __iter__(self) -> CheckedStream:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        name, tensor = next(self._tensors)
        if self._expected is not None:
            self._expected.add(name, tensor)
        return name, tensor

    def checksums(self) -> dict[str, str]:
        """Of what has passed; empty where nothing is counted."""
        return self._expected.result() if self._expected is not None else {}

    def drain(self) -> None:
        """Take the rest of the tensors: the other ranks send them in any case."""
        for _ in self._tensors:
            pass
