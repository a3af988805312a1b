"""A mixture of experts as config.json describes it: sizes, and how tokens choose among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .values import flag, layers, positive, positive_float


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts in place of the MLP of the layers that ``ModelShape.is_moe`` names.

    count, top_k        routed experts, and how many of them each token goes to
    ffn_hidden_size     width of one routed expert
    shared_ffn_hidden_size  width of the expert that every token goes to; 0: none
    normalize_top_k     the chosen experts' scores are divided by their sum
    dense_layers        layers that keep a plain MLP
    shared_gate         the shared expert is weighted by a sigmoid gate of its own
    sigmoid             DeepSeek-V3's routing: scores are sigmoids, and a stored bias, which training leaves alone,
                        is added to them where experts are chosen, not where they are weighted
    groups, top_groups  a token's experts are taken from the ``top_groups`` best of ``groups`` groups of experts
    scale               the chosen experts' weights are multiplied by it
    """

    count: int
    top_k: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int
    normalize_top_k: bool
    dense_layers: tuple[int, ...]
    shared_gate: bool = True
    sigmoid: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


def read_experts(values: Mapping[str, Any], kind: str, sizes: Mapping[str, int], problems: list[str]) -> Experts | None:
    """Experts of a config.json with defaults filled in; ``kind`` is ``ConfigRules.experts``."""
    if kind == "none":
        return None
    if kind == "deepseek":
        return _deepseek(values, sizes, problems)
    # transformers 5 writes num_local_experts where older versions wrote num_experts, and reads both.
    spelling = "num_local_experts" if values.get("num_local_experts") is not None else "num_experts"
    count = positive(values, spelling, problems)
    if spelling != "num_experts" and values.get("num_experts") is not None:
        positive(values, "num_experts", problems)
    top_k = positive(values, "num_experts_per_tok", problems)
    dense: tuple[int, ...] = ()
    if kind == "mixtral":
        width, shared, normalize = sizes["intermediate_size"], 0, True
    else:
        width, normalize = positive(values, "moe_intermediate_size", problems), flag(values, "norm_topk_prob", problems)
        has_shared = kind == "qwen-shared"
        shared = positive(values, "shared_expert_intermediate_size", problems) if has_shared else 0
        step = positive(values, "decoder_sparse_step", problems)
        plain = layers(values, "mlp_only_layers", problems)
        dense = tuple(layer for layer in range(sizes["num_hidden_layers"]) if layer in plain or (layer + 1) % step)
    if top_k > count:
        problems.append(f"num_experts_per_tok = {top_k} exceeds {spelling} = {count}")
    if top_k == 1 and normalize:
        problems.append("num_experts_per_tok = 1 with normalised probabilities trains no router: not supported")
    return Experts(count, top_k, width, shared, normalize, dense)


def _deepseek(values: Mapping[str, Any], sizes: Mapping[str, int], problems: list[str]) -> Experts:
    names = (
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "n_shared_experts",
        "n_group",
        "topk_group",
    )
    count, top_k, width, shared, groups, chosen = (positive(values, name, problems) for name in names)
    scale = positive_float(values, "routed_scaling_factor", problems)
    plain = values.get("first_k_dense_replace")
    if not isinstance(plain, int) or isinstance(plain, bool) or plain < 0:
        problems.append(f"first_k_dense_replace = {plain!r} is no number of layers")
        plain = 0
    if count % groups or chosen > groups:
        problems.append(f"topk_group = {chosen} of n_group = {groups} groups of n_routed_experts = {count}")
    elif top_k > chosen * (count // groups):
        problems.append(f"num_experts_per_tok = {top_k} exceeds the experts of topk_group = {chosen} groups")
    elif chosen < groups and top_k // chosen != 2:
        # a group is scored by its two best experts; Megatron takes top_k / top_groups of them
        problems.append(
            f"num_experts_per_tok = {top_k} with topk_group = {chosen}: groups are scored by their two best experts "
            "only where it is twice (or twice and a rest of) topk_group"
        )
    dense = tuple(range(min(plain, sizes["num_hidden_layers"])))
    if chosen == groups:
        groups = chosen = 1  # no group is left out
    return Experts(
        count,
        top_k,
        width,
        width * shared,
        True,
        dense,
        shared_gate=False,
        sigmoid=True,
        groups=groups,
        top_groups=chosen,
        scale=scale,
    )
