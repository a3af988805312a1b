"""The configuration of a run: one frozen pydantic model a section, unknown keys forbidden.

Values are never rewritten by validation. What a single field may hold is said here; what several
fields must satisfy together is in ``checks.py``; reading TOML and overrides is in ``load.py``.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .methods import METHODS, Method


class Section(BaseModel):
    """Base of every section: frozen, strict about names, every number finite unless its field says otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class ModelConfig(Section):
    path: Path = Field(description="Hugging Face folder: config.json, safetensors, tokenizer")
    dtype: Literal["float32", "bfloat16"] = "float32"
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="activations computed again in the backward: none, attention's inside, or whole layers"
    )
    vocab_multiple: int = Field(128, ge=1, description="the vocabulary is padded to a multiple of this")


class ParallelConfig(Section):
    tensor: int = Field(1, ge=1)
    pipeline: int = Field(1, ge=1)
    virtual_pipeline: int = Field(1, ge=1)
    context: int = Field(1, ge=1)
    expert: int = Field(1, ge=1)
    expert_tensor: int = Field(1, ge=1)
    expert_dispatcher: Literal["alltoall", "allgather"] = Field(
        "alltoall", description="how tokens reach the ranks of their experts"
    )
    sequence_parallel: bool = False


class AlgorithmConfig(Section):
    """The method and its parts. A key whose default is None takes the value of the method's row (methods.py)."""

    method: Literal[
        "vcpo", "vcpo_ess_only", "vcpo_opob_only", "reinforce", "rloo", "grpo", "dr_grpo", "ppo_clip", "decoupled_ppo",
        "gspo", "tis_token", "tis_sequence", "mis", "icepop", "m2po", "cispo", "p3o", "mu_grpo", "asymmetric",
    ] = "vcpo"  # fmt: skip
    baseline: Literal["opob", "opob_leave_one_out", "group_mean", "leave_one_out", "zero"] | None = None
    is_level: Literal["sequence", "token", "none"] | None = None
    is_threshold: float = Field(
        8.0, gt=0, allow_inf_nan=True, description="weights are truncated at this value; inf: never"
    )
    ratio_low: float | None = Field(None, ge=0, description="lower bound of the ratio where the method has one")
    ratio_high: float | None = Field(
        None, gt=0, allow_inf_nan=True, description="upper bound of the ratio where the method has one"
    )
    second_moment: float = Field(0.04, gt=0, description="bound on the mean squared token log ratio (m2po)")
    opob_weights: Literal["raw", "truncated"] = "raw"
    opob_mode: Literal["accumulate", "deferred", "two_pass", "proxy"] = Field(
        "accumulate", description="how the baseline gets its norms: three exact ways, and proxy, which is not exact"
    )
    opob_accumulators: int | None = Field(
        None, ge=1, description="bound on gradient-sized accumulators a pipeline stage; default: what hides the latency"
    )
    opob_accumulator_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="bfloat16 halves the accumulators and is not exact; its error is a metric"
    )
    ess_scaling: bool | None = None
    ess_rule: Literal["sqrt", "linear"] = "sqrt"
    ess_weights: Literal["raw", "truncated"] = "raw"
    base_ess_ratio: float | Literal["auto"] = 1.0
    behavior_anchor: float = Field(0.0, ge=0)
    normalize_std: bool | None = None
    loss_normalization: Literal["sequence_token_mean", "token_mean", "sequence_token_sum", "constant"] | None = None
    kl_coef: float = Field(0.0, ge=0, description="weight of KL(policy || reference); with OPOB a second backward")
    kl_reference: Literal["none", "initial"] = Field("none", description="initial: a copy of model.path on the host")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy; with OPOB a second backward")
    allow_uncorrected: bool = Field(False, description="permit an asynchronous run without off-policy correction")

    @property
    def row(self) -> Method:
        """The method's row with the explicit keys of this section put in."""
        fields = (field.name for field in dataclasses.fields(Method))
        given = {name: value for name in fields if (value := getattr(self, name, None)) is not None}
        return dataclasses.replace(METHODS[self.method], **given)

    @property
    def regularized(self) -> bool:
        """True when a KL or entropy term is part of the loss."""
        return self.kl_coef > 0 or self.entropy_coef > 0


class OptimizerConfig(Section):
    lr: float = Field(1e-6, gt=0)
    min_lr: float = Field(0.0, ge=0, description="where cosine and wsd end")
    weight_decay: float = Field(0.1, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    distributed: bool = Field(False, description="shard optimizer states and main parameters over data-parallel ranks")
    overlap_grad_reduce: bool = Field(
        False, description="reduce a bucket of gradients while the baselines of the next one are taken off"
    )
    clip_grad: float = Field(1.0, ge=0, description="0 turns clipping off")
    schedule: Literal["constant", "cosine", "wsd"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    decay_steps: int | None = Field(None, ge=1, description="last steps of wsd, over which it decays linearly")


class TrainConfig(Section):
    steps: int = Field(gt=0)
    groups_per_step: int = Field(8, gt=0)
    group_size: int = Field(8, gt=0)
    eval_every: int = Field(20, ge=0, description="steps between evaluations; 0 turns them off")
    seed: int = Field(0, ge=0)
    drop_zero_variance: bool = Field(
        False, description="groups whose rewards are all equal are dropped and replaced by the next prompt"
    )
    max_pack_tokens: int = Field(4096, gt=0, description="tokens of one packed micro-batch")


class RolloutConfig(Section):
    engine: Literal["embedded", "replay"] = "embedded"
    replay: Path | None = Field(None, description="run directory whose rollouts are trained on again")
    servers: int = Field(1, ge=1)
    port: int = Field(0, ge=0, le=65535, description="port of the first server, the next ones follow; 0: any free")
    temperature: float = Field(1.0, gt=0)
    max_new_tokens: int = Field(1024, gt=0)
    context_length: int | None = Field(
        None, gt=1, description="tokens of prompt and answers together that a server holds; default: the model's"
    )
    max_running_requests: int = Field(128, gt=0, description="sequences that a server decodes together")
    pause_mode: Literal["retract", "in_place", "abort"] = "retract"
    sync: Literal["auto", "tensor", "distributed", "disk"] = Field(
        "auto", description="how weights reach the servers; auto: distributed where the learner has GPUs, else tensor"
    )
    sync_wave: int = Field(1, ge=1, description="servers that are updated, hence paused, at a time")
    verify_sync: bool = Field(False, description="compare checksums of what a server holds after every update")
    bucket_bytes: int = Field(256 << 20, ge=1, description="bytes of weights that are sent at a time")
    max_restarts: int = Field(0, ge=0)
    on_failure: Literal["drop", "resample"] = Field(
        "drop", description="a failed trajectory ends its group, or another sample takes its place"
    )
    max_prompt_failures: int = Field(3, ge=1, description="a prompt that failed so often is set aside")
    max_failure_ratio: float = Field(
        0.5, gt=0, lt=1, description="of recent outcomes; more failures end the run with the commonest"
    )
    request_timeout_s: float = Field(600.0, gt=0)
    start_timeout_s: float = Field(300.0, gt=0)
    sync_timeout_s: float = Field(300.0, gt=0)


class EnvironmentConfig(Section):
    name: str
    data: Path | None = Field(None, description="JSONL or parquet of prompts; default: the environment's generator")
    heldout: Path | None = Field(None, description="JSONL or parquet of held-out prompts")
    fields: dict[str, str] = Field(default_factory=dict, description="environment's field name -> name in the files")
    options: dict[str, Any] = Field(default_factory=dict)


class StalenessConfig(Section):
    max_staleness: int = Field(4, ge=0)
    lag: Literal["bounded", "exact"] = "bounded"
    wait_s: float = Field(
        600.0,
        gt=0,
        description="wait for a trajectory at the bound before it is dropped; an evaluation's sample has as long",
    )
    adaptive: bool = Field(False, description="admit fewer versions ahead while the ESS ratio is below adaptive_ess")
    adaptive_ess: float = Field(0.5, gt=0, lt=1, description="ESS ratio that adaptive staleness keeps")


class CheckpointConfig(Section):
    every: int = Field(50, ge=0, description="steps between checkpoints; 0: only at the end and on a signal")
    keep_last: int = Field(3, ge=1, description="newest complete checkpoints that are kept")
    keep_rollouts: int | None = Field(
        None, ge=0, description="steps whose rollouts keep their tokens in rollouts.sqlite; default: all"
    )
    resume_partial: bool = Field(
        True, description="groups in flight go on with what they have when a run is resumed, else they are sampled anew"
    )
    keep_best: bool = Field(True, description="keep the checkpoint of the highest held-out accuracy, too")


class LaunchConfig(Section):
    learner_ranks: int = Field(1, ge=1)
    master_port: int = Field(0, ge=0, le=65535, description="rendezvous of the learner ranks; 0: any free")
    control_port: int = Field(0, ge=0, le=65535, description="orchestrator's control socket; 0: any free")
    timeout_s: float = Field(300.0, gt=0, description="deadline of every wait between processes")


class ObservabilityConfig(Section):
    tensorboard: bool = True
    watchdog_s: float = Field(120.0, gt=0, description="say who waits for whom when nothing moved for this long")


class RunConfig(Section):
    """A whole run. ``parallel.data`` is derived: learner_ranks / (tensor * pipeline * context)."""

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig
    staleness: StalenessConfig = StalenessConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    launch: LaunchConfig = LaunchConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel replicas of the learner."""
        return self.launch.learner_ranks // (self.parallel.tensor * self.parallel.pipeline * self.parallel.context)

    @property
    def spread(self) -> int:
        """Data-parallel replicas that share experts, so that a group's trajectories are spread over them."""
        if self.parallel.expert == 1:
            return 1
        dense = self.parallel.tensor * self.parallel.context
        return math.lcm(dense, self.parallel.expert * self.parallel.expert_tensor) // dense

    @property
    def trajectories_per_step(self) -> int:
        return self.train.groups_per_step * self.train.group_size
