"""What every layout must reproduce: a tiny random model, a batch, and an independent fp64 oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from vcpo_megatron.config.precision import with_dtype
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.types import Batch, Group, PolicyVersion, Trajectory, Turn, VersionSpan

VOCABULARY = 30
_CONFIGS = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "llama": LlamaConfig,
    "moe": Qwen3MoeConfig,
    "shared": Qwen2MoeConfig,
    "latent": DeepseekV3Config,
    "windowed": Qwen2Config,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
_OPTIONS: dict[str, dict[str, Any]] = {
    "moe": _EXPERTS,
    "latent": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 20,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 6,
        "v_head_dim": 10,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
        },
    },
    "windowed": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "shared": {**_EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 20, "mlp_only_layers": [1]},
}


def make_model_folder(
    folder: Path, family: str = "qwen2", *, tied: bool = False, layers: int = 4, rounded: bool = False
) -> Path:
    """A random model whose norms and biases are far from their usual 1 and 0; ``rounded``: exact in bfloat16."""
    torch.manual_seed(7)
    sizes = {"num_key_value_heads": 2, "head_dim": 8, **_OPTIONS.get(family, {})}
    config = _CONFIGS[family](
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        **sizes,
    )
    model = AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.normal_(0.6, 0.3)
        else:
            parameter.data.normal_(0.0, 0.25)
        if rounded:
            parameter.data.copy_(parameter.data.bfloat16())
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    return folder


def reference(folder: Path) -> Any:
    """transformers' own model in fp64, those of its parameters too that it keeps in fp32 (DeepSeek's router); its fused
    experts know no fp64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).double().eval()
    model.config._experts_implementation = "eager"
    return model


def force_experts(model: Any, routed: np.ndarray | None) -> None:
    """Send every token of the next calls to the experts of ``routed`` [L, layers, k] (Qwen3-MoE only).

    Rows of the dtype's largest value, and all of them for None, are routed by the model. The weights of the chosen
    experts are its own.
    """
    for number, layer in enumerate(model.model.layers):
        gate = layer.mlp.gate

        def forward(hidden: torch.Tensor, gate: Any = gate, number: int = number) -> tuple[torch.Tensor, ...]:
            logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
            probabilities = torch.softmax(logits, -1)
            chosen = probabilities.topk(gate.top_k).indices
            if routed is not None:
                wanted = torch.tensor(routed[: len(chosen), number].astype(np.int64))
                chosen = torch.where(wanted == np.iinfo(routed.dtype).max, chosen, wanted)
            weights = probabilities.gather(1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        gate.forward = forward


def make_config(model: Path, ranks: int, /, **sections: dict[str, Any]) -> RunConfig:
    """A run on ``model``; ``sections`` override single keys."""
    base: dict[str, dict[str, Any]] = {
        "model": {"path": model, "vocab_multiple": 8},
        "train": {"steps": 10, "groups_per_step": 4, "group_size": 4, "max_pack_tokens": 40},
        "rollout": {"max_new_tokens": 16, "temperature": 0.9},
        "environment": {"name": "none"},
        "launch": {"learner_ranks": ranks, "timeout_s": 60},
        # it clips, and Adam's first step depends on a gradient's size as well as on its sign
        "optimizer": {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.5, "eps": 1e-3},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values}
    return with_dtype(RunConfig.model_validate(base))


def make_batch(
    model: Path,
    step: int = 0,
    *,
    spread: float = 0.4,
    shift: float = 0.0,
    temperature: float = 0.9,
    right_or_wrong: bool = False,
) -> Batch:
    """4 groups of 4 with lengths of 3 to 30 tokens, one group without variance, observation tokens in some.

    Behaviour log-probs are the model's own plus noise, so that weights are moderate; ``shift`` moves
    every log ratio of group 1 by that much (far off-policy). ``right_or_wrong``: rewards 0 and 1, one right answer in
    group 1 and two in the others.
    """
    generator = np.random.default_rng(step)
    policy = reference(model)
    groups = []
    for g in range(4):
        members = []
        for s in range(4):
            prompt, answer = int(generator.integers(2, 8)), int(generator.integers(1, 23))
            tokens = generator.integers(0, VOCABULARY, prompt + answer).astype(np.int32)
            mask = np.arange(prompt + answer) >= prompt
            if answer > 6:
                mask[prompt + 3 : prompt + 5] = False  # a tool's output
            with torch.no_grad():
                logits = policy(torch.tensor(tokens[None].astype(np.int64))).logits[0] / temperature
            own = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(tokens[1:, None].astype(np.int64)))[:, 0]
            behavior = np.zeros(prompt + answer)
            behavior[1:] = own.numpy() + generator.normal(0, spread, prompt + answer - 1) / np.sqrt(answer)
            if g == 1:
                behavior[int(mask.nonzero()[0][0])] -= shift
            behavior[~mask] = 0.0
            turn = Turn(prompt, prompt + answer, "length", _spans(prompt, prompt + answer, step))
            reward = 1.0 if g == 2 else float(generator.normal())
            if right_or_wrong and g != 2:
                reward = float(s < (1 if g == 1 else 2))
            members.append(
                Trajectory(g, s, f"p{g}", prompt, tokens, mask, behavior.astype(np.float32), (turn,), reward)
            )
        groups.append(Group(g, f"p{g}", tuple(members)))
    return Batch(step, tuple(groups))


def with_record(batch: Batch, spread: float = 0.5) -> Batch:
    """The batch, scored by the version of its step: what the learner gave each token is the behaviour's plus noise, so
    that lag and mismatch are of one size."""
    generator = np.random.default_rng(batch.step + 1)
    groups = []
    for group in batch.groups:
        behavior = np.concatenate([t.behavior_logprobs for t in group.trajectories])
        sampled = np.concatenate([t.loss_mask for t in group.trajectories])
        noise = np.concatenate([np.full(len(t.tokens), spread / np.sqrt(t.num_sampled)) for t in group.trajectories])
        recorded = np.where(sampled, behavior + generator.normal(0, noise), 0.0).astype(np.float32)
        groups.append(group.with_recorded(PolicyVersion(1, batch.step), recorded))
    return replace(batch, groups=tuple(groups))


def _spans(start: int, end: int, step: int) -> tuple[VersionSpan, ...]:
    """The first third of a longer answer was sampled by an older version than that of step ``step``."""
    old = start + (end - start) // 3
    spans = (VersionSpan(start, old, PolicyVersion(1, step - 1)), VersionSpan(old, end, PolicyVersion(1, step)))
    return tuple(span for span in spans if span.start < span.end)


def in_turns(batch: Batch) -> Batch:
    """The answers of ``make_batch`` cut into turns: before and after a tool's output, and the rest in its middle, where
    no observation stands between two turns."""
    groups = [replace(g, trajectories=tuple(map(_in_turns, g.trajectories))) for g in batch.groups]
    return replace(batch, groups=tuple(groups))


def _in_turns(trajectory: Trajectory) -> Trajectory:
    start, end = trajectory.prompt_length, len(trajectory.tokens)
    tool = [start + 3, start + 5] if end - start > 6 else []
    cuts = [start, *tool, (end + (tool or [start])[-1]) // 2, end]
    ranges = [(a, b) for a, b in zip(cuts, cuts[1:], strict=False) if a < b and [a, b] != tool]
    spans = [span for turn in trajectory.turns for span in turn.spans]
    turns = [
        Turn(
            a,
            b,
            "stop",
            tuple(VersionSpan(max(a, s.start), min(b, s.end), s.version) for s in spans if s.start < b and a < s.end),
        )
        for a, b in ranges
    ]
    return replace(trajectory, turns=tuple(turns))


@dataclass
class Oracle:
    """One step of the method, from materialised per-trajectory gradients in fp64."""

    loss: float
    log_ratios: torch.Tensor
    drift: torch.Tensor  # sum of (what was recorded - log mu) of each trajectory, 0 without a record
    logprobs: torch.Tensor  # of every sampled token
    mismatch: torch.Tensor  # |log pi - log mu| of every token that the version before the step sampled
    noise: torch.Tensor  # log pi - log mu of the same
    lengths: torch.Tensor  # sampled tokens of every trajectory
    norms: torch.Tensor
    baselines: torch.Tensor
    ess: float
    learning_rate: float
    total_norm: float
    entropy: float  # mean over sampled tokens
    gradients: dict[str, torch.Tensor]  # of what is minimised
    parameters: dict[str, torch.Tensor]  # after the step


def oracle_step(model_folder: Path, batch: Batch, config: RunConfig) -> Oracle:
    """The method in plain formulas on transformers' own model; shares no code with the learner."""
    model = reference(model_folder)
    names = {n: p for n, p in model.named_parameters()}
    rows = [(g, t) for g, group in enumerate(batch.groups) for t in group.trajectories]
    n = len(rows)
    ratios, grads, scaled, noise, entropies, lengths, drift, logprobs = [], [], [], [], [], [], [], []
    for _, t in rows:
        ids = torch.tensor(t.tokens[None].astype(np.int64))
        if t.routed_experts is not None:
            force_experts(model, t.routed_experts)
        logs = torch.log_softmax(model(ids).logits[0] / config.rollout.temperature, -1)[:-1]
        logp = logs.gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor(t.loss_mask[1:])
        entropies += (-(logs.exp() * logs).sum(-1)[mask]).tolist()
        behavior = torch.tensor(t.behavior_logprobs[1:]).double()
        base, of_tokens = behavior, torch.ones_like(logp)
        if config.algorithm.mismatch == "recorded":
            base = torch.tensor(t.recorded.logprobs[1:]).double()
            of_tokens = (base - behavior).exp().clamp(max=config.algorithm.mismatch_threshold)
        drift.append(float((base - behavior)[mask].sum()))
        logprobs += logp[mask].tolist()
        ratios.append((logp - base)[mask].sum().item())
        current = [turn.spans[-1].start for turn in t.turns][-1]  # no tokens after the last span of the last turn
        apart = logp - behavior
        noise += apart[current - 1 :][mask[current - 1 :]].tolist()
        lengths.append(float(mask.sum()))
        mean = (of_tokens * logp)[mask].sum() / mask.sum() / n
        scaled.append(mean.item())
        grads.append(torch.autograd.grad(mean, list(names.values())))
    log_ratios = torch.tensor(ratios, dtype=torch.float64)
    norms = torch.tensor([sum((g**2).sum() for g in gs).sqrt() for gs in grads])
    weights = torch.exp(log_ratios.clamp(max=np.log(config.algorithm.is_threshold)))
    total = {name: torch.zeros_like(p) for name, p in names.items()}
    baselines, loss = torch.zeros(n, dtype=torch.float64), 0.0
    for g in range(len(batch.groups)):
        index = [i for i, (group, _) in enumerate(rows) if group == g]
        rewards = torch.tensor([rows[i][1].reward for i in index], dtype=torch.float64)
        if rewards.max() == rewards.min():
            baselines[index] = rewards[0]
            continue
        u = log_ratios[index]
        p = torch.softmax(2 * u + 2 * norms[index].log(), 0)
        b = float((p * rewards).sum()) if config.algorithm.preset.baseline == "opob" else float(rewards.mean())
        baselines[index] = b
        for i, reward in zip(index, rewards.tolist(), strict=True):
            advantage = (reward - b) / rewards.std(correction=0).item()
            loss -= advantage * weights[i].item() * scaled[i]
            for name, gradient in zip(names, grads[i], strict=True):
                total[name] -= advantage * weights[i] * gradient
    shifted = torch.exp(log_ratios - log_ratios.max())
    ess = float(shifted.sum() ** 2 / (shifted**2).sum()) / n
    rate = config.optimizer.lr * min(1.0, ess / config.algorithm.base_ess_ratio) ** 0.5
    norm = float(torch.stack([(g**2).sum() for g in total.values()]).sum().sqrt())
    after = {}
    for name, parameter in names.items():
        g = total[name] * min(1.0, (config.optimizer.clip_grad or np.inf) / (norm + 1e-6))
        decay = config.optimizer.weight_decay if parameter.dim() > 1 else 0.0
        moved = parameter.detach() * (1 - rate * decay)
        after[name] = moved - rate * g / (g.abs() + config.optimizer.eps)  # Adam's first step
    apart = torch.tensor(noise, dtype=torch.float64)
    # biases that choose experts have no gradient, and training leaves them alone
    after |= {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    entropy = float(np.mean(entropies))
    return Oracle(
        loss,
        log_ratios,
        torch.tensor(drift, dtype=torch.float64),
        torch.tensor(logprobs, dtype=torch.float64),
        apart.abs(),
        apart,
        torch.tensor(lengths, dtype=torch.float64),
        norms,
        baselines,
        ess,
        rate,
        norm,
        entropy,
        _by_expert(total),
        _by_expert(after),
    )


def _by_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers stacks its experts in memory; files and the learner name each by its number."""
    found = {}
    for name, tensor in tensors.items():
        base, _, kind = name.rpartition(".experts.")
        if not base:
            found[name] = tensor
            continue
        for expert, one in enumerate(tensor):
            names, pieces = (["down_proj"], [one]) if kind == "down_proj" else (["gate_proj", "up_proj"], one.chunk(2))
            parts = dict(zip(names, pieces, strict=True))
            found |= {f"{base}.experts.{expert}.{part}.weight": value for part, value in parts.items()}
    return found
