"""What a Hugging Face config.json says about a dense decoder: ``ModelShape``.

Everything the learner needs to build the same network, and nothing it must guess: an option that
the built network would not honour (rope scaling, sliding windows, other activations, biases) is
refused by name, because weights would load and answers would silently differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ConversionError

DEFAULT_ROPE = ("default", None)
REQUIRED_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder with RMSNorm, rotary positions, grouped-query attention and a gated SiLU MLP.

    ``vocab_size`` is the number of rows of the HF embedding, unpadded; ``head_dim`` times the number of heads
    need not be ``hidden_size``. ``qkv_bias`` puts biases on q, k and v only; no other linear layer has one.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    max_position_embeddings: int

    @property
    def q_size(self) -> int:
        """Rows of q_proj."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of k_proj, and of v_proj."""
        return self.num_key_value_heads * self.head_dim

    @property
    def queries_per_group(self) -> int:
        """Query heads that share one key head."""
        return self.num_attention_heads // self.num_key_value_heads


@dataclass(frozen=True)
class ConfigRules:
    """How to read the config.json of one family.

    defaults         what transformers assumes for a key that config.json leaves out
    required_values  keys of which only one value is supported
    qkv_bias, qk_norm  what the architecture has, whatever config.json says
    sliding_window   the family knows sliding windows, so that an active one must be looked for
    """

    defaults: Mapping[str, Any]
    required_values: Mapping[str, Any]
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: bool = False


def read_shape(config: Mapping[str, Any], architecture: str, rules: ConfigRules) -> ModelShape:
    """``ModelShape`` of a parsed config.json; raises ConversionError with all problems in one line."""
    values = {**rules.defaults, **config}
    problems = _unsupported(values, rules)
    sizes = _sizes(values, problems)
    theta = _rope_theta(values, problems)
    norm_eps = _positive_float(values, "rms_norm_eps", problems)
    if problems:
        raise ConversionError(f"config.json of {architecture}: " + "; ".join(problems))
    return ModelShape(
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        ffn_hidden_size=sizes["intermediate_size"],
        num_attention_heads=sizes["num_attention_heads"],
        num_key_value_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        vocab_size=sizes["vocab_size"],
        norm_eps=norm_eps,
        rope_theta=theta,
        tie_word_embeddings=bool(values.get("tie_word_embeddings")),
        qkv_bias=rules.qkv_bias,
        qk_norm=rules.qk_norm,
        max_position_embeddings=sizes["max_position_embeddings"],
    )


def _unsupported(values: Mapping[str, Any], rules: ConfigRules) -> list[str]:
    problems = [
        f"{key} = {values[key]!r} is not supported (only {wanted!r})"
        for key, wanted in rules.required_values.items()
        if key in values and values[key] != wanted
    ]
    if values.get("quantization_config"):
        problems.append("quantization_config is set: use the unquantised model")
    if rules.sliding_window and _sliding_layers(values):
        problems.append("an active sliding window (use_sliding_window, layer_types) is not supported")
    return problems


def _sizes(values: Mapping[str, Any], problems: list[str]) -> dict[str, int]:
    sizes = {key: _positive(values, key, problems) for key in REQUIRED_SIZES}
    heads = sizes["num_attention_heads"]
    for key, implied in (("num_key_value_heads", heads), ("head_dim", sizes["hidden_size"] // heads)):
        sizes[key] = implied if values.get(key) is None else _positive(values, key, problems)
    if heads % sizes["num_key_value_heads"]:
        problems.append(
            f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {sizes['num_key_value_heads']}"
        )
    return sizes


def _positive(values: Mapping[str, Any], key: str, problems: list[str]) -> int:
    value = values.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    problems.append(f"{key} is missing" if value is None else f"{key} = {value!r} is not a positive integer")
    return 1  # only so that the remaining checks can run


def _positive_float(values: Mapping[str, Any], key: str, problems: list[str]) -> float:
    value = values.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        return float(value)
    problems.append(f"{key} is missing" if value is None else f"{key} = {value!r} is not a positive number")
    return 1.0


def _rope_theta(values: Mapping[str, Any], problems: list[str]) -> float:
    """transformers 5 keeps all of rope in ``rope_parameters``, older ones in ``rope_theta`` and ``rope_scaling``."""
    merged = dict(values)
    for name in ("rope_scaling", "rope_parameters"):
        found = values.get(name) or {}
        if not isinstance(found, Mapping):
            problems.append(f"{name} = {found!r} is not an object")
            continue
        kind = found.get("rope_type", found.get("type"))
        if kind not in DEFAULT_ROPE:
            problems.append(f"{name}.rope_type = {kind!r} is not supported (only 'default')")
        elif any(isinstance(value, Mapping) for value in found.values()):
            problems.append(f"{name} differs between kinds of layers ({', '.join(found)}): not supported")
        merged.update(found)
    if merged.get("partial_rotary_factor") not in (None, 1, 1.0):
        problems.append(f"partial_rotary_factor = {merged['partial_rotary_factor']!r} is not supported (only 1.0)")
    return _positive_float(merged, "rope_theta", problems)


def _sliding_layers(values: Mapping[str, Any]) -> bool:
    """Whether any layer attends within a window, by transformers' own rule."""
    if not values.get("use_sliding_window") or values.get("sliding_window") is None:
        return False
    if values.get("layer_types"):
        return any(kind != "full_attention" for kind in values["layer_types"])
    return values.get("max_window_layers", 0) < values.get("num_hidden_layers", 0)
