"""Model folders that are whole, half there, or mixed up."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY_CONFIG, TINY_TENSORS, write_safetensors
from tests.messages import assert_names
from vcpo_megatron.models.families.registry import tensors
from vcpo_megatron.models.folder import generation_problems, read_model, tokenizer_problems, weight_problems
from vcpo_megatron.models.rope import Rope
from vcpo_megatron.models.shape import ModelShape
from vcpo_megatron.run.errors import ConfigError

SHAPE = ModelShape(
    architecture="Qwen2ForCausalLM",
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=12,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
    vocab_size=12,
    norm_eps=1e-6,
    rope=Rope(10000.0),
    tie_word_embeddings=False,
    qkv_bias=True,
    qk_norm=False,
    max_position_embeddings=64,
)


def test_shape(model_folder: Path) -> None:
    assert read_model(model_folder) == SHAPE
    assert tensors(SHAPE) == {name: tuple(shape) for name, shape in TINY_TENSORS.items()}


def test_a_whole_folder_has_no_problems(model_folder: Path) -> None:
    assert weight_problems(model_folder, SHAPE) == []
    assert tokenizer_problems(model_folder, SHAPE) == []


def test_llama_has_no_biases_and_defaults_follow_the_heads(make_model: Callable[..., Path]) -> None:
    folder = make_model(
        architectures=["LlamaForCausalLM"], model_type="llama", num_key_value_heads=None, tie_word_embeddings=True
    )
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
        ({"num_hidden_layers": True}, "num_hidden_layers = True is not a positive integer"),
        ({"model_type": "llama"}, "model_type = 'llama' is not that of Qwen2ForCausalLM ('qwen2')"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling and rope_parameters are both given and"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": ["x"]}}, "rope_type = ['x'] is not supported"),
        ({"use_sliding_window": True, "max_window_layers": "x"}, "max_window_layers = 'x', no integer"),
        ({"use_sliding_window": True, "layer_types": 3}, "layer_types = 3, no list of full_attention or sliding"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads = '2' is not a positive integer"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope"}}, "rope_type = 'longrope' is not supported"),
    ],
)
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
    assert_names(problem, "3 of 27 tensors", "Qwen2ForCausalLM with 2 layers")
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


F32 = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        (3, "a header entry that is no object"),
        ({}, "dtype = None"),
        ({**F32, "dtype": ["F32"]}, "dtype = ['F32']"),
        ({"dtype": "F32", "shape": [2, 3]}, "data_offsets = None, not a beginning and an end"),
        ({**F32, "data_offsets": [0]}, "data_offsets = [0], not a beginning and an end"),
        ({**F32, "data_offsets": [-24, 0]}, "data_offsets = [-24, 0], not a beginning and an end"),
        ({**F32, "data_offsets": [0, "x"]}, "data_offsets = [0, 'x'], not a beginning and an end"),
        ({**F32, "data_offsets": [0, 20]}, "data_offsets = [0, 20], where F32 of shape [2, 3] takes 24 bytes"),
        ({**F32, "data_offsets": [24, 0]}, "data_offsets = [24, 0], where F32 of shape [2, 3] takes 24 bytes"),
        ({**F32, "shape": 6}, "shape = 6, not a list of sizes"),
        ({**F32, "shape": [2, True]}, "shape = [2, True], not a list of sizes"),
    ],
)
def test_a_header_that_describes_no_tensor(model_folder: Path, entry: Any, part: str) -> None:
    text = json.dumps({"__metadata__": {"format": "pt"}, "model.norm.weight": entry}).encode()
    (model_folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(24))
    (problem,) = weight_problems(model_folder, SHAPE)
    path = model_folder / "model.safetensors"
    assert problem == f"model.path: {path}: tensor 'model.norm.weight' has {part}" + problem.partition(part)[2]
    assert "\n" not in problem


def test_tensors_of_a_type_that_is_not_trained(model_folder: Path) -> None:
    path = model_folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"', 1))
    (problem,) = weight_problems(model_folder, SHAPE)
    assert_names(problem, "1 tensors", "model.embed_tokens.weight: I32", "F32, BF16, F16")


@pytest.mark.parametrize("weight_map", [3, {"a": ["b"]}, {"a": None}])
def test_an_index_that_names_no_files(model_folder: Path, weight_map: Any) -> None:
    (model_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (problem,) = weight_problems(model_folder, SHAPE)
    assert_names(problem, model_folder / "model.safetensors.index.json", "no weight_map")


def test_an_index_of_files_elsewhere(model_folder: Path) -> None:
    weight_map = {"a": "model.safetensors", "b": "../other/model.safetensors"}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (problem,) = weight_problems(model_folder, SHAPE)
    assert "names files outside its folder (../other/model.safetensors)" in problem


def test_nesting_beyond_the_parser(model_folder: Path) -> None:
    (model_folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        read_model(model_folder)


def test_a_model_type_is_needed(make_model: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="model_type is missing"):
        read_model(make_model(model_type=None))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "holds no JSON object"),
        ('{"eos_token_id": "x"}', "eos_token_id = 'x' is no token id"),
        ('{"eos_token_id": true}', "eos_token_id = True is no token id"),
        ('{"eos_token_id": [1, 12]}', "eos_token_id = [1, 12] is no token id, or list of them, below vocab_size = 12"),
    ],
)
def test_a_broken_generation_config(model_folder: Path, text: str, part: str) -> None:
    (model_folder / "generation_config.json").write_text(text)
    (problem,) = generation_problems(model_folder, SHAPE)
    assert problem.startswith(f"model.path: {model_folder / 'generation_config.json'}") and part in problem


def test_a_good_generation_config(model_folder: Path) -> None:
    assert generation_problems(model_folder, SHAPE) == []
    for text in ('{"eos_token_id": 11}', '{"eos_token_id": [0, 11]}', "{}"):
        (model_folder / "generation_config.json").write_text(text)
        assert generation_problems(model_folder, SHAPE) == []


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
    assert_names(problem, f"model.path: {model_folder / 'a.safetensors'} does not exist")


def test_a_shard_without_what_the_index_promises(model_folder: Path) -> None:
    split(model_folder)
    first = sorted(TINY_TENSORS)[0]
    write_safetensors(model_folder / "a.safetensors", {name: TINY_TENSORS[name] for name in sorted(TINY_TENSORS)[1:10]})
    (problem,) = weight_problems(model_folder, SHAPE)
    assert f"a.safetensors lacks {first}, which model.safetensors.index.json says it holds" in problem


def test_a_tokenizer_of_another_model(make_model: Callable[..., Path]) -> None:
    folder = make_model(vocab_size=11)  # <eos> has id 11
    (problem,) = tokenizer_problems(folder, read_model(folder))
    assert_names(problem, "token ids up to 11", "vocab_size = 11")


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[]",
        '{"model": {"vocab": 3}}',
        "{",
        '{"model": {"vocab": {"a": "x"}}}',
        '{"model": {"vocab": {"a": true}}}',
        '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "b"}]}',
        '{"model": {"vocab": {"a": 0}}, "added_tokens": [3]}',
        '{"model": {"vocab": {"a": 0}}, "added_tokens": 3}',
    ],
)
def test_a_broken_tokenizer(model_folder: Path, content: str) -> None:
    (model_folder / "tokenizer.json").write_text(content)
    assert len(tokenizer_problems(model_folder, SHAPE)) == 1


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", "cannot be read as JSON"),
        ("\x00\x01 garbage", "cannot be read as JSON"),
        ("[1]", "holds no JSON object"),
        ('{"chat_template": 3}', "has a chat_template that is neither text"),
        ('{"chat_template": [{"name": "default"}]}', "has a chat_template that is neither text"),
        ('{"eos_token": 7}', "has eos_token = 7, which is no token"),
        ('{"eos_token": {"id": 7, "content": ["x"]}}', "which is no token"),
    ],
)
def test_a_broken_tokenizer_config(model_folder: Path, content: str, fault: str) -> None:
    (model_folder / "tokenizer_config.json").write_text(content)
    (problem,) = tokenizer_problems(model_folder, SHAPE)
    assert "tokenizer_config.json" in problem and fault in problem


def test_tokenizer_configs_of_real_models(model_folder: Path) -> None:
    token = {"content": "<s>", "lstrip": False}
    settings = {"bos_token": token, "pad_token": None, "eos_token": "<eos>", "add_bos_token": True}
    for template in (None, "{{ messages }}", [{"name": "default", "template": "{{ messages }}"}]):
        content = json.dumps({**settings, "chat_template": template})
        (model_folder / "tokenizer_config.json").write_text(content)
        assert tokenizer_problems(model_folder, SHAPE) == []


def test_a_vocabulary_in_order_of_id(model_folder: Path) -> None:
    content = {"model": {"vocab": [["a", 0.0]] * 13}, "added_tokens": []}
    (model_folder / "tokenizer.json").write_text(json.dumps(content))
    (problem,) = tokenizer_problems(model_folder, SHAPE)
    assert "token ids up to 12" in problem
    assert TINY_CONFIG["vocab_size"] == 12
