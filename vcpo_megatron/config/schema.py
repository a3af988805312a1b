"""The configuration of a run: one frozen pydantic model a section, unknown keys forbidden.

Values are never rewritten by validation. What a single field may hold is said here; what several
fields must satisfy together is in ``checks/``; reading TOML and overrides is in ``load.py``.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from .methods import METHODS, MethodPreset

if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[tuple(METHODS)]  # a new preset is a new value, with nothing to repeat here


#: Seconds of the longest deadline, 11 days: timers of Python, ZeroMQ and gloo overflow somewhere beyond it.
LONGEST_S = 1e6
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S)]


class Section(BaseModel):
    """Base of every section: frozen, strict about names, every number finite unless its field says otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @field_validator("*")
    @classmethod
    def _representable(cls, value: Any) -> Any:
        """SQLite, torch and the schedulers keep integers in 64 bits, and models compute in float32."""
        if isinstance(value, int) and abs(value) >= 2**63:
            raise PydanticCustomError("size", "less than 2^63 in size")
        if isinstance(value, float) and math.isfinite(value) and value and not 1e-38 < abs(value) < 1e38:
            raise PydanticCustomError("size", "0 or between 1e-38 and 1e38 in size, as float32 is")
        return value


class ModelConfig(Section):
    """The model that is trained, and how it is held in memory."""

    path: Path = Field(
        description="Hugging Face folder: config.json, safetensors, tokenizer; it may have moved at a resume"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="of parameters and activations in learner and servers; auto: that of config.json, settled at the "
        "start of the run. Gradients and the optimizer's own parameters are float32",
    )
    fp32_lm_head: bool = Field(
        True,
        description="bfloat16: logits stay in float32, in the learner as in the servers (SGLang's "
        "--enable-fp32-lm-head)",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="activations computed again in the backward: none, attention's inside, or whole layers"
    )
    vocab_multiple: int = Field(128, ge=1, description="the vocabulary is padded to a multiple of this")
    transformer_impl: Literal["local", "transformer_engine"] = Field(
        "local", description="whose linear layers: Megatron's; or TransformerEngine's, one trajectory a micro-batch"
    )
    core_attention: Literal["auto", "torch", "transformer_engine"] = Field(
        "auto",
        description="kernels of attention over packs: TransformerEngine's, torch's, or the fastest that serves a layer",
    )

    @property
    def upcasts_logits(self) -> bool:
        """True where logits would be rounded to 16 bits, and are not."""
        return self.fp32_lm_head and self.dtype != "float32"


class ParallelConfig(Section):
    """How the learner splits the model and the batch over its ranks. The data-parallel size is not a key: it is
    ``launch.learner_ranks / (tensor x pipeline x context)``."""

    tensor: int = Field(
        1, ge=1, description="ranks that share every layer; divides heads, key-value heads and the units of the MLP"
    )
    pipeline: int = Field(1, ge=1, description="stages, each with a part of the layers; divides their number")
    virtual_pipeline: int = Field(
        1, ge=1, description="pieces of a stage, interleaved; pipeline x virtual_pipeline divides the layers"
    )
    context: int = Field(1, ge=1, description="ranks that share the tokens of every trajectory")
    expert: int = Field(1, ge=1, description="ranks over which the experts are spread; divides their number")
    expert_tensor: int = Field(1, ge=1, description="ranks that share every expert")
    expert_dispatcher: Literal["alltoall", "allgather"] = Field(
        "alltoall", description="how tokens reach the ranks of their experts"
    )
    sequence_parallel: bool = Field(
        False, description="norms and dropout on a part of the tokens; tensor ranks share them. Experts need it"
    )


class AlgorithmConfig(Section):
    """The method and its parts; method.md explains them. A key without a default takes the value of the method's preset
    in ``config/methods.py``."""

    method: MethodName = Field("vcpo", description="preset that gives the other keys their defaults")
    baseline: Literal["opob", "opob_leave_one_out", "group_mean", "leave_one_out", "zero"] | None = Field(
        None, description="what is subtracted from a reward: opob is VCPO's variance-optimal baseline"
    )
    is_level: Literal["sequence", "turn", "token", "none"] | None = Field(
        None, description="importance weight of a whole trajectory, of every turn, of every token, or none"
    )
    is_threshold: float = Field(
        8.0, gt=0, allow_inf_nan=True, description="weights are truncated at this value; inf: never"
    )
    is_threshold_length: int | None = Field(
        None,
        ge=1,
        description="sampled tokens L_ref from which on the truncation grows with the length L of a trajectory or a "
        "turn: log(is_threshold) times sqrt(L / L_ref); default: it does not grow",
    )
    mismatch: Literal["none", "recorded"] = Field(
        "none",
        description="recorded: the learner scores every complete group itself; an answer's weight is that of the lag "
        "since then, and the difference to the servers is corrected token by token (method.md)",
    )
    mismatch_threshold: float = Field(
        2.0,
        gt=0,
        allow_inf_nan=True,
        description="mismatch = recorded: a token's ratio of learner to server is truncated at this value; inf: never",
    )
    ratio_low: float | None = Field(None, ge=0, description="lower bound of the ratio where the method has one")
    ratio_high: float | None = Field(
        None, gt=0, allow_inf_nan=True, description="upper bound of the ratio where the method has one"
    )
    second_moment: float = Field(0.04, gt=0, description="bound on the mean squared token log ratio (m2po, m2po_clip)")
    opob_weights: Literal["raw", "truncated"] = Field("raw", description="weights that enter the optimal baseline")
    opob_mode: Literal["accumulate", "deferred", "two_pass", "proxy"] = Field(
        "accumulate", description="how the baseline gets its norms: three exact modes, and proxy, which is not exact"
    )
    opob_accumulators: int | None = Field(
        None, ge=1, description="bound on gradient-sized accumulators a pipeline stage; default: what hides the latency"
    )
    opob_accumulator_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="bfloat16 halves the accumulators and is not exact; its error is a metric"
    )
    record_norms: bool = Field(
        False,
        description="record every trajectory's gradient norm beside a method whose baseline does not need it; the step "
        "stays the same, and takes another forward and backward",
    )
    ess_scaling: bool | None = Field(
        None, description="scale the learning rate by min(1, ESS ratio / base_ess_ratio)^p"
    )
    ess_rule: Literal["sqrt", "linear"] = Field("sqrt", description="p = 1/2, for Adam; or p = 1, for plain SGD")
    ess_weights: Literal["raw", "truncated"] = Field("raw", description="weights that enter the effective sample size")
    base_ess_ratio: float | Literal["auto"] = Field(
        1.0,
        description="ESS ratio of a full step, above 0 and at most 1; auto: measured by 5 on-policy steps, then "
        "followed by the noise of tokens of the current version and the lengths of the batch",
    )
    step_bound: Literal["off", "relative_kl"] | None = Field(
        None, description="bound of the step size beside ESS; relative_kl: by KL to the behaviour over its entropy"
    )
    step_bound_target: float = Field(
        0.3, gt=0, le=1e3, description="KL that is allowed over the lag, as a share of the behaviour's entropy"
    )
    spike_clip: float | None = Field(
        None,
        ge=0,
        le=1e6,
        description="largest norm of the gradient, as a multiple of recent norms; 0 turns it off, else at least 1",
    )
    behavior_anchor: float = Field(
        0.0, ge=0, le=1e6, description="maximum likelihood on the behaviour's samples while ESS is low: its weight"
    )
    normalize_std: bool | None = Field(None, description="divide advantages by the group's standard deviation")
    loss_normalization: Literal["sequence_token_mean", "token_mean", "sequence_token_sum", "constant"] | None = Field(
        None,
        description="what a token's gradient is divided by, over the global batch; "
        "constant: trajectories x rollout.max_new_tokens",
    )
    kl_coef: float = Field(
        0.0, ge=0, le=1e6, description="weight of KL(policy || reference); with OPOB a second backward"
    )
    kl_reference: Literal["none", "initial"] = Field("none", description="initial: a copy of model.path on the host")
    entropy_coef: float = Field(0.0, ge=0, le=1e6, description="weight of the entropy; with OPOB a second backward")
    global_aux_loss: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="weight of the experts' load-balancing loss over the whole batch; a forward counts first",
    )
    allow_uncorrected: bool = Field(False, description="permit an asynchronous run without off-policy correction")

    @property
    def preset(self) -> MethodPreset:
        """The method's preset with the keys that this section gives explicitly."""
        fields = (field.name for field in dataclasses.fields(MethodPreset))
        given = {name: value for name in fields if (value := getattr(self, name, None)) is not None}
        return dataclasses.replace(METHODS[self.method], **given)

    @property
    def regularized(self) -> bool:
        """True when the loss has a term that no reward scales: KL, entropy, the balance of experts."""
        return self.kl_coef > 0 or self.entropy_coef > 0 or self.global_aux_loss > 0


class OptimizerConfig(Section):
    """Adam with decoupled weight decay, and the schedule of its learning rate."""

    lr: float = Field(1e-6, gt=0, description="learning rate before schedule and ESS")
    min_lr: float = Field(0.0, ge=0, description="where cosine and wsd end")
    weight_decay: float = Field(0.1, ge=0, description="decoupled; scaled with the learning rate in effect")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Adam's decay rates, each at least 0 and below 1")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon")
    distributed: bool = Field(False, description="shard optimizer states and main parameters over data-parallel ranks")
    overlap_grad_reduce: bool = Field(
        False, description="reduce a bucket of gradients while the baselines of the next one are taken off"
    )
    clip_grad: float = Field(1.0, ge=0, description="largest norm of the whole gradient; 0 turns clipping off")
    schedule: Literal["constant", "cosine", "wsd"] = Field(
        "constant", description="after the warm-up; wsd is constant, then linear over decay_steps"
    )
    warmup_steps: int = Field(0, ge=0, description="first steps, over which the learning rate rises linearly")
    decay_steps: int | None = Field(None, ge=1, description="last steps of wsd, over which it decays linearly")
    schedule_steps: int | None = Field(
        None,
        ge=1,
        description="length of cosine and wsd in steps, after which the rate is min_lr; default: train.steps at the "
        "start of the run, which a resume keeps",
    )


class TrainConfig(Section):
    """The size of the run and of its batches."""

    steps: int = Field(gt=0, description="optimizer steps of the whole run, those before a resume included")
    groups_per_step: int = Field(8, gt=0, description="prompts of a batch")
    updates_per_batch: int = Field(
        1,
        ge=1,
        description="optimizer steps that a batch is split into, each a version; the last one's weights are sent",
    )
    group_size: int = Field(8, gt=0, description="answers to every prompt; at least 2")
    eval_every: int = Field(20, ge=0, description="steps between evaluations; 0 turns them off")
    seed: int = Field(0, ge=0, description="of prompts and their order, and of sampling in exact lag")
    drop_zero_variance: bool = Field(
        False, description="groups whose rewards are equal, to rounding, are dropped and replaced by the next prompt"
    )
    max_pack_tokens: int = Field(4096, gt=0, description="tokens of one packed micro-batch")
    start_from: Path | None = Field(
        None,
        description="run directory (its newest checkpoint), or RUN_DIR/checkpoints/step_N, whose weights a new run "
        "starts from, in any layout; default: those of model.path, which stays KL's reference in any case",
    )
    start_optimizer: bool = Field(
        False, description="take the optimizer's state from train.start_from, too; schedule and ESS begin anew"
    )

    @property
    def groups_per_update(self) -> int:
        """Prompts of an optimizer step."""
        return self.groups_per_step // self.updates_per_batch

    def begins_batch(self, version: int) -> bool:
        """Whether the step from ``version`` on is the first one of a batch: the servers are given that version."""
        return version % self.updates_per_batch == 0


class RolloutConfig(Section):
    """The servers that sample, how they sample, and what happens when they fail."""

    engine: Literal["embedded", "sglang", "replay"] = Field(
        "embedded", description="the embedded engine, SGLang, or the recorded rollouts of another run"
    )
    replay: Path | None = Field(None, description="run directory whose rollouts are trained on again")
    servers: int = Field(1, ge=1, description="servers to start; those of rollout.addresses are joined instead")
    python: Path | None = Field(None, description="interpreter of the environment that SGLang is installed in")
    addresses: tuple[str, ...] = Field((), description="servers that run already, as http://HOST:PORT: joined")
    router: str | None = Field(
        None, description="sglang-router, as http://HOST:PORT, that requests go through to the servers of addresses"
    )
    tensor_parallel: int = Field(1, ge=1, description="GPUs of one server")
    args: tuple[str, ...] = Field((), description="further arguments of every SGLang server")
    port: int = Field(0, ge=0, le=65535, description="port of the first server, the next ones follow; 0: any free")
    temperature: float = Field(
        1.0, ge=1e-3, le=1e3, description="of sampling; the trained policy is the one at this temperature"
    )
    max_new_tokens: int = Field(1024, gt=0, description="sampled tokens of an episode, all of its answers together")
    context_length: int | None = Field(
        None, gt=1, description="tokens of prompt and answers together that a server holds; default: the model's"
    )
    max_running_requests: int = Field(128, gt=0, description="sequences that a server decodes together")
    pause_mode: Literal["retract", "in_place", "abort"] = Field(
        "retract",
        description="requests in flight at a weight update: their cache is computed anew by the new weights, kept, or "
        "they are aborted and sent again with the tokens they have",
    )
    routing_replay: bool = Field(
        False, description="the learner's routers send tokens to the experts that the server had chosen"
    )
    sync: Literal["auto", "tensor", "distributed", "disk"] = Field(
        "auto",
        description="how weights reach the servers: over HTTP, by one broadcast, or by a disk that they share; auto: "
        "distributed for SGLang where the learner has GPUs or a server has several ranks, else tensor",
    )
    sync_wave: int = Field(1, ge=1, description="servers that are updated, hence paused, at a time")
    verify_sync: bool = Field(False, description="compare checksums of what a server holds after every update")
    bucket_bytes: int = Field(256 << 20, ge=1, description="bytes of weights that are sent at a time")
    max_restarts: int = Field(3, ge=0, description="restarts of a server that died, before its death ends the run")
    on_failure: Literal["drop", "resample"] = Field(
        "drop", description="a failed trajectory ends its group, or another sample takes its place"
    )
    max_prompt_failures: int = Field(3, ge=1, description="a prompt that failed so often is set aside")
    max_failure_ratio: float = Field(
        0.5, gt=0, lt=1, description="of recent outcomes; more failures end the run with the commonest"
    )
    request_timeout_s: Seconds = Field(600.0, description="deadline of one answer of a server")
    start_timeout_s: Seconds = Field(300.0, description="deadline of a server's start")
    health_interval_s: Seconds = Field(
        10.0, description="a server that answered nothing for so long is asked whether it is well"
    )
    health_timeout_s: Seconds = Field(
        60.0, description="a server that misses this deadline of such a question twice hangs: it is replaced"
    )
    sync_timeout_s: Seconds = Field(300.0, description="deadline of a weight update of one server")

    @property
    def started(self) -> int:
        """Servers that the run starts itself."""
        return 0 if self.engine == "replay" or self.addresses else self.servers

    @property
    def fleet_size(self) -> int:
        """Servers that the run works with, started or joined."""
        return len(self.addresses) or self.started


class EnvironmentConfig(Section):
    """The task: prompts, tools and rewards. environments.md describes the built-in ones and how to write another."""

    name: str = Field(description="a built-in environment, or your own as package.module:factory")
    data: Path | None = Field(None, description="JSONL or parquet of prompts; default: the environment's generator")
    heldout: Path | None = Field(None, description="JSONL or parquet of held-out prompts")
    fields: dict[str, str] = Field(
        default_factory=dict, description="environment's field name -> name in the files; dots lead into nested records"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="options of this environment")
    date: datetime.date | None = Field(
        None, description="the day that chat templates print as today, YYYY-MM-DD; default: that of the run's start"
    )
    modules: Path | None = Field(
        None, description="folder that is searched for your own modules; default: the folder of the configuration file"
    )
    workers: int = Field(2, ge=1, le=256, description="processes that the environment's code runs in")
    episode_timeout_s: float | None = Field(
        None,
        ge=0.1,
        le=LONGEST_S,
        description="deadline of an episode's own code, its calls together, servers not counted; "
        "default: half of staleness.wait_s",
    )
    worker_memory_gb: float | None = Field(
        None, gt=0, le=1e6, description="GiB that a worker may allocate before it gets MemoryError; default: any"
    )


class StalenessConfig(Section):
    """How old rollouts may be; staleness.md says how the bound is kept."""

    max_staleness: int = Field(
        4, ge=0, description="most versions between the oldest token of an answer and its step; 0: on-policy"
    )
    lag: Literal["bounded", "exact"] = Field(
        "bounded", description="at most max_staleness; or always that, batch after batch, repeatable to the last bit"
    )
    wait_s: Seconds = Field(
        600.0,
        description="wait for a trajectory at the bound before it is dropped; an evaluation's sample has as long",
    )
    adaptive: bool = Field(False, description="admit fewer versions ahead while the ESS ratio is too low")
    adaptive_ess: float = Field(0.5, gt=0, lt=1, description="share of the on-policy ESS ratio to keep (adaptive)")


class CheckpointConfig(Section):
    """What is kept on disk, and how a run is taken up again."""

    every: int = Field(50, ge=0, description="steps between checkpoints; 0: only at the end and on a signal")
    keep_last: int = Field(3, ge=1, description="newest complete checkpoints that are kept")
    keep_rollouts: int | None = Field(
        None, ge=0, description="steps whose rollouts keep their tokens in rollouts.sqlite; default: all"
    )
    resume_partial: bool = Field(
        True, description="groups in flight go on with what they have when a run is resumed, else they are sampled anew"
    )
    keep_best: bool = Field(True, description="keep the checkpoint of the highest held-out accuracy, too")
    export_hf_every: int = Field(
        0, ge=0, description="steps between Hugging Face folders in exports/, kept as checkpoints are; 0: none"
    )


class LaunchConfig(Section):
    """Processes, their ports and their patience."""

    learner_ranks: int = Field(1, ge=1, description="learner processes; a multiple of tensor x pipeline x context")
    address: str | None = Field(
        None,
        description="host name or IP at which servers on other hosts reach the learner; default: this host alone",
    )
    master_port: int = Field(0, ge=0, le=65535, description="rendezvous of the learner ranks; 0: any free")
    control_port: int = Field(0, ge=0, le=65535, description="orchestrator's control socket; 0: any free")
    timeout_s: Seconds = Field(300.0, description="deadline of every wait between processes")
    grace_s: Seconds = Field(
        30.0,
        description="after a signal or --max-hours: half of it is the step's in progress, which is "
        "aborted when it needs longer, the rest the checkpoint's",
    )


class ObservabilityConfig(Section):
    """What a run reports about itself."""

    tensorboard: bool = Field(True, description="write TensorBoard files beside metrics.jsonl")
    wandb_project: str | None = Field(
        None,
        min_length=1,
        description="send metrics to this project of Weights & Biases, with the configuration; the key is taken from "
        "the environment (WANDB_API_KEY); default: none",
    )
    wandb_mode: Literal["online", "offline"] = Field(
        "online", description="offline: into RUN_DIR/wandb, for `wandb sync` to send later"
    )
    watchdog_s: Seconds = Field(120.0, description="say who waits for whom when nothing moved for this long")
    mismatch_warning: float = Field(
        0.02, gt=0, allow_inf_nan=True, description="mismatch/mean above which likely causes are named; inf: never"
    )


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
    def expert_data_size(self) -> int:
        """Data-parallel replicas that share experts, so that a prompt group's trajectories are divided among them."""
        if self.parallel.expert == 1:
            return 1
        dense = self.parallel.tensor * self.parallel.context
        return math.lcm(dense, self.parallel.expert * self.parallel.expert_tensor) // dense
