"""Exact per-trajectory squared gradient norms, and weighted gradient sums, in one backward pass.

Every parameter of Megatron's local layers gets its gradient in one of five places: a tensor-parallel
linear layer (and its bias), the vocabulary-parallel embedding, an RMSNorm, a router, the gate of a shared expert.
``attach`` replaces the computation of exactly these on the module INSTANCES; no class and no Megatron source is
changed. The activations' gradients are what Megatron computes. The weight gradient is formed trajectory by
trajectory: with G_i, A_i the output gradients and inputs of trajectory i's tokens, its share is
W_i = G_i^T A_i, from which |g_i|^2 += |W_i|^2 (never scaled by w, R or std). What else becomes of W_i is in
``weight_gradients``.

What is recorded belongs to one pack, so several packs may be in flight in a pipeline.

    pack_scores  the pack's record, and which trajectory a row belongs to     linear   matrices
    vectors      norms and the embedding                                      experts  dispatched tokens
    tied         the cross term of tied embeddings

A parameter of any other layer takes the per-sample fallback: one trajectory a micro-batch. The gradient that autograd
finds for it there is that trajectory's own; a hook takes it, records its norm, and hands it to ``weight_gradients``
like any other, and what autograd adds to the gradient buffer is zeros. Exact where a rank sees the whole trajectory and
nothing of another one; any other layout is refused. So are layers whose weight gradient does not come back through
autograd, as TransformerEngine's may be built: one that adds it to the gradient buffer itself, and hands autograd a
tensor of anything; one that computes it after the backward, and hands it nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor
from torch.nn import Parameter

from ..megatron.layers import RMSNorm
from ..megatron.parallel import Parallel
from .experts import ExpertOwners
from .linear import attach_linear, attach_router, attach_shared_gate
from .pack_scores import ScoreSwitch
from .vectors import attach_embedding, attach_norm

_EXPERT = re.compile(r"(.+)\.experts\.local_experts\.(\d+)\..+")


class UnsupportedLayer(RuntimeError):
    """A parameter whose gradient cannot be separated by trajectory in this layout."""


@dataclass(frozen=True)
class Attached:
    """parameters  under the names by which ``WeightGradients`` knows them
    per_sample     names of those that need one trajectory a micro-batch
    """

    parameters: dict[str, Parameter]
    per_sample: tuple[str, ...]


def attach_chunks(
    chunks: Sequence[torch.nn.Module], switch: ScoreSwitch, parallel: Parallel, *, tied: bool
) -> Attached:
    """``attach`` every chunk of a model."""
    attached = [attach(chunk, switch, parallel, prefix=f"{i}.", tied=tied) for i, chunk in enumerate(chunks)]
    parameters = {name: parameter for one in attached for name, parameter in one.parameters.items()}
    return Attached(parameters, tuple(name for one in attached for name in one.per_sample))


def attach(model: torch.nn.Module, switch: ScoreSwitch, parallel: Parallel, *, prefix: str, tied: bool) -> Attached:
    """Make ``model`` (one chunk of a GPTModel) separate its gradients while ``switch.current`` is set.

    Names are ``prefix`` (unique for the chunk) + Megatron's. ``tied``: input and output embedding are one parameter,
    here or on two stages. A parameter of a module of another kind is separated by micro-batches of one trajectory;
    UnsupportedLayer where the layout does not let that be exact, before anything was changed.
    """
    modules = [(path, module) for path, module in model.named_modules() if _is_separable(module)]
    parameters = {prefix + name: parameter for name, parameter in model.named_parameters()}
    names = {id(parameter): name for name, parameter in parameters.items()}
    # a bias of a row-parallel layer is added outside of what is replaced
    handled = {
        id(parameter)
        for _, module in modules
        for name, parameter in module.named_parameters(recurse=False)
        if not (isinstance(module, RowParallelLinear) and name == "bias")
    }
    others = {name: parameter for name, parameter in parameters.items() if id(parameter) not in handled}
    if others and (problem := _per_sample_problem(list(others.values()), parallel)):
        raise UnsupportedLayer(f"no exact per-trajectory gradient for {', '.join(others)}: {problem}")
    for module in model.modules():
        own = [names[id(p)] for p in module.parameters(recurse=False) if names[id(p)] in others]
        if own and (problem := _kept_back(module)):
            raise UnsupportedLayer(f"no exact per-trajectory gradient for {', '.join(own)}: {problem}")
    for name, parameter in others.items():
        _attach_per_sample(parameter, name, switch)
    owners = {}
    for path, module in model.named_modules():
        if isinstance(module, MoELayer):
            owners[path] = ExpertOwners(module.token_dispatcher.plan, switch)
    for path, module in modules:
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            expert = _EXPERT.fullmatch(path)
            tokens = owners[expert[1]].tokens_of(int(expert[2])) if expert else (lambda scores: scores.dense_tokens)
            attach_linear(
                module,
                switch,
                names,
                parallel.tensor_group,
                is_tied_output=tied and path == "output_layer",
                tokens=tokens,
            )
        elif isinstance(module, VocabParallelEmbedding):
            attach_embedding(module, switch, names, tied=tied)
        elif isinstance(module, RMSNorm):
            attach_norm(module, switch, names, path, parallel)
        elif isinstance(module, SharedExpertMLP):
            attach_shared_gate(module, switch, names, parallel.tensor_group)
        else:
            attach_router(module, switch, names, parallel.tensor_group)
    return Attached(parameters, tuple(others))


def _is_separable(module: torch.nn.Module) -> bool:
    """A module of one of the five kinds. A router with a bias is not: the gate has none."""
    if isinstance(module, TopKRouter):
        return module.bias is None
    kinds = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, RMSNorm, SharedExpertMLP)
    return isinstance(module, kinds)


def _per_sample_problem(parameters: Sequence[Parameter], parallel: Parallel) -> str:
    """Why one trajectory a micro-batch does not make the gradients of ``parameters`` exact; "" where it does."""
    if parallel.context_size > 1:
        return f"parallel.context = {parallel.context_size} splits a trajectory over ranks"
    if parallel.expert_data_size > 1:
        return "parallel.expert > 1 brings tokens of several trajectories to an expert"
    whole = [p for p in parameters if not getattr(p, "tensor_model_parallel", False)]
    if parallel.tensor_size > 1 and whole:
        return f"parallel.tensor = {parallel.tensor_size}: whether ranks hold copies or summands of it is not known"
    return ""


def _kept_back(module: torch.nn.Module) -> str:
    """Why the weight gradient of ``module`` will not come through autograd, if it says so as TransformerEngine's layers
    do; "" else."""
    if getattr(module, "fuse_wgrad_accumulation", False):
        return (
            "its layer adds it to the gradient buffer itself (fuse_wgrad_accumulation); build it with "
            "gradient_accumulation_fusion = False"
        )
    store = getattr(module, "wgrad_store", None)
    if store is not None and store.delay_wgrad_compute():
        return "its layer computes it after the backward; build it with delay_wgrad_compute = False"
    return ""


def _attach_per_sample(parameter: Parameter, name: str, switch: ScoreSwitch) -> None:
    """The per-sample fallback of ``parameter`` while ``switch.current`` is set."""

    def record(gradient: Tensor | None) -> Tensor | None:
        scores = switch.current
        if scores is None:
            return None  # a plain backward
        if gradient is None or getattr(parameter, "grad_added_to_main_grad", False):
            how = "after the backward" if gradient is None else "in the gradient buffer"
            raise UnsupportedLayer(
                f"no exact per-trajectory gradient for {name}: its layer left it {how} and handed autograd none; build "
                "it with gradient_accumulation_fusion = False and delay_wgrad_compute = False"
            )
        if scores.pack.samples:
            assert len(scores.pack.step_samples) == 1, "one trajectory a micro-batch"
            own = gradient.detach().float()
            scores.owned[scores.own] += torch.linalg.vector_norm(own).double().square()
            scores.gradients.vector(scores, name, parameter, own[None])
        return torch.zeros_like(gradient)

    parameter.register_hook(record)
