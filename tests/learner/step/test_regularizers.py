"""Entropy's gradient, score norms and the KL estimator against plain formulas; weights swap bit for bit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.messages import assert_names
from vcpo_megatron.learner.megatron import logprobs as module
from vcpo_megatron.learner.megatron.logprobs import squared_score_norms, token_logprobs
from vcpo_megatron.learner.step.regularizers import ReferenceWeights, regularizer

from ..scenarios import make_config, make_model_folder
from ..world import run_world


@pytest.mark.parametrize("chunk", [1 << 24, 20])
def test_entropy_and_score_norms(chunk: int, lone_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    logits = torch.randn(7, 10, requires_grad=True)  # 8 real tokens, 2 of padding
    labels, weights, pull = torch.tensor([0, 7, 3, 3, 1, 5, 2]), torch.randn(7), torch.randn(7)
    weights[2] = pull[4] = 0.0
    found, entropy = token_logprobs(logits, labels, 0.7, 8, lone_group)
    ((found * pull).sum() + (entropy * weights).sum()).backward()
    plain = logits.detach().double().requires_grad_()
    logs = torch.log_softmax(plain[:, :8] / 0.7, -1)
    expected = -(logs.exp() * logs).sum(-1)
    ((logs.gather(1, labels[:, None])[:, 0] * pull).sum() + (expected * weights).sum()).backward()
    torch.testing.assert_close(entropy.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.grad.double(), plain.grad, rtol=1e-5, atol=1e-6)
    difference = torch.nn.functional.one_hot(labels, 8) - logs.detach().exp()
    squares = squared_score_norms(logits.detach(), labels, 0.7, 8, lone_group)
    torch.testing.assert_close(squares.double(), (difference / 0.7).square().sum(1), rtol=1e-5, atol=1e-6)


def test_kl_and_entropy_terms() -> None:
    logp = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    term, kl = regularizer(0.5, 0.1, logp, torch.tensor([2.0, 3.0]), reference)
    e = torch.tensor(1.0, dtype=torch.float64).exp().item()
    assert kl.tolist() == pytest.approx([0.0, e - 2])  # exp(1) - 1 - 1
    assert term.tolist() == pytest.approx([-0.2, 0.5 * (e - 2) - 0.3])
    term.sum().backward()
    assert logp.grad.tolist() == pytest.approx([0.0, 0.5 * (1 - e)])
    assert regularizer(0.0, 0.1, logp, torch.tensor([2.0, 3.0]), None)[0].tolist() == pytest.approx([-0.2, -0.3])


@pytest.mark.parametrize("distance", [30.0, 100.0, 1e4])
def test_no_token_makes_the_kl_estimate_infinite(distance: float) -> None:
    """From a distance of 20 on the estimate follows its tangent: a pull of e^20 - 1, in fp32, and nothing from masked
    tokens, whatever they are."""
    logp = torch.tensor([-distance, -1.0, -1.0 - distance], requires_grad=True)
    reference = torch.tensor([0.0, -1.0, -1.0])
    term, kl = regularizer(1.0, 0.0, logp, torch.zeros(3), reference)
    e = math.exp(20.0)
    assert kl[0].item() == pytest.approx(e * (1 + distance - 20) - distance - 1, rel=1e-6) and kl[1].item() == 0.0
    torch.where(torch.tensor([True, True, False]), term, 0.0).sum().backward()
    assert logp.grad.tolist() == pytest.approx([1 - e, 0.0, 0.0])


def test_weights_are_swapped_in_place_and_back() -> None:
    layer = torch.nn.Linear(3, 2)
    reference = ReferenceWeights([layer])
    assert reference.bytes == 4 * (3 * 2 + 2)
    before, storage = layer.weight.detach().clone(), layer.weight.data_ptr()
    with torch.no_grad():
        layer.weight.mul_(3.0)
    after = layer.weight.detach().clone()
    with reference.swapped():
        assert torch.equal(layer.weight, before) and layer.weight.data_ptr() == storage
    assert torch.equal(layer.weight, after)
    with pytest.raises(RuntimeError, match="inside"), reference.swapped():
        raise RuntimeError("inside")
    assert torch.equal(layer.weight, after)


#: Of 2 layers, hidden 32, 32 rows of vocabulary: embeddings, final norm, and of a layer qkv and its bias, projection,
#: gate and up, down, two norms.
PARAMETERS = 2 * 32 * 32 + 32 + 2 * (64 * 32 + 64 + 32 * 32 + 2 * 48 * 32 + 32 * 48 + 2 * 32)


@pytest.mark.timeout(200)
def test_the_log_states_what_a_reference_takes_of_the_host(tmp_path: Path) -> None:
    """One copy of the rank's weights, in their dtype; nothing is said or kept without a reference."""
    model = make_model_folder(tmp_path / "model", layers=2)
    kept = {"kl_coef": 0.1, "kl_reference": "initial"}
    configs = [
        make_config(model, 1, algorithm=kept),
        make_config(model, 1, algorithm=kept, model={"dtype": "bfloat16"}),
        make_config(model, 1),
    ]
    assert PARAMETERS == 17_696
    whole, halved, none = run_world(1, "learner.run_layouts:said_when_built", {"configs": configs})
    assert_names(whole, "kl_reference: 70,784 bytes of host memory", "rank 0")
    assert_names(halved, "kl_reference: 35,392 bytes of host memory", "rank 0")
    assert none == ""
