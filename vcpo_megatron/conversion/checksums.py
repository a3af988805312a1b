"""What ``/weights_checker`` of a server must answer for weights that the learner streamed to it.

A checksum is the first 8 bytes, in hexadecimal, of the SHA-256 of a parameter's bytes (SGLang's on CPUs, and the
embedded engine's). The embedded engine has the tensors of the Hugging Face files. SGLang fuses them: q, k, v into one
matrix, gate and up into another, and pads the vocabulary with zero rows; the stream has the parts in that order, so
the fused ones are hashed as it passes, one whole tensor at a time. How SGLang lays out routed experts depends on its
kernels: they are left out, and servers are compared with one another there.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Literal

import torch

from ..config.model_shape import ModelShape

#: Rows of SGLang's vocabulary on one rank are a multiple of this.
SGLANG_VOCABULARY_MULTIPLE = 64
_FUSED = (
    (re.compile(r"\.self_attn\.[qkv]_proj\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
)
_EXPERT = re.compile(r"\.experts\.\d+\.")
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


class Checksums:
    """``add`` every tensor of the stream, then ask for ``result``."""

    def __init__(self, engine: Literal["embedded", "sglang"], shape: ModelShape) -> None:
        self._fuses = engine == "sglang"
        self._tied = shape.tie_word_embeddings
        self._hashes: dict[str, Any] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Count in the next tensor (CPU), under its Hugging Face name."""
        if self._fuses and _EXPERT.search(name):
            return
        digest = self._hashes.setdefault(self._served(name), hashlib.sha256())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if self._fuses and name in _VOCABULARY:
            rows = -tensor.shape[0] % SGLANG_VOCABULARY_MULTIPLE
            digest.update(bytes(rows * tensor[0].nbytes))

    def result(self) -> dict[str, str]:
        """Name of a server's parameter -> checksum."""
        found = {name: digest.hexdigest()[:16] for name, digest in self._hashes.items()}
        if self._tied and not self._fuses:  # one tensor under two names
            found["lm_head.weight"] = found["model.embed_tokens.weight"]
        return found

    def _served(self, name: str) -> str:
        if self._fuses:
            for pattern, fused in _FUSED:
                if pattern.search(name):
                    return pattern.sub(fused, name)
        return name
