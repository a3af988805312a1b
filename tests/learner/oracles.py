"""Independent fp64 gradients of every method, written as objectives that autograd differentiates.

Shares no code with the learner: transformers' own model, one trajectory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from vcpo_megatron.types import Batch, Trajectory


@dataclass
class Sample:
    """One trajectory: log-probs and entropies of its sampled tokens (with graph), log mu, advantage, 1/(...) c_i."""

    logp: Tensor
    entropy: Tensor
    mu: Tensor
    group: int
    reward: float
    score_squares: Tensor  # |d log pi_t / d logits|^2
    turn: Tensor  # number of the turn of each of these tokens
    base: Tensor  # what l counts from: log mu, or what the learner recorded
    of_tokens: Tensor  # truncated ratio of the record to mu, 1 without a record
    advantage: float = 0.0
    coefficient: float = 0.0


class Policy:
    """A model in fp64 and the samples of a batch under it."""

    def __init__(self, folder: Path, batch: Batch, temperature: float = 0.9, cap: float = 2.0) -> None:
        self._cap = cap
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        self.model.config._experts_implementation = "eager"  # the grouped one has no fp64
        self.parameters = dict(self.model.named_parameters())
        self.samples = [
            self._sample(g, t, temperature) for g, group in enumerate(batch.groups) for t in group.trajectories
        ]

    def _sample(self, group: int, t: Trajectory, temperature: float) -> Sample:
        ids = torch.tensor(t.tokens[None].astype(np.int64))
        logs = torch.log_softmax(self.model(ids).logits[0, :-1] / temperature, -1)
        mask = torch.tensor(t.loss_mask[1:])
        logp = logs.gather(1, ids[0, 1:, None])[:, 0][mask]
        entropy = -(logs.exp() * logs).sum(-1)[mask]
        chosen = torch.nn.functional.one_hot(ids[0, 1:], logs.shape[1])
        squares = ((chosen - logs.detach().exp()) / temperature).square().sum(-1)[mask]
        mu = torch.tensor(t.behavior_logprobs[1:]).double()[mask]
        positions = [p for p in range(len(t.tokens)) if t.loss_mask[p]]
        turn = torch.tensor([next(u for u, s in enumerate(t.turns) if s.start <= p < s.end) for p in positions])
        base = mu if t.recorded is None else torch.tensor(t.recorded.logprobs[1:]).double()[mask]
        of_tokens = (base - mu).exp().clamp(max=self._cap)
        return Sample(logp, entropy, mu, group, t.reward, squares, turn, base, of_tokens)

    def gradient(self, loss: Tensor) -> dict[str, Tensor]:
        grads = torch.autograd.grad(loss, list(self.parameters.values()), retain_graph=True)
        return dict(zip(self.parameters, grads, strict=True))

    def groups(self) -> list[list[Sample]]:
        count = 1 + max(s.group for s in self.samples)
        return [[s for s in self.samples if s.group == g] for g in range(count)]

    def normalize(self, rule: str, max_new: int = 16) -> None:
        n, total = len(self.samples), sum(len(s.logp) for s in self.samples)
        for s in self.samples:
            s.coefficient = {
                "sequence_token_mean": 1 / (n * len(s.logp)),
                "token_mean": 1 / total,
                "sequence_token_sum": 1 / n,
                "constant": 1 / (n * max_new),
            }[rule]

    def advantages(self, baseline: str, std: bool) -> None:
        """Of the baselines that need no norms."""
        for group in self.groups():
            rewards = np.array([s.reward for s in group])
            for i, s in enumerate(group):
                b = {"zero": 0.0, "group_mean": rewards.mean(), "leave_one_out": np.delete(rewards, i).mean()}[baseline]
                flat = rewards.max() == rewards.min()
                s.advantage = 0.0 if flat else float((s.reward - b) / (rewards.std() if std else 1.0))

    def opob(
        self,
        leave_one_out: bool = False,
        std: bool = True,
        weigh: Callable[[Sample], Tensor] | None = None,
        bound: Callable[[Sample], float] = lambda s: math.inf,
    ) -> list[float]:
        """Set advantages by OPOB from materialised gradients, over the standard deviation; returns the norms |g_i|.

        ``weigh`` gives weights of tokens; None: the weight is the trajectory's, up to ``bound``.
        """
        norms = []
        for s in self.samples:
            weight = s.of_tokens * (1.0 if weigh is None else weigh(s))
            grads = self.gradient(s.coefficient * (weight * s.logp).sum())
            norms.append(math.sqrt(sum(float((g**2).sum()) for g in grads.values())))
        for s, norm in zip(self.samples, norms, strict=True):
            log_u = min(float((s.logp - s.base).detach().sum()), math.log(bound(s))) if weigh is None else 0.0
            s.log_share = 2 * log_u + 2 * math.log(norm)  # type: ignore[attr-defined]
        for group in self.groups():
            rewards = np.array([s.reward for s in group])
            for i, s in enumerate(group):
                others = [j for j in range(len(group)) if not (leave_one_out and j == i)]
                shares = np.array([group[j].log_share for j in others])  # type: ignore[attr-defined]
                p = np.exp(shares - shares.max())
                b = float((p / p.sum() * rewards[others]).sum())
                scale = rewards.std() if std else 1.0
                s.advantage = 0.0 if rewards.max() == rewards.min() else float((s.reward - b) / scale)
        return norms

    def ess(self) -> float:
        """Of raw trajectory weights, over their number."""
        ratios = torch.stack([(s.logp - s.base).sum().detach() for s in self.samples])
        weights = (ratios - ratios.max()).exp()
        return float(weights.sum() ** 2 / weights.square().sum()) / len(weights)

    def lag_kl(self) -> tuple[float, float]:
        """mean(w - 1 - log w) of trajectory weights, cut at 8, and the mean of -log mu of a trajectory."""
        logs = [min(float((s.logp - s.base).detach().sum()), math.log(8.0)) for s in self.samples]
        kl = sum(math.exp(x) - 1 - x for x in logs) / len(logs)
        return kl, -sum(float(s.mu.sum()) for s in self.samples) / len(logs)

    def loss(self, objective: Callable[[Sample], Tensor], *, whole_batch: bool = False) -> Tensor:
        """- sum_i c_i sum_t J_t over trajectories of groups with variance, or of all."""
        trained = [g for g in self.groups() if whole_batch or len({s.reward for s in g}) > 1]
        return -torch.stack([s.coefficient * objective(s).sum() for g in trained for s in g]).sum()


def sequence_weighted(s: Sample, length: float = math.inf) -> Tensor:
    """``length``: from which on the truncation at 8 grows."""
    weight = min(math.exp((s.logp - s.base).detach().sum()), grown(len(s.logp), length))
    return weight * s.of_tokens * s.advantage * s.logp


def grown(tokens: int, length: float) -> float:
    """8, and 8 to the power of sqrt(tokens / length) where that is more."""
    return 8.0 ** max(1.0, math.sqrt(tokens / length))


def token_weights(s: Sample) -> Tensor:
    return (s.logp - s.base).detach().exp().clamp(max=8.0)


def turn_weights(s: Sample, length: float = math.inf) -> Tensor:
    """Of each token that of its turn, one turn after another."""
    logs, found = (s.logp - s.base).detach().tolist(), []
    for turn in s.turn.tolist():
        own = [log for log, other in zip(logs, s.turn.tolist(), strict=True) if other == turn]
        found.append(min(math.exp(math.fsum(own)), grown(len(own), length)))
    return torch.tensor(found, dtype=torch.float64)


def _clipped(ratio: Tensor, a: float, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * a, ratio.clamp(low, high) * a)


def _ratio(s: Sample) -> Tensor:
    return (s.logp - s.mu).exp()


def _gspo(s: Sample) -> Tensor:
    # J_i once a trajectory: c_i = 1 / (N T_i) and T_i equal terms
    return _clipped((s.logp - s.mu).mean().exp(), s.advantage, 1 - 3e-4, 1 + 4e-4).expand(len(s.logp))


def _decoupled(s: Sample) -> Tensor:
    proximal = s.logp.detach()
    return (proximal - s.mu).exp().clamp(max=8.0) * _clipped((s.logp - proximal).exp(), s.advantage, 0.8, 1.2)


def _veto(s: Sample) -> Tensor:
    kept = _clipped(_ratio(s), s.advantage, 0.2, 5.0)
    outside = [i for i, r in enumerate(_ratio(s).tolist()) if not 0.2 <= r <= 5.0]
    return kept[: outside[0]] if s.advantage < 0 and outside else kept


def _asymmetric(s: Sample) -> Tensor:
    weight = 1.0 if s.advantage >= 0 else min(1.0, float((s.logp - s.mu).sum().exp()))
    return weight * s.advantage * s.logp


def _mis(s: Sample) -> Tensor:
    log = float((s.logp - s.base).sum())
    return (math.exp(log) if log <= math.log(8.0) else 0.0) * s.of_tokens * s.advantage * s.logp


def _icepop(s: Sample) -> Tensor:
    r = _ratio(s).detach()
    return torch.where((r >= 0.5) & (r <= 5.0), r, 0.0) * s.advantage * s.logp


def _ctpo(s: Sample) -> Tensor:
    """Token by token: the ratio so far is a number, only the token's own log-prob has a gradient."""
    terms, so_far = [], 0.0
    for t, (logp, mu) in enumerate(zip(s.logp, s.mu, strict=True), start=1):
        so_far += float((logp - mu).detach())
        low, high = -0.025 * math.sqrt(t), 0.05 * math.sqrt(t)
        ratio = (so_far + logp - logp.detach()).exp()
        kept = torch.minimum(ratio * s.advantage, ratio.clamp(math.exp(low), math.exp(high)) * s.advantage)
        terms.append(torch.clamp(kept, min=math.exp(high) * s.advantage) if s.advantage < 0 else kept)
    return torch.stack(terms)


def _fspo(s: Sample) -> Tensor:
    """J_i once a trajectory, spread over its tokens."""
    root = math.sqrt(len(s.logp))
    whole = _clipped((s.logp - s.mu).sum().exp(), s.advantage, 0.95**root, 1.05**root)
    return (whole / len(s.logp)).expand(len(s.logp))


def _truncated(s: Sample) -> Tensor:
    return _ratio(s).detach().clamp(max=8.0) * s.advantage * s.logp


def _geometric(s: Sample, low: float, high: float) -> Tensor:
    mean = math.exp(float((s.logp - s.mu).detach().mean()))
    return _truncated(s) if low <= mean <= high else 0.0 * s.logp


def _token_veto(s: Sample, low: float) -> Tensor:
    return 0.0 * s.logp if float(_ratio(s).detach().min()) < low else _truncated(s)


def _m2_kept(samples: Sequence[Sample]) -> float:
    squares = sorted(float(x) ** 2 for s in samples for x in (s.logp - s.mu))
    while len(squares) > 1 and sum(squares) / len(squares) > 0.04:
        squares.pop()
    return squares[-1]


def _m2_range(samples: Sequence[Sample]) -> float:
    """tau: the log ratio at which those that lead away must be capped for a mean square of 0.04, by bisection."""
    away = [float(x) ** 2 for s in samples for x in s.logp - s.mu if float(x) * s.advantage > 0]
    low, high = 0.0, max(away, default=0.0)
    if sum(away) <= 0.04 * len(away):
        return math.sqrt(high)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(min(v, middle) for v in away) < 0.04 * len(away) else (low, middle)
    return math.sqrt(low)


def _token_ess(samples: Sequence[Sample]) -> float:
    r = torch.cat([_ratio(s).detach() for s in samples])
    return float(r.sum() ** 2 / (r**2).sum() / len(r))


def _bounded_exp(x: Tensor) -> Tensor:
    """exp(min(x, 10)) in value; its gradient at the bound beyond it."""
    inside = x.clamp(max=10.0).exp()
    return inside + (x > 10).double() * math.exp(10) * (x - x.detach())


#: methods whose loss has terms without an advantage, so that it runs over groups of equal rewards, too
WHOLE_BATCH = {"p3o"}

#: method -> (baseline, divided by std, normalisation, objective of a trajectory given all of them)
OBJECTIVES: dict[str, tuple[str, bool, str, Callable[[Sequence[Sample]], Callable[[Sample], Tensor]]]] = {
    "reinforce": ("zero", False, "sequence_token_sum", lambda _: lambda s: s.advantage * s.logp),
    "rloo": ("leave_one_out", False, "sequence_token_sum", lambda _: lambda s: s.advantage * s.logp),
    "grpo": ("group_mean", True, "sequence_token_mean", lambda _: lambda s: _clipped(_ratio(s), s.advantage, 0.8, 1.2)),
    "dr_grpo": ("group_mean", False, "constant", lambda _: lambda s: _clipped(_ratio(s), s.advantage, 0.8, 1.2)),
    "ppo_clip": ("group_mean", True, "token_mean", lambda _: lambda s: _clipped(_ratio(s), s.advantage, 0.8, 1.2)),
    "decoupled_ppo": ("group_mean", True, "token_mean", lambda _: _decoupled),
    "gspo": ("group_mean", True, "sequence_token_mean", lambda _: _gspo),
    "tis_token": (
        "group_mean",
        True,
        "sequence_token_mean",
        lambda _: lambda s: token_weights(s) * s.of_tokens * s.advantage * s.logp,
    ),
    "tis_sequence": ("group_mean", True, "sequence_token_mean", lambda _: sequence_weighted),
    "vcpo_ess_only": ("group_mean", True, "sequence_token_mean", lambda _: sequence_weighted),
    "mis": ("group_mean", True, "sequence_token_mean", lambda _: _mis),
    "icepop": ("group_mean", True, "sequence_token_mean", lambda _: _icepop),
    "m2po": (
        "group_mean",
        True,
        "token_mean",
        lambda all: lambda s: torch.where((s.logp - s.mu) ** 2 <= _m2_kept(all), _ratio(s) * s.advantage, 0.0),
    ),
    "m2po_clip": (
        "group_mean",
        True,
        "token_mean",
        lambda all: lambda s: _clipped(_ratio(s), s.advantage, math.exp(-_m2_range(all)), math.exp(_m2_range(all))),
    ),
    "cispo": (
        "group_mean",
        True,
        "token_mean",
        lambda _: lambda s: _ratio(s).detach().clamp(max=5.0) * s.advantage * s.logp,
    ),
    "p3o": (
        "group_mean",
        True,
        "token_mean",
        lambda all: (
            lambda s: (
                _ratio(s).detach().clamp(max=_token_ess(all)) * s.advantage * s.logp
                - (1 - _token_ess(all)) * (s.logp - s.mu + _bounded_exp(s.mu - s.logp) - 1)
            )
        ),
    ),
    "mu_grpo": ("group_mean", True, "sequence_token_mean", lambda _: _veto),
    "asymmetric": ("group_mean", True, "sequence_token_mean", lambda _: _asymmetric),
    "ctpo": ("group_mean", True, "token_mean", lambda _: _ctpo),
    "fspo": ("group_mean", True, "sequence_token_sum", lambda _: _fspo),
    # in bands that the far batch is on both sides of
    "mis_geometric": ("group_mean", True, "sequence_token_mean", lambda _: lambda s: _geometric(s, 0.5, 1.5)),
    "tis_veto": ("group_mean", True, "sequence_token_mean", lambda _: lambda s: _token_veto(s, 0.1)),
}
