"""What a Hugging Face config.json says about a decoder: ``ModelShape``. No torch.

Everything that is needed to build the same network, and nothing that must be guessed: an option which
the built network would not honour (a sliding window, another activation, a soft cap) is refused by
name, because weights would load and answers would silently differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .rope import Rope, read_rope

#: Keys of config.json that are positive integers in every family.
SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
#: Options of other families that change the function a model computes, and the values that leave it alone.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "quantization_config": (None, {}),
}


class ShapeError(ValueError):
    """A config.json that describes no model of a supported kind. ``problems`` holds a line for each fault."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts in place of the MLP of the layers that ``ModelShape.is_moe`` names.

    count, top_k        routed experts, and how many of them each token goes to
    ffn_hidden_size     width of one routed expert
    shared_ffn_hidden_size  width of the expert that every token goes to, weighted by a sigmoid gate; 0: none
    normalize_top_k     the chosen experts' softmax probabilities are divided by their sum
    dense_layers        layers that keep a plain MLP
    """

    count: int
    top_k: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int
    normalize_top_k: bool
    dense_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with RMSNorm, rotary positions, grouped-query attention and gated SiLU MLPs or experts.

    ``vocab_size`` is the number of rows of the HF embedding, unpadded; ``head_dim`` times the number of heads
    need not be ``hidden_size``. ``ffn_hidden_size`` is the width of dense MLPs. ``qkv_bias`` puts biases on q, k
    and v only; no other linear layer has one.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    max_position_embeddings: int
    experts: Experts | None = None

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

    def is_moe(self, layer: int) -> bool:
        """Whether ``layer`` (counted from 0 over the whole model) has experts in place of an MLP."""
        return self.experts is not None and layer not in self.experts.dense_layers


@dataclass(frozen=True)
class ConfigRules:
    """How to read the config.json of one architecture, and the names of its tensors.

    defaults         what transformers assumes for a key that config.json leaves out
    required_values  keys of which only one value is supported
    qkv_bias, qk_norm  what the architecture has, whatever config.json says
    window           how an active sliding window is found: "none" (the family knows no windows), "switch"
                     (use_sliding_window and the layers it names), "on" (use_sliding_window: some layer has it),
                     "width" (sliding_window alone)
    experts          how experts are described: "none", "mixtral" (every layer, intermediate_size wide), "qwen"
                     (decoder_sparse_step, mlp_only_layers, moe_intermediate_size) or "qwen-shared" (and a shared one)
    moe, expert      HF names of the block with the experts, and of gate, up and down of an expert
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]
    required_values: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    qkv_bias: bool = False
    qk_norm: bool = False
    window: str = "none"
    experts: str = "none"
    moe: str = "mlp"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


def read_shape(config: Mapping[str, Any], rules: ConfigRules) -> ModelShape:
    """``ModelShape`` of a parsed config.json; ShapeError with every problem."""
    values = {**rules.defaults, **config}
    problems = _unsupported(values, rules)
    sizes = _sizes(values, problems)
    rope = read_rope(values, sizes["max_position_embeddings"], problems)
    norm_eps = _positive_float(values, "rms_norm_eps", problems)
    experts = _experts(values, rules, sizes, problems)
    tied = values.get("tie_word_embeddings")
    if not isinstance(tied, bool | None):
        problems.append(f"tie_word_embeddings = {tied!r} is not true or false")
    if problems:
        raise ShapeError(problems)
    return ModelShape(
        architecture=rules.architecture,
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        ffn_hidden_size=sizes["intermediate_size"],
        num_attention_heads=sizes["num_attention_heads"],
        num_key_value_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        vocab_size=sizes["vocab_size"],
        norm_eps=norm_eps,
        rope=rope,
        tie_word_embeddings=bool(tied),
        qkv_bias=rules.qkv_bias,
        qk_norm=rules.qk_norm,
        max_position_embeddings=sizes["max_position_embeddings"],
        experts=experts,
    )


def _unsupported(values: Mapping[str, Any], rules: ConfigRules) -> list[str]:
    problems = [
        f"{key} = {values[key]!r} is not supported (only {wanted!r})"
        for key, wanted in rules.required_values.items()
        if key in values and values[key] != wanted
    ]
    problems += [
        f"{key} = {_short(values[key])} is not supported"
        for key, neutral in _NEUTRAL.items()
        if key in values and values[key] not in neutral
    ]
    if values.get("model_type") not in (None, rules.model_type):
        problems.append(
            f"model_type = {values['model_type']!r} is not that of {rules.architecture} ({rules.model_type!r}); "
            "the two must agree"
        )
    if rules.window != "none" and (reason := _window(values, rules.window)):
        problems.append(f"an active sliding window ({reason}) is not supported")
    return problems


def _short(value: Any) -> str:
    return "{...}" if isinstance(value, Mapping) else repr(value)


def _sizes(values: Mapping[str, Any], problems: list[str]) -> dict[str, int]:
    sizes = {key: _positive(values, key, problems) for key in SIZES}
    heads = sizes["num_attention_heads"]
    for key, implied in (("num_key_value_heads", heads), ("head_dim", sizes["hidden_size"] // heads)):
        sizes[key] = implied if values.get(key) is None else _positive(values, key, problems)
    if heads % sizes["num_key_value_heads"]:
        problems.append(
            f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {sizes['num_key_value_heads']}"
        )
    return sizes


def _experts(
    values: Mapping[str, Any], rules: ConfigRules, sizes: Mapping[str, int], problems: list[str]
) -> Experts | None:
    if rules.experts == "none":
        return None
    # transformers 5 writes num_local_experts where older versions wrote num_experts, and reads both.
    spelling = "num_local_experts" if values.get("num_local_experts") is not None else "num_experts"
    count = _positive(values, spelling, problems)
    top_k = _positive(values, "num_experts_per_tok", problems)
    layers = sizes["num_hidden_layers"]
    dense: tuple[int, ...] = ()
    if rules.experts == "mixtral":
        width, shared, normalize = sizes["intermediate_size"], 0, True
    else:
        width, normalize = _positive(values, "moe_intermediate_size", problems), bool(values.get("norm_topk_prob"))
        has_shared = rules.experts == "qwen-shared"
        shared = _positive(values, "shared_expert_intermediate_size", problems) if has_shared else 0
        step = _positive(values, "decoder_sparse_step", problems)
        plain = values.get("mlp_only_layers") or []
        if not isinstance(plain, list):
            problems.append(f"mlp_only_layers = {plain!r} is no list of layers")
            plain = []
        dense = tuple(layer for layer in range(layers) if layer in plain or (layer + 1) % step)
    if top_k > count:
        problems.append(f"num_experts_per_tok = {top_k} exceeds {spelling} = {count}")
    if top_k == 1 and normalize:
        problems.append("num_experts_per_tok = 1 with normalised probabilities trains no router: not supported")
    return Experts(count, top_k, width, shared, normalize, dense)


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


def _window(values: Mapping[str, Any], kind: str) -> str | None:
    """The option by which some layer sees less than the whole context, by transformers' own rules."""
    window = values.get("sliding_window")
    if not window:
        return None
    numbers = {key: values.get(key, 0) for key in ("sliding_window", "max_window_layers")}
    for key, value in numbers.items():
        if not isinstance(value, int | None):
            return f"{key} = {value!r}, no integer"
    if kind == "width":
        context = values.get("max_position_embeddings")
        shorter = isinstance(context, int) and window < context
        return f"sliding_window = {window} below max_position_embeddings = {context}" if shorter else None
    if not values.get("use_sliding_window"):
        return None
    if kind == "on" and not values.get("layer_types"):
        return "use_sliding_window"
    if values.get("layer_types"):
        if not isinstance(values["layer_types"], list):
            return f"layer_types = {values['layer_types']!r}, no list"
        windowed = any(layer != "full_attention" for layer in values["layer_types"])
    else:
        layers = values.get("num_hidden_layers")
        windowed = isinstance(layers, int) and (numbers["max_window_layers"] or 0) < layers
    return "use_sliding_window, layer_types" if windowed else None


# --- tensors ----------------------------------------------------------------------------------


def hf_tensors(shape: ModelShape, rules: ConfigRules) -> Mapping[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint, layer by layer."""
    whole: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, shape.hidden_size)}
    for layer in range(shape.num_layers):
        parts = {**_attention(shape), **(_moe(shape, rules) if shape.is_moe(layer) else _mlp(shape))}
        whole |= {f"model.layers.{layer}.{name}": size for name, size in parts.items()}
    whole["model.norm.weight"] = (shape.hidden_size,)
    if not shape.tie_word_embeddings:
        whole["lm_head.weight"] = (shape.vocab_size, shape.hidden_size)
    return whole


def _attention(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    rows = {"q": shape.q_size, "k": shape.kv_size, "v": shape.kv_size}
    found: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (shape.hidden_size,),
        **{f"self_attn.{name}_proj.weight": (size, shape.hidden_size) for name, size in rows.items()},
        "self_attn.o_proj.weight": (shape.hidden_size, shape.q_size),
        "post_attention_layernorm.weight": (shape.hidden_size,),
    }
    if shape.qkv_bias:
        found |= {f"self_attn.{name}_proj.bias": (size,) for name, size in rows.items()}
    if shape.qk_norm:
        found |= {f"self_attn.{name}_norm.weight": (shape.head_dim,) for name in "qk"}
    return found


def _gated(
    prefix: str, hidden: int, width: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, tuple[int, ...]]:
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    return {gate: (width, hidden), up: (width, hidden), down: (hidden, width)}


def _mlp(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    return _gated("mlp", shape.hidden_size, shape.ffn_hidden_size)


def _moe(shape: ModelShape, rules: ConfigRules) -> dict[str, tuple[int, ...]]:
    experts, hidden = shape.experts, shape.hidden_size
    assert experts is not None
    found: dict[str, tuple[int, ...]] = {f"{rules.moe}.gate.weight": (experts.count, hidden)}
    for expert in range(experts.count):
        found |= _gated(f"{rules.moe}.experts.{expert}", hidden, experts.ffn_hidden_size, rules.expert)
    if experts.shared_ffn_hidden_size:
        found |= _gated("mlp.shared_expert", hidden, experts.shared_ffn_hidden_size)
        found["mlp.shared_expert_gate.weight"] = (1, hidden)
    return found
