"""Chunked, vocabulary-parallel log-probs against torch's log_softmax in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from benchmarks.step import peak_bytes

from vcpo_megatron.learner.megatron import logprobs
from vcpo_megatron.learner.megatron.logprobs import token_logprobs

from ..world import run_world


def expected(logits: torch.Tensor, labels: torch.Tensor, temperature: float, size: int) -> tuple[torch.Tensor, ...]:
    logits = logits.detach().double().requires_grad_()
    log_p = torch.log_softmax(logits[:, :size] / temperature, -1)
    picked = log_p.gather(1, labels[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(1)
    (gradient,) = torch.autograd.grad((picked * torch.arange(1.0, len(labels) + 1)).sum(), logits)
    return picked.detach(), entropy.detach(), gradient


@pytest.mark.parametrize("chunk", [1 << 24, 20])
def test_one_rank_with_padded_vocabulary(lone_group: dist.ProcessGroup, chunk: int, monkeypatch) -> None:  # noqa: ANN001
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    logits = (torch.randn(7, 12, generator=torch.Generator().manual_seed(0)) * 4).requires_grad_()
    labels = torch.tensor([0, 9, 3, 3, 1, 8, 5])
    got, entropy = token_logprobs(logits, labels, 0.7, 10, lone_group)
    want, want_entropy, want_gradient = expected(logits, labels, 0.7, 10)
    (gradient,) = torch.autograd.grad((got * torch.arange(1.0, 8.0)).sum(), logits)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=0, atol=2e-6)
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=0, atol=1e-5)
    assert (gradient[:, 10:] == 0).all()  # padded rows never take part


def test_a_padded_row_never_wins(lone_group: dist.ProcessGroup) -> None:
    logits = torch.zeros(1, 4)
    logits[0, 3] = 1e4
    got, entropy = token_logprobs(logits, torch.tensor([1]), 1.0, 3, lone_group)
    assert got.item() == pytest.approx(-1.0986123) and entropy.item() == pytest.approx(1.0986123)


def test_a_row_without_gradient_stays_zero_whatever_it_holds(lone_group: dist.ProcessGroup) -> None:
    logits = torch.zeros(2, 3)
    logits[1] = float("nan")
    logits.requires_grad_()
    got, _ = token_logprobs(logits, torch.tensor([1, 1]), 1.0, 3, lone_group)
    (gradient,) = torch.autograd.grad(got[0], logits)
    assert gradient.isfinite().all() and gradient[1].tolist() == [0.0, 0.0, 0.0]


def two_ranks(logits: torch.Tensor, labels: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """Run on each of two ranks: logits are cut in halves; the gradient comes back whole."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    half = logits.shape[1] // 2
    mine = logits[:, dist.get_rank() * half :][:, :half].clone().requires_grad_()
    got, entropy = token_logprobs(mine, labels, 0.7, size, dist.group.WORLD)
    (gradient,) = torch.autograd.grad((got * torch.arange(1.0, len(labels) + 1)).sum(), mine)
    parts = [torch.empty_like(gradient) for _ in range(2)]
    dist.all_gather(parts, gradient)
    return got.detach(), entropy, torch.cat(parts, 1)


@pytest.mark.parametrize("size", [10, 5])  # 5: the second rank holds padding only
def test_two_ranks_equal_one(size: int) -> None:
    logits = torch.randn(6, 12, generator=torch.Generator().manual_seed(1)) * 4
    labels = torch.tensor([0, 4, 3, 3, 1, 2])
    arguments = {"logits": logits, "labels": labels, "size": size}
    got, entropy, gradient = run_world(2, "learner.megatron.test_logprobs:two_ranks", arguments, timeout_s=110)
    want, want_entropy, want_gradient = expected(logits, labels, 0.7, size)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=0, atol=2e-6)
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=0, atol=1e-5)


def test_no_copy_of_the_logits_in_fp32(lone_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alive at the peak of forward and backward: chunks; the gradient lies where the logits were."""
    tokens, vocabulary, rows = 400, 1000, 4
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", rows * vocabulary)
    logits = torch.randn(tokens, vocabulary).bfloat16().requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,))

    def both(_: str) -> float:
        found, entropy = token_logprobs(logits, labels, 1.0, vocabulary, lone_group)
        (gradient,) = torch.autograd.grad(found.sum() + entropy.sum(), logits)
        assert gradient.data_ptr() == logits.data_ptr() and gradient.dtype is torch.bfloat16
        return 0.0

    both("once")
    chunk, whole = 4 * rows * vocabulary, 2 * tokens * vocabulary
    assert chunk < peak_bytes("again", both) < 12 * chunk < whole


def test_logits_that_something_else_reads_in_its_backward_are_not_overwritten_in_silence(
    lone_group: dist.ProcessGroup,
) -> None:
    logits, labels = torch.randn(3, 5).requires_grad_().clone(), torch.tensor([0, 1, 2])
    both = [token_logprobs(logits, labels, 1.0, 5, lone_group)[0].sum() for _ in range(2)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (both[0] + both[1]).backward()
