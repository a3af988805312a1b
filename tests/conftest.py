"""Shared by all tests: one thread a process, and a model folder made without torch."""

from __future__ import annotations

import json
import os
import resource
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# How long an example takes says more about the machine's load than about the code.
hypothesis.settings.register_profile("vcpo", deadline=None)
hypothesis.settings.load_profile("vcpo")
os.environ.setdefault("OMP_NUM_THREADS", "1")

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 12, "hidden_size": 8,
    "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "hidden_act": "silu",
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip
#: The tensors of TINY_CONFIG, written out: head size 2, so queries are 8 wide, keys and values 4.
TINY_TENSORS: dict[str, list[int]] = {
    "model.embed_tokens.weight": [12, 8],
    "model.norm.weight": [8],
    "lm_head.weight": [12, 8],
    **{
        f"model.layers.{layer}.{name}": shape
        for layer in (0, 1)
        for name, shape in {
            "input_layernorm.weight": [8],
            "self_attn.q_proj.weight": [8, 8],
            "self_attn.q_proj.bias": [8],
            "self_attn.k_proj.weight": [4, 8],
            "self_attn.k_proj.bias": [4],
            "self_attn.v_proj.weight": [4, 8],
            "self_attn.v_proj.bias": [4],
            "self_attn.o_proj.weight": [8, 8],
            "post_attention_layernorm.weight": [8],
            "mlp.gate_proj.weight": [12, 8],
            "mlp.up_proj.weight": [12, 8],
            "mlp.down_proj.weight": [8, 12],
        }.items()
    },
}


def write_safetensors(path: Path, tensors: Mapping[str, list[int]]) -> None:
    """A safetensors file of zeros, from the format's description: length, JSON header, data."""
    header, position = {}, 0
    for name, shape in tensors.items():
        size = 4
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(position))


def write_model_folder(folder: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """A whole tiny Qwen2 folder; ``changes`` go into config.json alone."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**TINY_CONFIG, **(changes or {})}))
    write_safetensors(folder / "model.safetensors", TINY_TENSORS)
    vocabulary = {**{str(digit): digit for digit in range(10)}, "=": 10}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": 11, "content": "<eos>", "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True}],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
        "decoder": {"type": "Fuse"}, "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "="},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A whole tiny Qwen2 folder (weights zero)."""
    return write_model_folder(tmp_path / "model")


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """make_model(key=value, ...): the folder with changes to config.json."""
    return lambda **changes: write_model_folder(tmp_path / "changed", changes)


@contextmanager
def _file_size_limit(limit: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def file_size_limit() -> Callable[[int], AbstractContextManager[None]]:
    """Within it the system refuses to let a file grow beyond so many bytes: the real errors of a full disk.

    It holds for pytest's own report too where that goes to a file, so it must end inside the test.
    """
    return _file_size_limit
