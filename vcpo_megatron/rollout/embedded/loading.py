"""Opening a Hugging Face folder: config, weights, stop tokens, tokenizer. Missing tensors are errors here.

transformers only warns when a checkpoint lacks tensors and fills them with random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...models.families.registry import model_shape
from ...models.folder import weight_problems
from ...models.shape import SIZES, ShapeError
from ...models.tokenizer import TokenizerError, end_tokens
from ...models.tokenizer import load_tokenizer as read_tokenizer
from ...run.json_file import JsonFileError, read_json_object
from .errors import ModelError


def load_model(folder: Path, dtype: str) -> Any:
    """The folder's causal language model in eval mode, as ``dtype``; ModelError says in one line what is wrong."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = read_config(folder)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} has no *.safetensors file")
    _check_weights(folder, config)
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # fault boundary: transformers raises many types for a folder that it cannot read
        reason = str(error).strip().splitlines()
        raise ModelError(f"cannot load {folder}: {reason[0] if reason else type(error).__name__}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ModelError(f"the safetensors of {folder} lack {', '.join(missing[:5])}{more}")
    return model.eval()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of the folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{path} not found: a Hugging Face model folder is expected")
    config = _read_json(path)
    for key in SIZES:
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ModelError(f"{path}: {key} = {value!r} is not a positive integer")
    return config


def _check_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """Headers of the safetensors against config.json; architectures that are served only are left to transformers."""
    try:
        shape = model_shape(config)
    except ShapeError:
        return
    if found := weight_problems(folder, shape):
        raise ModelError(found[0].removeprefix("model.path: "))


def context_length(config: Mapping[str, Any], requested: int | None) -> int:
    """``requested``, or the model's ``max_position_embeddings``, which it must not exceed."""
    limit = config.get("max_position_embeddings")
    if requested is None:
        if limit is None:
            raise ModelError("config.json has no max_position_embeddings: pass --context-length")
        return int(limit)
    if limit is not None and requested > limit:
        raise ModelError(f"--context-length {requested} exceeds the model's max_position_embeddings = {limit}")
    return requested


def stop_tokens(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """End-of-sequence ids: of generation_config.json where it has them, else of config.json."""
    try:
        return end_tokens(folder, config)
    except TokenizerError as error:
        raise ModelError(str(error)) from error


def load_tokenizer(folder: Path) -> Any:
    """tokenizer.json as a ``tokenizers.Tokenizer``, or None: tokens in, tokens out needs none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return read_tokenizer(path)
    except TokenizerError as error:
        raise ModelError(str(error)) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except JsonFileError as error:
        raise ModelError(str(error)) from error
