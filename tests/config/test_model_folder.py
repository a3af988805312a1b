"""Model folders that are whole, half there, or mixed up."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY_CONFIG, TINY_TENSORS, write_safetensors
from vcpo_megatron.config.load import ConfigError
from vcpo_megatron.config.model_families import tensors
from vcpo_megatron.config.model_folder import read_model, tokenizer_problems, weight_problems
from vcpo_megatron.config.model_shape import ModelShape
from vcpo_megatron.config.rope import Rope

SHAPE = ModelShape(
    architecture="Qwen2ForCausalLM", num_layers=2, hidden_size=8, ffn_hidden_size=12, num_attention_heads=4,
    num_key_value_heads=2, head_dim=2, vocab_size=12, norm_eps=1e-6, rope=Rope(10000.0), tie_word_embeddings=False,
    qkv_bias=True, qk_norm=False, max_position_embeddings=64,
)  # fmt: skip


def test_shape(model_folder: Path) -> None:
    assert read_model(model_folder) == SHAPE
    assert tensors(SHAPE) == {name: tuple(shape) for name, shape in TINY_TENSORS.items()}


def test_a_whole_folder_has_no_problems(model_folder: Path) -> None:
    assert weight_problems(model_folder, SHAPE) == []
    assert tokenizer_problems(model_folder, SHAPE) == []


def test_llama_has_no_biases_and_defaults_follow_the_heads(make_model: Callable[..., Path]) -> None:
    folder = make_model(architectures=["LlamaForCausalLM"], num_key_value_heads=None, tie_word_embeddings=True)
    shape = read_model(folder)
    assert (shape.architecture, shape.num_key_value_heads, shape.head_dim) == ("LlamaForCausalLM", 4, 2)
    assert shape.tie_word_embeddings
    names = tensors(shape)
    assert not any(name.endswith(".bias") for name in names) and "lm_head.weight" not in names


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported: Qwen2ForCausalLM, "),
        ({"architectures": None, "model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 is not a positive integer"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads = '2' is not a positive integer"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3"),
        ({"use_sliding_window": True, "max_window_layers": 0}, "an active sliding window"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope"}}, "rope_type = 'longrope' is not supported"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_trained(make_model: Callable[..., Path], changes: dict[str, Any], part: str) -> None:
    folder = make_model(**changes)
    with pytest.raises(ConfigError) as caught:
        read_model(folder)
    (problem,) = caught.value.problems
    assert problem.startswith(f"model.path: {folder / 'config.json'}: ") and part in problem


@pytest.mark.parametrize("content", ["{", "[]", '"text"'])
def test_config_that_is_no_object(model_folder: Path, content: str) -> None:
    (model_folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model(model_folder)


def test_no_weights(model_folder: Path) -> None:
    (model_folder / "model.safetensors").unlink()
    (problem,) = weight_problems(model_folder, SHAPE)
    assert "neither model.safetensors nor model.safetensors.index.json" in problem


def test_missing_tensors_are_named(model_folder: Path) -> None:
    tensors = {name: shape for name, shape in TINY_TENSORS.items() if "layers.1.mlp" not in name}
    write_safetensors(model_folder / "model.safetensors", tensors)
    (problem,) = weight_problems(model_folder, SHAPE)
    assert "lacks 3 of 27 tensors of a Qwen2ForCausalLM with 2 layers" in problem
    assert "model.layers.1.mlp.gate_proj.weight" in problem


def test_tensors_of_another_size(model_folder: Path) -> None:
    write_safetensors(model_folder / "model.safetensors", {**TINY_TENSORS, "model.norm.weight": [9]})
    (problem,) = weight_problems(model_folder, SHAPE)
    assert "model.norm.weight: [9], expected [8]" in problem


def test_a_file_that_was_cut_short(model_folder: Path) -> None:
    path = model_folder / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    (problem,) = weight_problems(model_folder, SHAPE)
    assert f"is cut short: {size - 1} bytes of {size}" in problem


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234",
        b"version https://git-lfs.github.com/spec/v1\n",
        struct.pack("<Q", 3) + b"[1]",
        struct.pack("<Q", 2) + b"{x",
    ],
)
def test_a_file_that_is_no_safetensors(model_folder: Path, content: bytes) -> None:
    (model_folder / "model.safetensors").write_bytes(content)
    (problem,) = weight_problems(model_folder, SHAPE)
    assert "model.safetensors is no " in problem


def split(folder: Path) -> None:
    """Make two shards and an index of the single file."""
    names = sorted(TINY_TENSORS)
    halves = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for file, members in halves.items():
        write_safetensors(folder / file, {name: TINY_TENSORS[name] for name in members})
    weight_map = {name: file for file, members in halves.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


def test_shards(model_folder: Path) -> None:
    split(model_folder)
    assert weight_problems(model_folder, SHAPE) == []
    (model_folder / "a.safetensors").unlink()
    (problem,) = weight_problems(model_folder, SHAPE)
    assert problem == f"model.path: {model_folder / 'a.safetensors'} does not exist, though the index names it"


def test_a_shard_without_what_the_index_promises(model_folder: Path) -> None:
    split(model_folder)
    first = sorted(TINY_TENSORS)[0]
    write_safetensors(model_folder / "a.safetensors", {name: TINY_TENSORS[name] for name in sorted(TINY_TENSORS)[1:10]})
    (problem,) = weight_problems(model_folder, SHAPE)
    assert f"a.safetensors lacks {first}, which model.safetensors.index.json says it holds" in problem


def test_a_tokenizer_of_another_model(make_model: Callable[..., Path]) -> None:
    folder = make_model(vocab_size=11)  # <eos> has id 11
    (problem,) = tokenizer_problems(folder, read_model(folder))
    assert "token ids up to 11, but config.json says vocab_size = 11" in problem


@pytest.mark.parametrize("content", ["{}", "[]", '{"model": {"vocab": 3}}', "{"])
def test_a_broken_tokenizer(model_folder: Path, content: str) -> None:
    (model_folder / "tokenizer.json").write_text(content)
    assert len(tokenizer_problems(model_folder, SHAPE)) == 1


def test_a_vocabulary_in_order_of_id(model_folder: Path) -> None:
    content = {"model": {"vocab": [["a", 0.0]] * 13}, "added_tokens": []}
    (model_folder / "tokenizer.json").write_text(json.dumps(content))
    (problem,) = tokenizer_problems(model_folder, SHAPE)
    assert "token ids up to 12" in problem
    assert TINY_CONFIG["vocab_size"] == 12
