"""What a Hugging Face config.json says about a decoder: ``ModelShape``. No torch.

Everything that is needed to build the same network, and nothing that must be guessed: an option which
the built network would not honour (another activation, a soft cap) is refused by
name, because weights would load and answers would silently differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .experts import Experts, read_experts
from .latent_attention import LatentAttention, latent_tensors, read_latent
from .rope import Rope, read_rope
from .values import flag, positive, positive_float
from .window import Window, read_window

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
class ModelShape:
    """A decoder with RMSNorm, rotary positions, grouped-query attention and gated SiLU MLPs or experts.

    ``vocab_size`` is the number of rows of the HF embedding, unpadded; ``head_dim`` times the number of heads
    need not be ``hidden_size``. ``ffn_hidden_size`` is the width of dense MLPs. ``qkv_bias`` puts biases on q, k
    and v only; no other linear layer has one. With latent attention every head has a key head of its own, and
    ``head_dim`` is that of queries and keys. ``unused_layers`` follow the last one in the weights' files.
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
    latent: LatentAttention | None = None
    unused_layers: int = 0
    window: Window | None = None

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

    @property
    def largest_vocab_multiple(self) -> int:
        """With a larger one most rows of the vocabulary would be padding; any vocabulary may have 1024 rows."""
        return max(self.vocab_size, 1024)

    def padded_vocabulary(self, multiple: int) -> int:
        """``vocab_size`` rounded up to a multiple."""
        return -(-self.vocab_size // multiple) * multiple

    def is_moe(self, layer: int) -> bool:
        """Whether ``layer`` (counted from 0 over the whole model) has experts in place of an MLP."""
        return self.experts is not None and layer not in self.experts.dense_layers


@dataclass(frozen=True)
class ConfigRules:
    """How to read the config.json of one architecture, and the names of its tensors.

    defaults         what transformers assumes for a key that config.json leaves out
    required_values  keys of which only one value is supported
    qkv_bias, qk_norm  what the architecture has, whatever config.json says
    window           how a sliding window is found: "none" (the family knows no windows), "switch" (use_sliding_window
                     and layer_types, or else the layers from max_window_layers on), "on" (the same, but layers can be
                     told by layer_types only), "width" (sliding_window, in every layer)
    experts          how experts are described: "none", "mixtral" (every layer, intermediate_size wide), "qwen"
                     (decoder_sparse_step, mlp_only_layers, moe_intermediate_size), "qwen-shared" (and a shared one)
                     or "deepseek" (n_routed_experts, first_k_dense_replace, groups)
    moe, expert      HF names of the block with the experts, and of gate, up and down of an expert
    shared           HF name of the shared expert
    latent           attention is latent, with default or yarn rope
    unused_layers    key that counts layers behind the last one, which only speculative decoding uses
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
    shared: str = "mlp.shared_expert"
    latent: bool = False
    unused_layers: str = ""


def read_shape(config: Mapping[str, Any], rules: ConfigRules) -> ModelShape:
    """``ModelShape`` of a parsed config.json; ShapeError with every problem."""
    values = {**rules.defaults, **config}
    problems = _unsupported(values, rules)
    sizes = _sizes(values, problems)
    latent = read_latent(values, problems) if rules.latent else None
    if latent is not None:
        sizes["head_dim"] = latent.head_dim
        if sizes["num_key_value_heads"] != sizes["num_attention_heads"]:
            problems.append("num_key_value_heads must be num_attention_heads where attention is latent")
    rope = read_rope(values, sizes["max_position_embeddings"], problems)
    norm_eps = positive_float(values, "rms_norm_eps", problems)
    if latent is not None and rope.kind not in ("default", "yarn"):
        problems.append(f"rope_type = {rope.kind!r} is not supported with latent attention (only 'default', 'yarn')")
    experts = read_experts(values, rules.experts, sizes, problems)
    window = read_window(values, rules.window, sizes, problems)
    unused = 0 if values.get(rules.unused_layers) is None else values[rules.unused_layers]
    if not isinstance(unused, int) or isinstance(unused, bool) or unused < 0:
        problems.append(f"{rules.unused_layers} = {unused!r} is no number of layers")
    tied = flag(values, "tie_word_embeddings", problems)
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
        tie_word_embeddings=tied,
        qkv_bias=rules.qkv_bias,
        qk_norm=rules.qk_norm,
        max_position_embeddings=sizes["max_position_embeddings"],
        experts=experts,
        latent=latent,
        unused_layers=unused,
        window=window,
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
    problems += [
        f"{key} = {_short(values[key])} is not the name of a dtype"
        for key in ("dtype", "torch_dtype")
        if not isinstance(values.get(key), str | None)
    ]
    if values.get("model_type") not in (None, rules.model_type):
        problems.append(
            f"model_type = {values['model_type']!r} is not that of {rules.architecture} ({rules.model_type!r}); "
            "the two must agree"
        )
    return problems


def _short(value: Any) -> str:
    return "{...}" if isinstance(value, Mapping) else repr(value)


def _sizes(values: Mapping[str, Any], problems: list[str]) -> dict[str, int]:
    sizes = {key: positive(values, key, problems) for key in SIZES}
    heads = sizes["num_attention_heads"]
    for key, implied in (("num_key_value_heads", heads), ("head_dim", sizes["hidden_size"] // heads)):
        sizes[key] = implied if values.get(key) is None else positive(values, key, problems)
    if heads % sizes["num_key_value_heads"]:
        problems.append(
            f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {sizes['num_key_value_heads']}"
        )
    return sizes


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
    norms: dict[str, tuple[int, ...]] = {
        f"{name}_layernorm.weight": (shape.hidden_size,) for name in ("input", "post_attention")
    }
    if shape.latent is not None:
        return norms | latent_tensors(shape.latent, shape.num_attention_heads, shape.hidden_size)
    rows = {"q": shape.q_size, "k": shape.kv_size, "v": shape.kv_size}
    found = {
        **norms,
        **{f"self_attn.{name}_proj.weight": (size, shape.hidden_size) for name, size in rows.items()},
        "self_attn.o_proj.weight": (shape.hidden_size, shape.q_size),
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
        found |= _gated(rules.shared, hidden, experts.shared_ffn_hidden_size)
        if experts.shared_gate:
            found[f"{rules.shared}_gate.weight"] = (1, hidden)
    if experts.sigmoid:
        found[f"{rules.moe}.gate.e_score_correction_bias"] = (experts.count,)
    return found
