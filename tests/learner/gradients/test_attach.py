"""The per-sample fallback, and what it refuses: weight gradients that autograd never sees."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.messages import assert_names
from vcpo_megatron.learner.gradients.attach import UnsupportedLayer, attach
from vcpo_megatron.learner.gradients.pack_scores import PackScores, ScoreSwitch

from ..engine_stand_ins import ColumnLinear, WeightGradStore

PARALLEL: Any = SimpleNamespace(context_size=1, expert_data_size=1, tensor_size=1)


def layer(dtype: torch.dtype = torch.float32, **options: bool) -> ColumnLinear:
    """5 -> 3, as TransformerEngine's column-parallel layer is built; ``options``: of Megatron's configuration."""
    plain = {"gradient_accumulation_fusion": False, "delay_wgrad_compute": False}
    config = SimpleNamespace(params_dtype=dtype, disable_parameter_transpose_cache=True, **plain | options)
    made = ColumnLinear(
        5,
        3,
        config=config,
        init_method=None,
        gather_output=False,
        bias=False,
        skip_bias_add=False,
        is_expert=False,
        tp_group=SimpleNamespace(size=lambda: 1),
    )
    torch.manual_seed(1)
    made.weight.data.normal_()
    made.weight.main_grad, made.weight.grad_added_to_main_grad = torch.zeros(3, 5), False  # as Megatron's wrapper does
    return made


def backward(made: ColumnLinear, x: torch.Tensor, after_attach: Callable[[], None] = lambda: None) -> PackScores:
    """Of a micro-batch of one trajectory."""
    switch = ScoreSwitch()
    attached = attach(nn.ModuleDict({"up": made}), switch, PARALLEL, prefix="0.", tied=False)
    after_attach()
    assert attached.per_sample == ("0.up.weight",)
    pack = SimpleNamespace(step_samples=range(1), samples=range(1), offset=0, tokens=torch.arange(len(x)))
    scores = switch.current = PackScores(pack, PARALLEL)  # type: ignore[arg-type]
    (made(x)[0].float() ** 2).sum().backward()
    return scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_autograd_gets_is_that_of_the_trajectory(dtype: torch.dtype) -> None:
    made = layer(dtype)
    x = torch.randn(4, 5, dtype=dtype)
    scores = backward(made, x)
    wanted = (2 * (x.double() @ made.weight.detach().double().t())).t() @ x.double()
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    assert float(scores.owned) == pytest.approx(float(wanted.square().sum()), rel=tolerance)
    assert made.weight.grad is not None and not bool(made.weight.grad.any())  # nothing is added a second time


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gradient_accumulation_fusion": True}, "fuse_wgrad_accumulation"),
        ({"delay_wgrad_compute": True}, "delay_wgrad_compute"),
    ],
)
def test_fused_and_delayed_weight_gradients_are_refused_before_anything_runs(
    options: dict[str, bool], named: str
) -> None:
    made = layer(**options)
    with pytest.raises(UnsupportedLayer) as raised:
        attach(nn.ModuleDict({"up": made}), ScoreSwitch(), PARALLEL, prefix="0.", tied=False)
    assert_names(raised.value, "0.up.weight", named)
    assert not made.weight._backward_hooks


@pytest.mark.parametrize("delayed", [False, True], ids=["fused", "delayed"])
def test_a_layer_that_does_not_say_so_is_found_in_its_first_backward(delayed: bool) -> None:
    made = layer()

    def turn() -> None:
        made.fuse_wgrad_accumulation, made.wgrad_store = not delayed, WeightGradStore(delayed)

    with pytest.raises(UnsupportedLayer) as raised:
        backward(made, torch.randn(4, 5), turn)
    where = "after the backward" if delayed else "gradient buffer"
    assert_names(raised.value, "0.up.weight", where, "gradient_accumulation_fusion = False")
