"""Executed on every rank of a test world: one step in each of several layouts, one after another."""

from __future__ import annotations

import gc
from typing import Any

import torch

from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.learner.megatron import platform
from vcpo_megatron.types import Batch, PolicyVersion

from .world import leave_layout


def one_step_each(cases: list[tuple[RunConfig, list[Batch]]]) -> list[dict[str, Any]]:
    """For each case: results of the steps, gradients of the last one and parameters after it (HF names); where the run
    records log-probs, those of the first batch before it."""
    return steps_from_other_weights([(config, None, batches) for config, batches in cases])


def steps_from_other_weights(cases: list[tuple[RunConfig, Any, list[Batch]]]) -> list[dict[str, Any]]:
    """The same, where a step may start from the weights of another folder than ``model.path`` (None: that one)."""
    platform.prepare()
    from vcpo_megatron.learner.megatron.parallel import initialize
    from vcpo_megatron.learner.megatron.training import build_trainable
    from vcpo_megatron.learner.step.vcpo_step import VcpoStep
    from vcpo_megatron.learner.weights.gather import WeightGatherer

    outcomes = []
    for config, other, batches in cases:
        parallel = initialize(config)
        trainable = build_trainable(config, parallel, load=True)
        step, gatherer = VcpoStep(config, parallel, trainable), WeightGatherer(trainable, parallel)
        if other is not None:
            moved = config.model_copy(update={"model": config.model.model_copy(update={"path": other})})
            source = build_trainable(moved, parallel, load=True)
            for chunk, other_chunk in zip(trainable.chunks, source.chunks, strict=True):
                for mine, theirs in zip(chunk.parameters(), other_chunk.parameters(), strict=True):
                    mine.data.copy_(theirs.data)
        results, gradients = [], {}
        optimizer_step = trainable.optimizer.step

        def watched(optimizer_step=optimizer_step, gatherer=gatherer, gradients=gradients, trainable=trainable):  # noqa: ANN001, ANN202
            _complete_gradients(trainable)
            gradients.update({k: v.clone() for k, v in gatherer.gather(lambda parameter: parameter.main_grad)})
            return optimizer_step()

        trainable.optimizer.step = watched
        recorded = step.record(batches[0]) if config.algorithm.mismatch == "recorded" else None
        for batch in batches:
            results.append(step.run(batch, PolicyVersion(1, batch.step + 1)))
        parameters = {k: v.clone() for k, v in gatherer.gather()}
        accumulators = torch.tensor([step.accumulators], dtype=torch.float64)
        outcomes.append(
            {
                "results": results,
                "gradients": gradients,
                "parameters": parameters,
                "accumulators": accumulators,
                "recorded": recorded,
            }
        )
        leave_layout()
    return outcomes


def export_and_save(cases: list[tuple[RunConfig, str]], batch: Batch) -> list[list[str]]:
    """For each (run, directory): a step, an export of what it made, and a checkpoint of the same; names of exports."""
    platform.prepare()
    from pathlib import Path

    from vcpo_megatron.learner.checkpoint.checkpoints import Checkpoints
    from vcpo_megatron.learner.checkpoint.exports import Exports
    from vcpo_megatron.learner.megatron.parallel import initialize
    from vcpo_megatron.learner.megatron.training import build_trainable
    from vcpo_megatron.learner.step.vcpo_step import VcpoStep
    from vcpo_megatron.learner.weights.gather import WeightGatherer
    from vcpo_megatron.run.directory import RunDirectory

    found = []
    for config, run_dir in cases:
        parallel = initialize(config)
        trainable = build_trainable(config, parallel, load=True)
        step, directory = VcpoStep(config, parallel, trainable), RunDirectory(Path(run_dir))
        exports = Exports(config, directory, parallel, trainable, WeightGatherer(trainable, parallel))
        checkpoints = Checkpoints(config, directory, parallel, trainable)
        step.run(batch, PolicyVersion(1, 1))
        if exports.is_due(1):
            exports.write(1)
        checkpoints.start(1, PolicyVersion(1, 1), step.ess_state, {})
        checkpoints.finished(wait=True)
        found.append(sorted(path.name for path in directory.exports.glob("*")))
        leave_layout()
    return found


def _complete_gradients(trainable: Any) -> None:
    """With a distributed optimizer a rank's reduced gradient is a part of the buffer: fetch the others'."""
    for wrapped in trainable.wrapped:
        if not wrapped.ddp_config.use_distributed_optimizer:
            continue
        for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                parts = bucket.grad_data.chunk(group.size())
                whole = [torch.empty_like(part) for part in parts]
                torch.distributed.all_gather(whole, parts[group.rank()].contiguous(), group=group)
                bucket.grad_data.copy_(torch.cat(whole))


def save_and_load(
    saving: RunConfig, loading: list[RunConfig], batches: list[Batch], run_dir: str
) -> list[dict[str, Any]]:
    """Step, save, step on; then in each of ``loading``: load, and make that second step again."""
    platform.prepare()
    steps = [(saving, False), *((config, True) for config in loading)]
    return [_continue(config, batches, run_dir, resume=resume) for config, resume in steps]


def load_and_continue(loading: list[RunConfig], batches: list[Batch], run_dir: str) -> list[dict[str, Any]]:
    """Load what ``save_and_load`` saved, in each layout, and step on the second batch."""
    platform.prepare()
    return [_continue(config, batches, run_dir, resume=True) for config in loading]


def refusals(pairs: list[tuple[RunConfig, RunConfig]], batches: list[Batch], run_dir: str) -> list[str]:
    """What each second layout is told of the checkpoint of the first; "" where it loads it."""
    platform.prepare()
    from vcpo_megatron.learner.checkpoint.errors import CheckpointError

    messages = []
    for number, (saving, loading) in enumerate(pairs):
        _continue(saving, batches, f"{run_dir}/{number}", resume=False)
        try:
            _continue(loading, batches, f"{run_dir}/{number}", resume=True)
            messages.append("")
        except CheckpointError as error:
            messages.append(str(error))
            leave_layout()
    return messages


def _continue(config: RunConfig, batches: list[Batch], run_dir: str, *, resume: bool) -> dict[str, Any]:
    from pathlib import Path

    from vcpo_megatron.learner.checkpoint.checkpoints import Checkpoints
    from vcpo_megatron.learner.megatron.parallel import initialize
    from vcpo_megatron.learner.megatron.training import build_trainable
    from vcpo_megatron.learner.step.vcpo_step import VcpoStep
    from vcpo_megatron.learner.weights.gather import WeightGatherer
    from vcpo_megatron.run.directory import RunDirectory

    parallel = initialize(config)
    trainable = build_trainable(config, parallel, load=not resume)
    step = VcpoStep(config, parallel, trainable)
    checkpoints = Checkpoints(config, RunDirectory(Path(run_dir)), parallel, trainable)
    if resume:
        step.ess_state = checkpoints.load(1)
    else:
        step.run(batches[0], PolicyVersion(1, 1))
        torch.rand(7)  # the generator is not where it began
        checkpoints.start(1, PolicyVersion(1, 1), step.ess_state, {"cursor": 5})
    random_numbers = torch.rand(3)
    result = step.run(batches[1], PolicyVersion(2 if resume else 1, 2))
    if not resume:  # the step above was taken while the checkpoint was being written
        assert checkpoints.busy and checkpoints.finished(wait=True)[0] == 1
    parameters = {k: v.clone() for k, v in WeightGatherer(trainable, parallel).gather()}
    steps = trainable.schedule.num_steps
    leave_layout()
    return {"result": result, "parameters": parameters, "steps": steps, "random": random_numbers}


def bytes_held(cases: list[tuple[RunConfig, list[Batch]]]) -> list[tuple[int, int]]:
    """For each case: this rank's parameters, and the bytes of the tensors it has between two steps."""
    platform.prepare()
    from vcpo_megatron.algorithm import noise
    from vcpo_megatron.learner.megatron.parallel import initialize
    from vcpo_megatron.learner.megatron.training import build_trainable
    from vcpo_megatron.learner.step.vcpo_step import VcpoStep

    found = []
    for config, batches in cases:
        for batch in batches:
            # kept for the process, not for a model
            noise._normal_numbers(sum(len(group.trajectories) for group in batch.groups))
        before = _storages()  # held, so that none of their addresses is used again
        parallel = initialize(config)
        trainable = build_trainable(config, parallel, load=True)
        step = VcpoStep(config, parallel, trainable)
        for batch in batches:
            step.run(batch, PolicyVersion(1, batch.step + 1))
        held = sum(storage.nbytes() for address, storage in _storages().items() if address not in before)
        found.append((sum(p.numel() for chunk in trainable.chunks for p in chunk.parameters()), held))
        leave_layout()
    return found


def _storages() -> dict[int, Any]:
    """Of all tensors that are alive, by address."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return {storage.data_ptr(): storage for storage in (each.untyped_storage() for each in tensors)}


def with_kernels(cases: list[tuple[RunConfig, list[Batch]]]) -> tuple[list[dict[str, Any]], list[int], list[int]]:
    """``one_step_each`` where what stands for fused kernels is believed to run; Adam's calls, products of each case."""
    platform.runs_kernels = lambda: True
    platform.prepare()
    import fused_weight_gradient_mlp_cuda
    from apex.optimizers import fused_adam

    outcomes, products = [], []
    for case in cases:
        before = len(fused_weight_gradient_mlp_cuda.PRODUCTS)
        outcomes += one_step_each([case])
        products.append(len(fused_weight_gradient_mlp_cuda.PRODUCTS) - before)
    return outcomes, fused_adam.STEPS, products


def optimizer_in_use(cases: list[tuple[RunConfig, list[Batch]]]) -> tuple[list[dict[str, Any]], str, set[str]]:
    """``one_step_each``, the module of Megatron's Adam, and what was imported of apex and torch's compiler."""
    import sys

    outcomes = one_step_each(cases)
    from megatron.core.optimizer import Adam

    unwanted = ("apex", "torch._inductor.compile_fx")
    return outcomes, Adam.__module__, {name for name in unwanted if sys.modules.get(name)}


class ForeignNorm(torch.nn.Module):
    """RMSNorm's arithmetic in a class that the learner does not know."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def with_foreign_norms(cases: list[tuple[RunConfig, list[Batch]]], refused: list[RunConfig]) -> dict[str, Any]:
    """``one_step_each`` of models with norms of an unknown class, what rank 0 said, and the layouts' refusals."""
    import contextlib
    import io

    platform.prepare()
    from vcpo_megatron.learner.gradients.attach import UnsupportedLayer
    from vcpo_megatron.learner.megatron import layer_specs
    from vcpo_megatron.learner.megatron.parallel import initialize
    from vcpo_megatron.learner.megatron.training import build_trainable
    from vcpo_megatron.learner.step.vcpo_step import VcpoStep

    said, messages = io.StringIO(), []
    known, layer_specs.RMSNorm = layer_specs.RMSNorm, ForeignNorm
    try:
        with contextlib.redirect_stdout(said):
            outcomes = one_step_each(cases)
        for config in refused:
            parallel = initialize(config)
            trainable = build_trainable(config, parallel, load=True)
            try:
                VcpoStep(config, parallel, trainable)
                messages.append("")
            except UnsupportedLayer as error:
                messages.append(str(error))
            leave_layout()
    finally:
        layer_specs.RMSNorm = known  # the world takes further jobs
    return {"outcomes": outcomes, "said": said.getvalue(), "refusals": messages}


def with_engine_layers(cases: list[tuple[RunConfig, list[Batch]]]) -> dict[str, Any]:
    """``one_step_each`` with what stands for TransformerEngine's layers; what rank 0 said, and what the layers saw."""
    import contextlib
    import io

    platform.prepare()
    from megatron.core.models.common.embeddings import rope_utils

    from vcpo_megatron.learner.megatron import layer_specs
    from vcpo_megatron.learner.megatron.attention_kernels import AttentionDevice

    from . import engine_stand_ins as stand_ins

    layer_specs.attention_device = lambda: AttentionDevice(transformer_engine=True)
    rope_utils.fused_apply_rotary_pos_emb = stand_ins.turn
    rope_utils.fused_apply_rotary_pos_emb_thd = stand_ins.turn_packed
    layer_specs.engine_layers = lambda: layer_specs.EngineLayers(
        stand_ins.ColumnLinear, stand_ins.RowLinear, stand_ins.Attention
    )
    outcomes, said, seen = [], [], []
    for case in cases:
        text = io.StringIO()
        stand_ins.LINEARS.clear()
        stand_ins.FORMATS.clear()
        stand_ins.TURNS.clear()
        with contextlib.redirect_stdout(text):
            outcomes += one_step_each([case])
        said.append(text.getvalue())
        seen.append((set(stand_ins.LINEARS), set(stand_ins.FORMATS), bool(stand_ins.TURNS)))
    return {"outcomes": outcomes, "said": said, "seen": seen}


def with_flash_attention(cases: list[tuple[RunConfig, list[Batch]]]) -> dict[str, list[Any]]:
    """``one_step_each`` with every layer on flash attention, for whose kernel a reference stands; what it was told.

    calls, plans  of attention; made of packs, each of which copies boundaries to the device
    windows       of the calls
    chunked       some queries had more keys than queries
    stray         calls whose boundaries no plan holds
    """
    platform.prepare()
    from torch.nn.attention import varlen as real

    from vcpo_megatron.learner.batch import packing
    from vcpo_megatron.learner.megatron import layer_specs
    from vcpo_megatron.learner.megatron.attention_kernels import AttentionChoice

    from . import varlen as stand_in

    real.varlen_attn = stand_in.varlen_attn
    layer_specs.choose_attention = lambda wanted, layer, device: AttentionChoice("flash")
    plans: list[packing.AttentionPlan] = []
    of = packing.AttentionPlan.of.__func__

    def counted(cls: type, layout: Any, device: Any) -> Any:
        plans.append(of(cls, layout, device))
        return plans[-1]

    packing.AttentionPlan.of = classmethod(counted)
    outcomes, seen = [], []
    for case in cases:
        stand_in.CALLS.clear()
        plans.clear()
        outcomes += one_step_each([case])
        boundaries = {plan.queries.data_ptr() for plan in plans}
        seen.append(
            {
                "calls": len(stand_in.CALLS),
                "plans": len(plans),
                "windows": {call.window for call in stand_in.CALLS},
                "chunked": any(n < m for call in stand_in.CALLS for n, m in call.lengths),
                "stray": sum(call.boundaries not in boundaries for call in stand_in.CALLS),
            }
        )
    return {"outcomes": outcomes, "seen": seen}


def said_when_built(configs: list[RunConfig]) -> list[str]:
    """What rank 0 prints while the step of each configuration is built."""
    import contextlib
    import io

    platform.prepare()
    from vcpo_megatron.learner.megatron.parallel import initialize
    from vcpo_megatron.learner.megatron.training import build_trainable
    from vcpo_megatron.learner.step.vcpo_step import VcpoStep

    said = []
    for config in configs:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            parallel = initialize(config)
            VcpoStep(config, parallel, build_trainable(config, parallel, load=True))
        said.append(text.getvalue())
        leave_layout()
    return said


def refusal_to_build(config: RunConfig) -> str:
    """What the model says that cannot be built here."""
    platform.prepare()
    from vcpo_megatron.learner.megatron.parallel import initialize
    from vcpo_megatron.learner.megatron.training import build_trainable

    try:
        build_trainable(config, initialize(config), load=True)
    except RuntimeError as error:
        return str(error)
    return ""


def leave_and_take_again(cases: list[tuple[RunConfig, int]], batches: list[Batch]) -> list[dict[str, Any]]:
    """In each case: a step; the next one, which is asked to be left at the n-th look; that one again. And the same two
    steps without any of that. Whether it was left, what changed by it, and both ends."""
    platform.prepare()
    from vcpo_megatron.learner.megatron.parallel import initialize
    from vcpo_megatron.learner.megatron.training import build_trainable
    from vcpo_megatron.learner.step import abort as leaving
    from vcpo_megatron.learner.step.vcpo_step import VcpoStep
    from vcpo_megatron.learner.weights.gather import WeightGatherer

    leaving.LOOK_S = 0.0
    outcomes = []
    for number, (config, at) in enumerate(cases):
        parallel = initialize(config)
        ends, left, moved, looks = [], None, 0.0, 0
        for leaves in (False, True):

            def asked(number: int = number, at: int = at) -> bool:
                nonlocal looks
                looks += 1
                return looks == at

            trainable = build_trainable(config, parallel, load=True)
            step = VcpoStep(config, parallel, trainable, abort_requested=asked if leaves else None)
            gatherer = WeightGatherer(trainable, parallel)
            looks = -10_000  # not in the first step
            step.run(batches[0], PolicyVersion(2 * number + leaves, 1))
            before = {k: v.clone() for k, v in gatherer.gather()}
            if leaves:
                looks = 0
                left = step.run(batches[1], PolicyVersion(2 * number + leaves, 2)) is None
                looks = -10_000
                moved = max((float((v - before[k]).abs().max()) for k, v in gatherer.gather()), default=0.0)
            result = step.run(batches[1], PolicyVersion(1000 + 2 * number + leaves, 2)) if left is not False else None
            parameters = {k: v.clone() for k, v in gatherer.gather()}
            ends.append({"metrics": result and dict(result.metrics), "parameters": parameters})
        outcomes.append({"left": left, "moved": moved, "whole": ends[0], "again": ends[1]})
        leave_layout()
    return outcomes
