"""What a Hugging Face model folder says about itself, read as JSON: no torch, no safetensors library.

``ModelShape`` is the part of config.json that everything else depends on. ``weight_problems`` and
``tokenizer_problems`` compare the files beside it with it, so that a half-downloaded or mixed-up
folder is refused before any process starts.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .load import ConfigError

#: Architectures that the learner can train.
ARCHITECTURES = ("Qwen2ForCausalLM", "LlamaForCausalLM")
#: Options of these families that change the function the model computes and are not implemented.
_UNSUPPORTED_IF_SET = ("use_sliding_window", "mlp_bias", "attention_bias")
_HEADER_LIMIT = 100 * 2**20


def read_json(path: Path) -> Any:
    """Parsed content of ``path``; ConfigError in one line."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError([f"model.path: {path} does not exist; a Hugging Face folder has it"]) from None
    except (OSError, ValueError) as error:
        raise ConfigError([f"model.path: {path} cannot be read as JSON: {error}"]) from None


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense decoder. ``context`` is max_position_embeddings, ``vocab`` the unpadded size."""

    architecture: str
    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    tied: bool

    @classmethod
    def read(cls, folder: Path) -> ModelShape:
        """Shape of the model in ``folder``; ConfigError when it is none, or one the learner cannot train."""
        if not folder.is_dir():
            raise ConfigError([f"model.path = {folder}: no such folder; give a local Hugging Face model folder"])
        data = read_json(folder / "config.json")
        if not isinstance(data, dict):
            raise ConfigError([f"model.path: {folder / 'config.json'} holds no JSON object"])
        if found := list(_refusals(folder, data)):
            raise ConfigError(found)
        heads, hidden = data["num_attention_heads"], data["hidden_size"]
        return cls(
            architecture=data["architectures"][0],
            vocab=data["vocab_size"],
            hidden=hidden,
            ffn=data["intermediate_size"],
            layers=data["num_hidden_layers"],
            heads=heads,
            kv_heads=data.get("num_key_value_heads") or heads,
            head_dim=data.get("head_dim") or hidden // heads,
            context=data["max_position_embeddings"],
            tied=bool(data.get("tie_word_embeddings", False)),
        )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that the checkpoint must hold."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden,),
            "self_attn.q_proj.weight": (query, self.hidden),
            "self_attn.k_proj.weight": (key, self.hidden),
            "self_attn.v_proj.weight": (key, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, query),
            "post_attention_layernorm.weight": (self.hidden,),
            "mlp.gate_proj.weight": (self.ffn, self.hidden),
            "mlp.up_proj.weight": (self.ffn, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.ffn),
        }
        if self.architecture == "Qwen2ForCausalLM":
            layer |= {f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", query), ("k", key), ("v", key))}
        whole: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for index in range(self.layers):
            whole |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        whole["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            whole["lm_head.weight"] = (self.vocab, self.hidden)
        return whole


def _refusals(folder: Path, data: Mapping[str, Any]) -> Iterator[str]:
    """Why config.json describes no model that can be trained; nothing when it does."""
    where = f"model.path: {folder / 'config.json'}"
    architectures = data.get("architectures") or []
    if not (isinstance(architectures, list) and architectures and architectures[0] in ARCHITECTURES):
        yield f"{where}: architectures = {architectures} not supported; supported are {', '.join(ARCHITECTURES)}"
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "max_position_embeddings"):  # fmt: skip
        if not isinstance(data.get(name), int) or data[name] < 1:
            yield f"{where}: {name} = {data.get(name)}, must be a positive integer"
    for name in ("num_key_value_heads", "head_dim"):
        if data.get(name) is not None and (not isinstance(data[name], int) or data[name] < 1):
            yield f"{where}: {name} = {data[name]}, must be a positive integer"
    heads, key_heads = data.get("num_attention_heads"), data.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(key_heads, int) and key_heads > 0 and heads % key_heads:
        yield f"{where}: num_attention_heads = {heads} is not a multiple of num_key_value_heads = {key_heads}"
    for name in _UNSUPPORTED_IF_SET:
        if data.get(name):
            yield f"{where}: {name} = {data[name]} is not supported yet"
    if (activation := data.get("hidden_act", "silu")) != "silu":
        yield f"{where}: hidden_act = {activation!r} is not supported; supported is 'silu'"
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    if kind != "default":
        yield f"{where}: rope type {kind!r} is not supported yet; supported is 'default'"


# --- weights ----------------------------------------------------------------------------------


def weight_problems(folder: Path, shape: ModelShape) -> list[str]:
    """What is wrong with the safetensors of ``folder`` for a model of ``shape``."""
    try:
        found, problems = _stored_tensors(folder)
    except ConfigError as error:
        return error.problems
    expected = shape.tensors()
    missing = [name for name in expected if name not in found]
    wrong = [name for name, size in expected.items() if name in found and found[name] != size]
    if missing and not problems:
        problems.append(
            f"model.path: {folder} lacks {len(missing)} of {len(expected)} tensors of a {shape.architecture} "
            f"with {shape.layers} layers ({_few(missing)}); is the download complete, does config.json belong to it?"
        )
    if wrong:
        name = wrong[0]
        problems.append(
            f"model.path: {folder}: {len(wrong)} tensors do not have the shape that config.json gives "
            f"({name}: {list(found[name])}, expected {list(expected[name])})"
        )
    return problems


def _stored_tensors(folder: Path) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Name -> shape of every tensor stored in ``folder``, and what is wrong with the files themselves."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not index.exists():
        if not single.exists():
            raise ConfigError([f"model.path: {folder} has neither {single.name} nor {index.name}; safetensors needed"])
        return _header(single), []
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise ConfigError([f"model.path: {index} has no weight_map"])
    tensors: dict[str, tuple[int, ...]] = {}
    problems = []
    for name in sorted(set(weight_map.values())):
        try:
            stored = _header(folder / name)
        except ConfigError as error:
            problems += error.problems
            continue
        promised = [tensor for tensor, file in weight_map.items() if file == name]
        tensors |= {tensor: stored[tensor] for tensor in promised if tensor in stored}
        if absent := [tensor for tensor in promised if tensor not in stored]:
            problems.append(f"model.path: {folder / name} lacks {_few(absent)}, which {index.name} says it holds")
    return tensors, problems


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes in a safetensors file: 8 bytes little-endian length n, n bytes of JSON, then the data."""
    try:
        with open(path, "rb") as file:
            prefix = file.read(8)
            (length,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (0,)
            header = json.loads(file.read(length)) if 0 < length <= _HEADER_LIMIT else None
    except FileNotFoundError:
        raise ConfigError([f"model.path: {path} does not exist, though the index names it"]) from None
    except (OSError, ValueError) as error:
        raise ConfigError([f"model.path: {path} is no readable safetensors file: {error}"]) from None
    if not isinstance(header, dict):
        raise ConfigError([f"model.path: {path} is no safetensors file; a Git LFS pointer, or a broken download?"])
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if (size := path.stat().st_size) < end:
        raise ConfigError([f"model.path: {path} is cut short: {size} bytes of {end}; download it again"])
    return {name: tuple(entry["shape"]) for name, entry in entries.items()}


# --- tokenizer --------------------------------------------------------------------------------


def tokenizer_problems(folder: Path, shape: ModelShape) -> list[str]:
    """What is wrong with tokenizer.json for a model of ``shape``."""
    path = folder / "tokenizer.json"
    try:
        content = read_json(path)
    except ConfigError as error:
        return error.problems
    model = content.get("model") if isinstance(content, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, (dict, list)):
        return [f"model.path: {path} holds no tokenizer (model.vocab is missing)"]
    # Unigram keeps its vocabulary as a list in order of id, the others as {token: id}.
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
    ids += [token["id"] for token in content.get("added_tokens") or []]
    if max(ids, default=-1) >= shape.vocab:
        return [
            f"model.path: {path} has token ids up to {max(ids)}, but config.json says vocab_size = {shape.vocab}; "
            "the tokenizer belongs to another model"
        ]
    return []


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f", ... {len(names) - 3} more" if len(names) > 3 else "")
