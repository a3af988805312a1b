"""The cost formulas against FLOPs that torch counts and bytes that are really kept; and the projection's numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vcpo_megatron.benchmarks import costs
from vcpo_megatron.learner import weight_gradients
from vcpo_megatron.learner.score_state import Coefficients, PackScores, TokenRows, Tokens
from vcpo_megatron.learner.weight_gradients import Accumulate, Accumulator, Deferred, NormsOnly

CPU = costs.Machine(1.0, 1.0, *weight_gradients.constants(gpu=False))
LAYERS = [(96, 160), (640, 512)]
LENGTHS = (5, 30, 90, 600)


def test_constants_are_those_of_the_learner() -> None:
    found = (costs.H100.pass_flops, costs.H100.batched_tokens, costs.H100.gram_block)
    assert found == weight_gradients.constants(gpu=True)
    for layer in LAYERS:
        assert costs.crossover(*layer) == weight_gradients.crossover(*layer)
        for shared in (False, True):
            expected = weight_gradients.accumulate_limit(*layer, shared=shared)
            assert costs.accumulate_limit(*layer, CPU, shared=shared) == expected


def counted(mode: str, tokens: int, d_in: int, d_out: int, n: int = 1) -> tuple[int, int]:
    """(FLOPs of the weight gradient and its norm, bytes kept) of ``n`` trajectories of one reward."""
    parameter = torch.nn.Parameter(torch.zeros(d_out, d_in))
    parameter.main_grad = torch.zeros(d_out, d_in)
    ids = torch.arange(n).repeat_interleave(tokens)
    scores = PackScores(SimpleNamespace(step_rows=range(n), rows=range(n), offset=0, tokens=ids), SimpleNamespace())
    scores.coefficients = Coefficients(torch.full((n,), 0.5).double(), torch.full((n,), 0.25).double())
    scores.accumulator = Accumulator.zeros({"w": parameter}, torch.float32)
    way = {"accumulate": Accumulate(), "deferred": Deferred(), "two_pass": NormsOnly()}
    rows = Tokens(TokenRows(ids, n, [tokens] * n), None)
    # torch counts addmm, not its in-place form
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, *rest, **options: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        way[mode].matrix(scores, rows, "w", parameter, torch.ones(n * tokens, d_in), torch.ones(n * tokens, d_out))
        cells = [cell.cell_contents for apply in scores.kept for cell in apply.__closure__]
        kept = sum(t.numel() * 4 for t in cells if torch.is_tensor(t) and t is not parameter.main_grad and t.dim() == 2)
        for apply in scores.kept:
            apply(torch.ones(n))
    return counter.get_total_flops(), kept


@pytest.mark.parametrize("mode", ["accumulate", "deferred", "two_pass"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_flops_and_bytes_are_those_counted(mode: str, layer: tuple[int, int], tokens: int) -> None:
    flops, kept = counted(mode, tokens, *layer)
    product = 2 * tokens * layer[0] * layer[1]
    extra = costs.extra_flops(mode, tokens, *layer, CPU)
    # the plain weight gradient is one product; the first of two passes has none, but a forward and an input gradient
    assert flops == (extra - 2 * product if mode == "two_pass" else extra + product)
    if mode == "deferred":
        assert kept == costs.kept_bytes([tokens], *layer)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_shared_rewards_need_no_second_product(layer: tuple[int, int], tokens: int) -> None:
    flops, _ = counted("accumulate", tokens, *layer, n=4)
    product = 2 * tokens * layer[0] * layer[1]
    assert flops == 4 * (costs.extra_flops("accumulate_shared", tokens, *layer, CPU) + product)


def test_the_projection_to_70b() -> None:
    """What docs/per_trajectory_gradients.md prints."""
    assert costs.SEVENTY_B.parameters == pytest.approx(70.55e9, rel=1e-3)
    short = {p.mode: p for p in costs.project(costs.SEVENTY_B, 8, 4, [512] * 16, accumulators=2)}
    long = {p.mode: p for p in costs.project(costs.SEVENTY_B, 8, 4, [4096] * 16, accumulators=2)}
    gb = 1e9
    assert short["accumulate"].extra_bytes / gb == pytest.approx(17.6, abs=0.05)
    assert short["reference"].extra_bytes / gb == pytest.approx(17.6, abs=0.05)
    assert short["deferred"].extra_bytes / gb == pytest.approx(15.0, abs=0.1)
    assert long["deferred"].extra_bytes / gb == pytest.approx(68.5, abs=0.1)
    assert short["two_pass"].extra_bytes == short["proxy"].extra_bytes == 0


def test_parameters_of_a_counted_model() -> None:
    shape = costs.Shape(256, 8, 1024, 4, 4, 64, 4096)
    assert shape.parameters == 8 * (4 * 256 * 256 + 3 * 256 * 1024) + 2 * 4096 * 256
