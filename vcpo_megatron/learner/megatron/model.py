"""Megatron's GPTModel for a Hugging Face model, with the weights of this rank's shard.

``layer_specs`` chooses the layers; TransformerConfig keeps every fusion off that would hide a layer's input from the
per-trajectory gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from ...config.process import WARNING_PREFIX
from ...config.schema import RunConfig
from ...conversion.dtypes import torch_dtype
from ...conversion.families.registry import Family, ModelShape, open_model
from ...conversion.hf import HFFolder
from ...conversion.shards import load_shard, unconsumed
from ...models.experts import Experts
from ...models.tokenizer import TokenizerError, load_tokenizer
from . import platform
from .dispatch import PlannedDispatch
from .latent import latent_options
from .layer_specs import block_spec, engine_options, rope_is_fused
from .output_layer import keep_fp32_logits
from .parallel import Parallel
from .rope import attention_scale, inverse_frequencies, turn_by_pack


def transformer_config(config: RunConfig, shape: ModelShape) -> TransformerConfig:
    """Megatron's configuration of the model in the run's layout."""
    dtype = torch_dtype(config.model.dtype)
    kind = TransformerConfig if shape.latent is None else MLATransformerConfig
    return kind(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        **_layout_options(config),
        **_window_options(shape),
        **_RECOMPUTE[config.model.recompute],
        # every value is read from the checkpoint; what Megatron would draw at random is never used
        perform_initialization=False,
        use_cpu_initialization=not platform.has_gpu(),
        # packs differ in length; ``stage_messages`` knows the shapes, and messages of one batch need no barrier of the
        # device behind them (old versions of torch did), which would wait for all that is on its way
        variable_seq_lengths=config.parallel.pipeline > 1,
        batch_p2p_sync=False,
        moe_token_dispatcher_type=config.parallel.expert_dispatcher,
        # the schedule must not rescale: losses are normalised over the global batch by us
        calculate_per_token_loss=True,
        # then Megatron's own choices are such ones, too: its embedding and TransformerEngine's attention
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        # fusions would hide layer inputs
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=rope_is_fused(shape),
        persist_layer_norm=False,
        **(
            {"softmax_scale": attention_scale(shape.rope, shape.head_dim)}
            if shape.latent is None
            else latent_options(shape.latent, shape.rope)
        ),
        **(_expert_options(config, shape, shape.experts) if shape.experts is not None else {}),
        **{
            # of a plain backward only: where trajectories are separated, ``weight_gradients`` forms the product
            "gradient_accumulation_fusion": platform.kernels().adds_products,
            **engine_options(config.model),
        },
    )


def _expert_options(config: RunConfig, shape: ModelShape, experts: Experts) -> dict[str, Any]:
    """TransformerConfig of a mixture of experts, routed as transformers routes it.

    Softmax over all experts and then the top k, or (normalised) over the logits of the top k, which is the
    same divided by its sum. Megatron's own load-balancing losses are off: they would change the gradient.
    """
    mixed = [int(shape.is_moe(layer)) for layer in range(shape.num_layers)]
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_layer_freq": 1 if all(mixed) else mixed,  # decides how the layers are stored in checkpoints
        "moe_router_pre_softmax": not experts.normalize_top_k,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": experts.shared_ffn_hidden_size > 0 and experts.shared_gate,
        "moe_router_score_function": "sigmoid" if experts.sigmoid else "softmax",
        "moe_router_enable_expert_bias": experts.sigmoid,
        "moe_router_bias_update_rate": 0.0,  # the bias would follow the load; it stays as it was stored
        "moe_router_num_groups": experts.groups if experts.groups > 1 else None,
        "moe_router_group_topk": experts.top_groups if experts.groups > 1 else None,
        "moe_router_topk_scaling_factor": experts.scale if experts.scale != 1 else None,
    }


def _window_options(shape: ModelShape) -> dict[str, Any]:
    """Sliding windows: the tokens before and after the own one, and a 1 for every layer that has a window."""
    if shape.window is None:
        return {}
    windowed = [int(layer in shape.window.layers) for layer in range(shape.num_layers)]
    return {"window_size": (shape.window.tokens - 1, 0), "window_attn_skip_freq": windowed}


#: model.recompute -> Megatron's options: of every layer only the input is kept, or all but attention's inside.
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def _layout_options(config: RunConfig) -> dict[str, Any]:
    parallel = config.parallel
    options: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "sequence_parallel": parallel.sequence_parallel and parallel.tensor > 1,
    }
    if parallel.virtual_pipeline > 1:
        # batched sends of several chunks are received in another order by gloo: silently wrong gradients
        options |= {
            "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
            "deallocate_pipeline_outputs": False,
        }
    return options


def padded_vocabulary(config: RunConfig, shape: ModelShape) -> int:
    """Vocabulary size rounded up to ``model.vocab_multiple``."""
    return shape.padded_vocabulary(config.model.vocab_multiple)


def global_name(chunk: GPTModel, name: str) -> str:
    """Name of a parameter with its layer counted over all pipeline stages, its expert over all ranks."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        layer = chunk.decoder.layers[int(parts[2])]
        parts[2] = str(layer.layer_number - 1)
        if "local_experts" in parts:
            expert = parts.index("local_experts") + 1
            parts[expert] = str(layer.mlp.local_expert_indices[int(parts[expert])])
    return ".".join(parts)


def build_model(config: RunConfig, parallel: Parallel, *, load: bool) -> tuple[list[GPTModel], Family, ModelShape]:
    """This rank's part of the model, one chunk a virtual stage; ``load`` reads its weights from ``model.path``."""
    folder = HFFolder(config.model.path)
    family, shape = open_model(folder.config)
    chunks = build_network(config, parallel, family, shape)
    if load:
        if parallel.rank == 0:  # tensors that the model does not have are not read
            for name, reason in unconsumed(folder, family, shape).items():
                print(f"{folder.path}: {name} is not loaded: {reason}", flush=True)
        for chunk in chunks:
            _load_weights(chunk, folder, family, shape, parallel, padded_vocabulary(config, shape))
        _warn_of_zero_embeddings(chunks, folder, shape, parallel)
    return chunks, family, shape


def build_network(config: RunConfig, parallel: Parallel, family: Family, shape: ModelShape) -> list[GPTModel]:
    """This rank's part of the network, its weights not yet set."""
    megatron = transformer_config(config, shape)
    chunks = []
    for number in range(parallel.virtual_size):
        stage = number if parallel.virtual_size > 1 else None
        model = GPTModel(
            config=megatron,
            transformer_layer_spec=block_spec(megatron, config.model, shape, stage),
            vocab_size=padded_vocabulary(config, shape),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tie_word_embeddings,
            position_embedding_type="rope",
            rotary_base=shape.rope.theta,
            vp_stage=stage,
        )
        _set_frequencies(model, shape)
        plan_on_host(model)
        if model.post_process and config.model.upcasts_logits:
            keep_fp32_logits(model)
        model.to(platform.device())
        _mark_tensor_parallel(model, family)
        chunks.append(model)
    return chunks


def plan_on_host(model: GPTModel) -> None:
    """What Megatron learns from the device in every layer (positions of packed sequences, splits of a dispatch) is
    told to it by the host."""
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.token_dispatcher.plan = PlannedDispatch(module.token_dispatcher)
        if isinstance(module, RotaryEmbedding):
            turn_by_pack(module)


def _set_frequencies(model: GPTModel, shape: ModelShape) -> None:
    """Megatron knows some scalings, with constants of its own; here config.json decides about all of them."""
    if shape.latent is None:
        model.rotary_pos_emb.inv_freq = inverse_frequencies(shape.rope, shape.head_dim).to(platform.device())
        return
    frequencies = inverse_frequencies(shape.rope, shape.latent.rotary).to(platform.device())
    for layer in model.decoder.layers:
        layer.self_attention.rotary_pos_emb = model.decoder.layers[0].self_attention.rotary_pos_emb  # one for all
        layer.self_attention.rotary_pos_emb.inv_freq = frequencies


def named_weights(chunk: GPTModel) -> dict[str, Tensor]:
    """Everything of a chunk that is stored: its parameters, and the biases that choose experts, under global names."""
    biases = ((name, tensor) for name, tensor in chunk.named_buffers() if name.endswith(".router.expert_bias"))
    return {global_name(chunk, name): tensor for name, tensor in (*chunk.named_parameters(), *biases)}


def _mark_tensor_parallel(model: GPTModel, family: Family) -> None:
    """Mark the parameters that tensor parallelism cuts; Megatron does so itself only where it draws random weights.

    Without the mark its gradient norm would count the shards of other ranks as copies.
    """
    for name, parameter in model.named_parameters():
        dim = family.partition_dim(global_name(model, name))
        if dim is not None and not hasattr(parameter, "tensor_model_parallel"):
            # also where it is cut into one part: ranks of one tensor group may hold different whole experts
            set_tensor_model_parallel_attributes(parameter, True, dim, 1)


def _load_weights(
    model: GPTModel, folder: HFFolder, family: Family, shape: ModelShape, parallel: Parallel, padded: int
) -> None:
    """Fill every parameter, exactly once, from the folder; only this rank's shards are read."""
    parameters = named_weights(model)
    shards = load_shard(
        folder,
        family,
        shape,
        parameters,
        parallel.tensor_rank,
        parallel.tensor_size,
        padded,
        expert_tp_rank=parallel.expert_tensor_rank,
        expert_tp_size=parallel.expert_tensor_size,
    )
    missing = set(parameters)
    for name, tensor in shards:
        parameter = parameters[name]
        if tensor.shape != parameter.shape:
            raise ValueError(
                f"{folder.path}: {name} has shape {list(tensor.shape)} in the checkpoint but "
                f"{list(parameter.shape)} in the model; config.json and the weights do not belong together"
            )
        parameter.data.copy_(tensor)
        missing.discard(name)
    if missing:
        raise ValueError(f"{folder.path}: no weights for {', '.join(sorted(missing))}")


def _warn_of_zero_embeddings(
    chunks: Sequence[GPTModel], folder: HFFolder, shape: ModelShape, parallel: Parallel
) -> None:
    """Name the tokens whose embedding is a row of zeros; collective.

    A norm divides such a row by the root of its epsilon, so that a trajectory which holds the token has a gradient of
    many times the others' norm. transformers makes one of every ``pad_token_id``, which often ends answers, too.
    """
    tokens: list[int] = []
    for chunk in chunks:
        if chunk.pre_process:
            embedding = chunk.embedding.word_embeddings
            tokens += (embedding.vocab_start_index + (~embedding.weight.any(dim=1)).nonzero()[:, 0]).tolist()
    everywhere: list[list[int]] = [[] for _ in range(parallel.world_size)]
    dist.all_gather_object(everywhere, tokens, group=parallel.command_group)
    rows = sorted({token for some in everywhere for token in some if token < shape.vocab_size})
    if parallel.rank == 0 and (names := _known_tokens(folder.path, rows)):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        print(
            f"{WARNING_PREFIX}{folder.path}: the embedding of {', '.join(names[:3])}{more} is a row of zeros: an "
            "answer that goes on after such a token has a far larger gradient than the others, and sets its group's "
            "baseline; give the row small random values if the token can be sampled",
            flush=True,
        )


def _known_tokens(folder: Path, tokens: Sequence[int]) -> list[str]:
    """Those of ``tokens`` that the tokenizer of ``folder`` has, with their text; all of them where there is none."""
    if not tokens:
        return []
    try:
        tokenizer = load_tokenizer(folder / "tokenizer.json")
    except TokenizerError:
        return [f"token {token}" for token in tokens]
    texts = {token: tokenizer.id_to_token(token) for token in tokens}
    return [f"token {token} ({text!r})" for token, text in texts.items() if text is not None]
