"""Float32 logits of a 16-bit model: what they are, their gradient, and what they take out of the weights."""

from __future__ import annotations

import math
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from vcpo_megatron.algorithm.ess import ess_ratio
from vcpo_megatron.learner.megatron.logprobs import token_logprobs
from vcpo_megatron.learner.megatron.output_layer import has_fp32_logits, keep_fp32_logits, logits_of

from ..scenarios import make_batch, make_config, make_model_folder
from ..world import run_world

TOKENS, WIDTH, VOCABULARY = 256, 64, 500


@pytest.fixture
def draw() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def head(draw: torch.Generator, scale: float) -> tuple[Tensor, Tensor]:
    """Hidden states and a weight in bfloat16, whose logits have the standard deviation ``scale``."""
    hidden = torch.randn(TOKENS, 1, WIDTH, generator=draw).bfloat16()
    weight = (torch.randn(VOCABULARY, WIDTH, generator=draw) * scale / math.sqrt(WIDTH)).bfloat16()
    return hidden, weight


def model_of(weight: Tensor) -> types.SimpleNamespace:
    """What ``keep_fp32_logits`` needs of a GPTModel."""
    return types.SimpleNamespace(output_layer=torch.nn.Module(), weight=weight)


def test_logits_are_the_whole_product_and_their_gradient_that_of_the_model(draw: torch.Generator) -> None:
    hidden, weight = (tensor.requires_grad_() for tensor in head(draw, 2.0))
    model = model_of(weight)
    assert not has_fp32_logits(model.output_layer)
    keep_fp32_logits(model)  # type: ignore[arg-type]
    assert has_fp32_logits(model.output_layer)
    logits = model.output_layer._forward_impl(
        input=hidden, weight=weight, bias=None, allreduce_dgrad=False, sequence_parallel=False, tp_group=None
    )
    assert logits.dtype is torch.float32 and logits.shape == (TOKENS, 1, VOCABULARY)
    exact_hidden, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    exact = exact_hidden @ exact_weight.t()
    torch.testing.assert_close(logits.double(), exact, rtol=0, atol=2e-6)
    pull = torch.randn(logits.shape, generator=draw)
    found = torch.autograd.grad((logits * pull).sum(), (hidden, weight))
    expected = torch.autograd.grad((exact * pull).sum(), (exact_hidden, exact_weight))
    for mine, wanted in zip(found, expected, strict=True):
        assert mine.dtype is torch.bfloat16
        assert float((mine.double() - wanted).norm() / wanted.norm()) < 2**-8  # one rounding of each factor
    rounded = pull.bfloat16()  # before it is multiplied: two products of 16 bits, as in every other layer
    assert found[0].equal(rounded @ weight)
    assert found[1].equal(rounded[:, 0].t() @ hidden[:, 0])


def noise(logits: Tensor, exact: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Differences of the labels' log-probs from those of the exact logits: float64 [T]."""
    found, _ = token_logprobs(logits.reshape(TOKENS, -1), labels, 1.0, VOCABULARY, group)
    wanted = torch.log_softmax(exact.reshape(TOKENS, -1), -1).gather(1, labels[:, None])[:, 0]
    return found.double() - wanted


def test_token_noise_falls_and_with_it_what_it_takes_from_ess(
    draw: torch.Generator, lone_group: dist.ProcessGroup
) -> None:
    """sigma of a token's log-prob by 16-bit logits alone, and ESS / N = exp(-T sigma^2) of trajectories of T."""
    hidden, weight = head(draw, 4.0)
    exact = hidden.double() @ weight.double().t()
    labels = torch.multinomial(torch.softmax(exact[:, 0], -1), 1, generator=draw)[:, 0]
    rounded = noise(hidden @ weight.t(), exact, labels, lone_group)
    kept = noise(logits_of(hidden, weight), exact, labels, lone_group)
    sigma, least = float(rounded.std()), float(kept.std())
    assert 0.01 < sigma < 0.04, sigma  # logits of about 12 for the labels: steps of 1/16
    assert least < 1e-5 and sigma > 1000 * least
    trajectories = 4096
    for length in (64, 1024):
        # tokens' noise is drawn anew from what was measured
        picks = torch.randint(TOKENS, (trajectories, length), generator=draw)
        of_rounded, of_kept = (ess_ratio((values - values.mean())[picks].sum(1)) for values in (rounded, kept))
        assert of_rounded == pytest.approx(math.exp(-length * sigma**2), rel=0.25)
        assert of_kept > 0.9999


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_plain_backward_over_tensor_ranks_is_megatrons_but_for_the_rounding(
    sequence_parallel: bool, tmp_path: Path
) -> None:
    """One step of GRPO, TP 2: log ratios and gradients beside those of Megatron's own output layer, whose logits are
    rounded (seen: 0.008 and 4 %). A sum over ranks that is missing, or made twice, is off by half."""
    model = make_model_folder(tmp_path / "model", layers=2, tied=True, rounded=True)
    layout = {"tensor": 2, "sequence_parallel": sequence_parallel}
    cases = [
        (make_config(model, 2, parallel=layout, algorithm={"method": "grpo"}, model=keys), [make_batch(model)])
        for keys in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "fp32_lm_head": False})
    ]
    kept, rounded = run_world(2, "learner.run_layouts:one_step_each", {"cases": cases}, timeout_s=250)
    mine, theirs = (
        torch.tensor([row.log_ratio for row in outcome["results"][0].trajectories]) for outcome in (kept, rounded)
    )
    assert 0 < float((mine - theirs).abs().max()) < 0.1
    for key, wanted in rounded["gradients"].items():
        assert float((kept["gradients"][key] - wanted).norm() / wanted.norm()) < 0.15, key
