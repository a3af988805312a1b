"""Norms by Gram matrices against formed gradients, for every length class, and what a mode keeps."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from vcpo_megatron.learner.gradients import weight_gradients
from vcpo_megatron.learner.gradients.pack_scores import Coefficients, PackScores, TokenRows, TokenShards
from vcpo_megatron.learner.gradients.weight_gradients import Accumulate, Accumulator, Deferred, NormsOnly

LENGTHS = (1, 3, 3, 40, 70, 300, 2)
R = [0.5, -1.0, 0.0, 2.0, 1.0, -0.25, 3.0]
Q = [1.0, 2.0, 0.5, 1.0, 1.0, 0.125, 8.0]


def scores_of(lengths: tuple[int, ...], padding: int = 0) -> tuple[PackScores, TokenShards]:
    n = len(lengths)
    ids = torch.repeat_interleave(torch.arange(n + 1), torch.tensor([*lengths, padding]))
    pack = SimpleNamespace(step_samples=range(n), samples=range(n), offset=0, tokens=ids)
    scores = PackScores(pack, SimpleNamespace())
    scores.coefficients = Coefficients(torch.tensor(R[:n]).double(), torch.tensor(Q[:n]).double())
    return scores, TokenShards(TokenRows(ids, n, list(lengths)), None)


def test_rows_of_a_linear_layer_are_told_by_the_boundaries_of_the_pack() -> None:
    """Three trajectories of a micro-step of five, and padding behind them."""
    segments = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 3])
    pack = SimpleNamespace(
        step_samples=range(5), samples=range(3), offset=1, tokens=segments, segments=segments, boundaries=(0, 3, 7, 9)
    )
    scores = PackScores(pack, SimpleNamespace(context_size=1))
    rows = scores.dense_tokens.local
    assert rows.counts == TokenRows(scores.dense, 5).counts == [0, 3, 4, 2, 0]
    assert [segments[rows.rows(i)].tolist() for i in (1, 2, 3)] == [[0, 0, 0], [1, 1, 1, 1], [2, 2]]


@pytest.mark.parametrize("mode", ["accumulate", "accumulate shared", "deferred", "norms"])
@pytest.mark.parametrize(("d_in", "d_out"), [(160, 128), (8, 4)])  # all kinds of norms; all explicit but the shortest
@pytest.mark.parametrize("padding", [0, 5])
def test_every_mode_gives_the_same(
    mode: str, d_in: int, d_out: int, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_gradients, "GRAM_BLOCK_CPU", 32)
    monkeypatch.setattr(weight_gradients, "PASS_FLOPS_CPU", 40)
    monkeypatch.setattr(weight_gradients, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(weight_gradients, "BLOCK_ROWS", 48)
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(d_out, d_in))
    parameter.main_grad = torch.ones(d_out, d_in)
    scores, tokens = scores_of(LENGTHS, padding)
    total = sum(LENGTHS) + padding
    inputs, grads = torch.randn(total, d_in), torch.randn(total, d_out)
    cuts = [tokens.local.rows(i) for i in range(7)]
    parts = [grads[cut].double().t() @ inputs[cut].double() for cut in cuts]
    scores.accumulator = Accumulator.zeros({"w": parameter}, torch.float32)
    r = R
    if mode == "accumulate shared":  # two rewards: r_i / q_i is one of two numbers
        r = [q * (0.75 if i % 2 else -1.25) for i, q in enumerate(Q)]
        scores.coefficients = Coefficients(torch.tensor(r).double(), torch.tensor(Q).double())
        assert scores.coefficients.by_ratio == {-1.25: [0, 2, 4, 6], 0.75: [1, 3, 5]}
        mode = "accumulate"
    modes = {"accumulate": Accumulate(), "deferred": Deferred(), "norms": NormsOnly()}
    modes[mode].matrix(scores, tokens, "w", parameter, inputs, grads)
    for apply in scores.kept:
        apply(torch.tensor(R, dtype=torch.float64))
    torch.testing.assert_close(scores.owned, torch.stack([w.square().sum() for w in parts]), rtol=2e-6, atol=0)
    applied = r if mode != "norms" else [0.0] * len(R)
    expected = sum(r * w for r, w in zip(applied, parts, strict=True))
    torch.testing.assert_close(parameter.main_grad.double(), 1 + expected, rtol=1e-4, atol=1e-3)
    if mode == "accumulate":
        sums = sum(q * w for q, w in zip(Q, parts, strict=True))
        torch.testing.assert_close(scores.accumulator["w"].double(), sums, rtol=1e-4, atol=2e-3)


def test_ratios_of_trajectories() -> None:
    r, q = torch.tensor([1.0, 0.0, 3.0, 0.0]).double(), torch.tensor([2.0, 0.0, 6.0, 5.0]).double()
    assert Coefficients(r, q).by_ratio == {0.5: [0, 2], 0.0: [3]}
    assert Coefficients(r + 1, q).by_ratio is None  # an anchor pulls on a trajectory of weight 0


@pytest.mark.parametrize("size", [3e-12, 4e-13, 1e-30, 1e30])
def test_rewards_of_any_size_share_a_product_at_their_exact_ratio(size: float) -> None:
    """A group of rewards size and 0 without std: R - m is half of it, and that is what multiplies the sum."""
    q = torch.tensor([0.3, 1.0, 2.7, 8.0]).double()
    r = q * 0.5 * size * torch.tensor([1.0, -1.0, -1.0, 1.0]).double()
    classes = Coefficients(r, q).by_ratio
    assert classes is not None and list(classes.values()) == [[0, 3], [1, 2]]
    assert list(classes) == pytest.approx([0.5 * size, -0.5 * size], rel=1e-15, abs=0)


def test_ratios_that_differ_are_not_merged_and_rounding_is() -> None:
    q = torch.ones(5).double()
    r = torch.tensor([1e-13, 3e-13, 1e-13 * (1 + 1e-15), 0.0, 2e-13], dtype=torch.float64)
    assert Coefficients(r, q).by_ratio == {1e-13: [0, 2], 3e-13: [1], 0.0: [3], 2e-13: [4]}
    classes = Coefficients(torch.tensor([1.0, math.nan, 1.0, math.inf]).double(), q[:4]).by_ratio
    assert classes is not None
    found = {i: ratio for ratio, members in classes.items() for i in members}
    assert math.isnan(found[1]) and found[3] == math.inf and found[0] == found[2] == 1.0  # seen, and the step skipped


def test_bf16_accumulators_know_their_error() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 8))
    parameter.main_grad = torch.zeros(4, 8)
    accumulator = Accumulator.zeros({"w": parameter, "v": torch.nn.Parameter(torch.zeros(4))}, torch.bfloat16)
    assert accumulator["w"].dtype is torch.bfloat16 and list(accumulator.probe) == ["w"]
    accumulator["w"][0] = 1.0
    accumulator.probe["w"].fill_(1.01)
    error, size = accumulator.squared_error()
    assert error == pytest.approx(8 * 1e-4, rel=1e-3) and size == pytest.approx(8 * 1.01**2, rel=1e-5)


def test_the_fused_kernel_adds_half_precision_products_to_fp32_sums_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apex's kernel takes nothing else; the sum is the same by either way."""
    fused: list[torch.dtype] = []

    def kernel(total: torch.Tensor, grads: torch.Tensor, inputs: torch.Tensor) -> None:
        fused.append(total.dtype)
        total.add_(grads.float().t() @ inputs.float())

    monkeypatch.setattr(weight_gradients.platform, "kernels", lambda: SimpleNamespace(adds_products=True))
    monkeypatch.setattr(weight_gradients, "add_product", kernel)
    ones, factors = torch.ones(3, 4), torch.tensor([1.0, 2.0, 4.0])
    for total_dtype, dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float32,) * 2):
        total = torch.ones(4, 4, dtype=total_dtype)
        weight_gradients._add_product(total, ones.to(dtype), factors, ones.to(dtype))
        assert total.eq(8).all()
    assert fused == [torch.float32]


def test_the_smaller_one_is_kept() -> None:
    """70 tokens against a crossover of 71, 300 tokens beyond it: W_i in place of inputs and output gradients."""
    parameter = torch.nn.Parameter(torch.zeros(128, 160))
    parameter.main_grad = torch.zeros(128, 160)
    assert weight_gradients.crossover(160, 128) == 71
    scores, tokens = scores_of((70, 300))
    Deferred().matrix(scores, tokens, "w", parameter, torch.randn(370, 160), torch.randn(370, 128))
    kept = [cell.cell_contents for apply in scores.kept for cell in apply.__closure__]
    shapes = {tuple(x.shape) for x in kept if isinstance(x, torch.Tensor)} - {(128, 160)}
    assert len(scores.kept) == 2 and shapes == {(70, 160), (70, 128), (70,)}


def test_a_sum_that_vanishes_in_fp32_carries_nothing_else() -> None:
    """The anchor gives r to a trajectory of weight exp(-100): with its S_g, 0 in fp32, r's gradient would be lost."""
    anchored, small = (torch.full((4,), value, dtype=torch.float64) for value in (0.5, 1e-44))
    assert Coefficients(anchored, small).by_ratio is None
    assert Coefficients(anchored, small * 1e44).by_ratio == {0.5: [0, 1, 2, 3]}
    assert Coefficients(torch.zeros_like(small), small).by_ratio == {0.0: [0, 1, 2, 3]}


@pytest.mark.parametrize("log_ratio", [-46.0, -80.0, -87.0])
def test_an_anchor_does_not_pass_through_a_vanishing_weight(log_ratio: float) -> None:
    """Two answers, each of them sampled twice: equal r / q, so that one product of q could serve both sums. At W near
    1e-7 what is left of exp(-87) W in fp32 is a few bits."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(4, 8))
    parameter.main_grad = torch.zeros(4, 8)
    scores, tokens = scores_of((2, 2, 2, 2))
    q = torch.tensor([0.0, 0.0, 0.1, 0.1]).double().add(log_ratio).exp()
    r = q * torch.tensor([1.0, 1.0, -1.0, -1.0]).double() + 0.25
    scores.coefficients = Coefficients(r, q)
    scores.accumulator = Accumulator.zeros({"w": parameter}, torch.float32)
    inputs, grads = torch.randn(8, 8), 1e-7 * torch.randn(8, 4)
    Accumulate().matrix(scores, tokens, "w", parameter, inputs, grads)
    parts = [grads[i : i + 2].double().t() @ inputs[i : i + 2].double() for i in range(0, 8, 2)]
    expected = sum(float(own) * w for own, w in zip(r, parts, strict=True))
    torch.testing.assert_close(parameter.main_grad.double(), expected, rtol=1e-5, atol=1e-13)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1e39, float("inf")), (-1e39, float("-inf")), (3.4e38, 3.4e38), (-0.5, -0.5), (float("inf"), float("inf"))],
)
def test_a_factor_beyond_fp32_is_infinite(value: float, expected: float) -> None:
    assert weight_gradients.fp32_scalar(value) == expected
    torch.zeros(1).add_(torch.ones(1), alpha=weight_gradients.fp32_scalar(value))  # torch takes it
