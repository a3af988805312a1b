"""What a Hugging Face model folder says about itself, read as JSON: no torch, no safetensors library.

``weight_problems``, ``tokenizer_problems`` and ``generation_problems`` compare the files beside config.json
with it, so that a half-downloaded or mixed-up folder is refused before any process starts.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from ..run.errors import ConfigError
from ..run.json_file import JsonFileError, read_json
from .dtypes import ELEMENT_BYTES, SAFETENSORS_NAMES, TRAINED
from .families.registry import model_shape, tensors
from .shape import ModelShape, ShapeError

_EMBEDDING = "model.embed_tokens.weight"
_HEADER_LIMIT = 100 * 2**20
#: safetensors' names of the types that weights are trained from, and their bytes.
_WEIGHT_BYTES = {SAFETENSORS_NAMES[name]: size for name, size in ELEMENT_BYTES.items()}


class _Stored(NamedTuple):
    """A tensor as the header of its file describes it."""

    dtype: str
    shape: tuple[int, ...]


def _read(path: Path) -> Any:
    """Parsed content of ``path``; ConfigError in one line."""
    try:
        return read_json(path)
    except JsonFileError as error:
        raise ConfigError([f"model.path: {error}; give a complete Hugging Face folder"]) from None


def read_model(folder: Path) -> ModelShape:
    """Shape of the model in ``folder``; ConfigError when it is none, or one the learner cannot train."""
    if not folder.is_dir():
        raise ConfigError([f"model.path = {folder}: no such folder; give a local Hugging Face model folder"])
    path = folder / "config.json"
    data = _read(path)
    if not isinstance(data, dict):
        raise ConfigError([f"model.path: {path} holds no JSON object"])
    if data.get("model_type") is None:
        raise ConfigError([f"model.path: {path}: model_type is missing; the rollout engines choose the network by it"])
    try:
        return model_shape(data)
    except ShapeError as error:
        raise ConfigError([f"model.path: {path}: {problem}" for problem in error.problems]) from None


def stated_dtype(folder: Path) -> str:
    """The dtype that the model in ``folder`` is trained in as it is: that of config.json, or of the stored embedding
    where it states none, as transformers takes it. ConfigError when it cannot be read, or is not trained in."""
    config = _read(folder / "config.json")
    stated = (config.get("dtype") or config.get("torch_dtype")) if isinstance(config, dict) else None
    where = "config.json"
    if stated is None:
        where, found = _EMBEDDING, _stored_tensors(folder)[0].get(_EMBEDDING)
        stated = next((name for name, stored in SAFETENSORS_NAMES.items() if found and stored == found.dtype), None)
    if stated not in TRAINED:
        raise ConfigError(
            [
                f'model.dtype = "auto": {where} of {folder} is {stated}, which is not trained in; '
                f"give model.dtype = {' or '.join(map(json.dumps, TRAINED))}"
            ]
        )
    return str(stated)


# --- weights ----------------------------------------------------------------------------------


def weight_problems(folder: Path, shape: ModelShape) -> list[str]:
    """What is wrong with the safetensors of ``folder`` for a model of ``shape``."""
    try:
        found, problems = _stored_tensors(folder)
    except ConfigError as error:
        return error.problems
    expected = tensors(shape)
    if fused := fused_experts(found):
        return [f"model.path: {folder}: {fused}"]
    missing = [name for name in expected if name not in found]
    wrong = [name for name, size in expected.items() if name in found and found[name].shape != size]
    foreign = [name for name in expected if name in found and found[name].dtype not in _WEIGHT_BYTES]
    if missing and not problems:
        problems.append(
            f"model.path: {folder} lacks {len(missing)} of {len(expected)} tensors of a {shape.architecture} "
            f"with {shape.num_layers} layers ({_few(missing)}); is the download complete, and does config.json "
            "belong to it?"
        )
    if wrong:
        name = wrong[0]
        problems.append(
            f"model.path: {folder}: {len(wrong)} tensors do not have the shape that config.json gives "
            f"({name}: {list(found[name].shape)}, expected {list(expected[name])})"
        )
    if foreign:
        name = foreign[0]
        problems.append(
            f"model.path: {folder}: {len(foreign)} tensors are of a type that is not trained ({name}: "
            f"{found[name].dtype}; only {', '.join(_WEIGHT_BYTES)} are); use the unquantised model"
        )
    return problems


def fused_experts(names: Iterable[str]) -> str:
    """What is wrong with a folder whose experts are stacked in one tensor a layer; "" when they are not.

    transformers 5 keeps them so in memory; what engines read, and what it writes by default, names each expert.
    """
    found = next((name for name in names if re.search(r"\.experts\.(gate_up_proj|down_proj)", name)), None)
    if found is None:
        return ""
    return (
        f"{found} holds all experts of a layer in one tensor, which is not supported; load the folder with "
        "transformers and write it with save_pretrained(..., save_original_format=True)"
    )


def elsewhere(files: Iterable[str]) -> list[str]:
    """Those of an index's file names that do not lie in its folder itself: another model's files, say."""
    return sorted({file for file in files if "/" in file})


def _stored_tensors(folder: Path) -> tuple[dict[str, _Stored], list[str]]:
    """Every tensor stored in ``folder``, and what is wrong with the files themselves."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not index.exists():
        if not single.exists():
            raise ConfigError([f"model.path: {folder} has neither {single.name} nor {index.name}; safetensors needed"])
        return _header(single), []
    content = _read(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ConfigError([f"model.path: {index} has no weight_map of tensor names to file names"])
    if wrong := elsewhere(weight_map.values()):
        raise ConfigError([f"model.path: {index} names files outside its folder ({_few(wrong)}); it is not its own"])
    found: dict[str, _Stored] = {}
    problems = []
    for name in sorted(set(weight_map.values())):
        try:
            stored = _header(folder / name)
        except ConfigError as error:
            problems += error.problems
            continue
        promised = [tensor for tensor, file in weight_map.items() if file == name]
        found |= {tensor: stored[tensor] for tensor in promised if tensor in stored}
        if absent := [tensor for tensor in promised if tensor not in stored]:
            problems.append(f"model.path: {folder / name} lacks {_few(absent)}, which {index.name} says it holds")
    return found, problems


def _header(path: Path) -> dict[str, _Stored]:
    """Tensors in a safetensors file: 8 bytes little-endian length n, n bytes of JSON, then the data."""
    try:
        with open(path, "rb") as file:
            prefix = file.read(8)
            (length,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (0,)
            header = json.loads(file.read(length)) if 0 < length <= _HEADER_LIMIT else None
    except FileNotFoundError:
        raise ConfigError([f"model.path: {path} does not exist, though the index names it"]) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError([f"model.path: {path} is no readable safetensors file: {error}"]) from None
    if not isinstance(header, dict):
        raise ConfigError([f"model.path: {path} is no safetensors file; a Git LFS pointer, or a broken download?"])
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    for name, entry in entries.items():
        if fault := _entry_fault(entry):
            raise ConfigError([f"model.path: {path}: tensor {name!r} has {fault}; the file is broken or foreign"])
    end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if (size := path.stat().st_size) < end:
        raise ConfigError([f"model.path: {path} is cut short: {size} bytes of {end}; download it again"])
    return {name: _Stored(entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}


def _entry_fault(entry: Any) -> str:
    """What is wrong with one tensor's entry of a safetensors header; "" when nothing is."""
    if not isinstance(entry, dict):
        return "a header entry that is no object"
    kind, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(kind, str):
        return f"dtype = {kind!r}"
    if not _counts(shape):
        return f"shape = {shape!r}, not a list of sizes"
    if not _counts(offsets) or len(offsets) != 2:
        return f"data_offsets = {offsets!r}, not a beginning and an end"
    length = offsets[1] - offsets[0]
    needed = _WEIGHT_BYTES[kind] * math.prod(shape) if kind in _WEIGHT_BYTES else max(length, 0)
    if length != needed:
        return f"data_offsets = {offsets!r}, where {kind} of shape {shape!r} takes {needed} bytes"
    return ""


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(_is_count(item) for item in value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# --- tokenizer --------------------------------------------------------------------------------


def tokenizer_problems(folder: Path, shape: ModelShape) -> list[str]:
    """What is wrong with tokenizer.json for a model of ``shape``, or with tokenizer_config.json."""
    path = folder / "tokenizer.json"
    try:
        content = _read(path)
        settings = _read(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    except ConfigError as error:
        return error.problems
    if problem := _settings_fault(settings):
        return [f"model.path: {folder / 'tokenizer_config.json'} {problem}; the file is broken or foreign"]
    model = content.get("model") if isinstance(content, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, (dict, list)):
        return [f"model.path: {path} holds no tokenizer (model.vocab is missing)"]
    # Unigram keeps its vocabulary as a list in order of id, the others as {token: id}.
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
    added = content.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        return [f"model.path: {path}: added_tokens is no list of objects"]
    ids += [token.get("id") for token in added]
    if wrong := [value for value in ids if not _is_count(value)]:
        return [f"model.path: {path} has a token with id {wrong[0]!r}, not a whole number; the file is broken"]
    if max(ids, default=-1) >= shape.vocab_size:
        return [
            f"model.path: {path} has token ids up to {max(ids)}, but config.json says vocab_size = {shape.vocab_size}; "
            "the tokenizer belongs to another model"
        ]
    return []


def _settings_fault(settings: Any) -> str:
    """What is wrong with the content of tokenizer_config.json; "" when nothing is."""
    if not isinstance(settings, dict):
        return "holds no JSON object"
    template = settings.get("chat_template")
    templates = template if isinstance(template, list) else [{"template": template or ""}]
    if not all(isinstance(item, dict) and isinstance(item.get("template"), str) for item in templates):
        return "has a chat_template that is neither text nor a list of named texts"
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and not isinstance(text, str | bool | None):
            return f"has {key} = {value!r}, which is no token"
    return ""


# --- generation_config.json -------------------------------------------------------------------


def generation_problems(folder: Path, shape: ModelShape) -> list[str]:
    """What is wrong with the end-of-sequence tokens of generation_config.json, or else of config.json."""
    try:
        stop_tokens(folder, shape)
    except ConfigError as error:
        return error.problems
    return []


def stop_tokens(folder: Path, shape: ModelShape) -> tuple[int, ...]:
    """Tokens that end an answer: of generation_config.json, or else of config.json; ConfigError for what is none."""
    for path in (folder / "generation_config.json", folder / "config.json"):
        if not path.exists():
            continue
        content = _read(path)
        if not isinstance(content, dict):
            raise ConfigError([f"model.path: {path} holds no JSON object"])
        if (value := content.get("eos_token_id")) is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not _counts(ids) or max(ids, default=0) >= shape.vocab_size:
            raise ConfigError(
                [
                    f"model.path: {path}: eos_token_id = {value!r} is no token id, or list of them, below "
                    f"vocab_size = {shape.vocab_size}"
                ]
            )
        return tuple(ids)
    return ()


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f", ... {len(names) - 3} more" if len(names) > 3 else "")
