"""What noise between learner and servers does to ESS at length, and what is left of it by each way to treat it.

Synthetic answers: token noise is normal and independent, a true lag of given spread is added to every token alike
(``dense``) or to one token in a hundred (``sparse``). And, of a real model, how much of a bfloat16 learner's own
rounding stays the same from one version to the next.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vcpo_megatron.algorithm.ess import ess_ratio, step_scale
from vcpo_megatron.algorithm.importance import log_ratios

#: Share of tokens that a sparse lag moves.
SPARSE = 0.01
#: Two versions of a learner in float32 round apart by this much a token (nats, RMS).
ROUNDING = 1e-6


@dataclass(frozen=True)
class Scene:
    """``answers`` of ``tokens`` tokens with token noise of RMS ``noise`` (nats). Every second one has a true lag whose
    sum has the standard deviation ``lag``, the others are of the current version."""

    answers: int
    tokens: int
    noise: float
    lag: float = 0.0
    kind: str = "dense"


@dataclass(frozen=True)
class Drawn:
    """Log-probs [answers, tokens] by the servers, by the learner when it recorded them and now; the true sums of the
    lag [answers]; ``aged`` bool [answers]."""

    behavior: Tensor
    recorded: Tensor
    now: Tensor
    truth: Tensor
    aged: Tensor


def draw(scene: Scene, seed: int = 0) -> Drawn:
    """One batch; float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (scene.answers, scene.tokens)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    recorded = -normal(*shape).abs()
    aged = torch.arange(scene.answers) % 2 == 1
    if scene.kind == "dense":
        moved = torch.ones(shape, dtype=torch.float64)
    else:
        moved = (torch.rand(*shape, generator=generator) < SPARSE).double() * normal(*shape)
        moved /= math.sqrt(SPARSE / scene.tokens)  # so that the sum has variance 1 as below
    drift = moved * aged[:, None] * scene.lag / scene.tokens
    drift = drift * normal(scene.answers, 1) if scene.kind == "dense" else drift
    rounding = ROUNDING * normal(*shape) if scene.lag else 0.0
    return Drawn(recorded + scene.noise * normal(*shape), recorded, recorded + drift + rounding, drift.sum(1), aged)


# --- ways to estimate the lag ---------------------------------------------------------------------


def none(drawn: Drawn, scene: Scene) -> Tensor:
    """The whole log ratio: mismatch and lag."""
    return _sums(drawn.now, drawn.behavior)


def recorded(drawn: Drawn, scene: Scene) -> Tensor:
    """From what the learner recorded."""
    return _sums(drawn.now, drawn.recorded)


def shrunk_by_batch(drawn: Drawn, scene: Scene) -> Tensor:
    """One factor a batch: what is above the variance of the noise."""
    whole = none(drawn, scene)
    return whole * max(0.0, 1.0 - scene.tokens * scene.noise**2 / float(whole.var(correction=0)))


def shrunk_by_age(drawn: Drawn, scene: Scene) -> Tensor:
    """Wiener's factor a trajectory, with the noise's variance and the lag's of every age known exactly: the least
    squared error of all linear estimates from sums, and of all estimates where both are normal."""
    noise = scene.tokens * scene.noise**2
    factor = scene.lag**2 / (scene.lag**2 + noise) if scene.lag else 0.0
    return none(drawn, scene) * drawn.aged.double() * factor


def shrunk_by_token(drawn: Drawn, scene: Scene) -> Tensor:
    """Soft threshold a token, the best of all thresholds for this batch, which only the truth can tell."""
    ratios = (drawn.now - drawn.behavior) * drawn.aged[:, None]
    best, least = torch.zeros_like(drawn.truth), math.inf
    for sigmas in (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0):
        kept = (ratios.sign() * (ratios.abs() - sigmas * scene.noise).clamp(min=0.0)).sum(1)
        error = float((kept - drawn.truth).square().mean())
        best, least = (kept, error) if error < least else (best, least)
    return best


WAYS: Mapping[str, Callable[[Drawn, Scene], Tensor]] = {
    "none": none,
    "shrunk by batch": shrunk_by_batch,
    "shrunk by age": shrunk_by_age,
    "shrunk by token": shrunk_by_token,
    "recorded": recorded,
}


@dataclass(frozen=True)
class Outcome:
    """ESS / N and the factor on the learning rate by an estimate of the lag; ``error``: root of the mean square of what
    it is off, over that of the lag, nan without one; ``true_ess`` of the lag itself."""

    way: str
    ess: float
    scale: float
    error: float
    true_ess: float


def outcomes(scene: Scene, seed: int = 0) -> list[Outcome]:
    """Of every way on one batch."""
    drawn = draw(scene, seed)
    found = []
    for name, estimate in WAYS.items():
        lag = estimate(drawn, scene)
        ess = ess_ratio(lag)
        square = float((lag - drawn.truth)[drawn.aged].square().mean())
        error = math.sqrt(square / float(drawn.truth[drawn.aged].square().mean())) if scene.lag else math.nan
        found.append(Outcome(name, ess, step_scale(ess, 1.0, "sqrt"), error, ess_ratio(drawn.truth)))
    return found


def _sums(policy: Tensor, base: Tensor) -> Tensor:
    answers, tokens = policy.shape
    everything = torch.ones(answers * tokens, dtype=torch.bool)
    segments = torch.arange(answers).repeat_interleave(tokens)
    return log_ratios(policy.reshape(-1), base.reshape(-1), everything, segments, answers)


def table(rows: Sequence[tuple[Scene, list[Outcome]]]) -> str:
    """A line a scene; of each way ESS / N, the rate's factor, and with a lag the relative error."""
    lines = []
    for scene, found in rows:
        lag = f"{scene.kind} lag {scene.lag:g}, true ESS {found[0].true_ess:.2f}" if scene.lag else "no lag"
        cells = [
            f"{one.way}: {one.ess:.2f} / {one.scale:.2f}" + (f" / off {one.error:.2f}" if scene.lag else "")
            for one in found
        ]
        lines.append(f"{scene.tokens:>5} tokens, noise {scene.noise:g}, {lag}\n      " + "\n      ".join(cells))
    return "\n".join(lines)


# --- a learner's own rounding ---------------------------------------------------------------------


@dataclass(frozen=True)
class Rounding:
    """RMS (nats a token) of bfloat16 against float32 under one version, and of the difference between two versions,
    whose parameters differ by ``step`` each: what a lag from recorded log-probs still holds of it."""

    step: float
    at_once: float
    between: float


@torch.no_grad()
def roundings(folder: Path, steps: Sequence[float], *, answers: int = 24, tokens: int = 96) -> list[Rounding]:
    """Of the model in ``folder``, on answers that it samples itself."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, model.config.vocab_size, (answers, 8))
    for _ in range(tokens):
        ids = torch.cat([ids, torch.multinomial(model(ids).logits[:, -1].softmax(-1), 1)], 1)

    def rounded(policy: torch.nn.Module) -> Tensor:
        whole, half = (_logprobs(each, ids) for each in (policy, copy.deepcopy(policy).bfloat16()))
        return half - whole

    before, found = rounded(model), []
    for step in steps:
        moved = copy.deepcopy(model)
        for parameter in moved.parameters():
            parameter.add_(step * torch.randn_like(parameter).sign())
        apart = rounded(moved) - before
        found.append(Rounding(step, float(before.square().mean().sqrt()), float(apart.square().mean().sqrt())))
    return found


def _logprobs(model: torch.nn.Module, ids: Tensor) -> Tensor:
    logs = model(ids).logits[:, :-1].float().log_softmax(-1)
    return logs.gather(2, ids[:, 1:, None])[:, 7:, 0].double()
