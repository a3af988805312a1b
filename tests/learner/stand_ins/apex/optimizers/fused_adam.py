"""Adam with Apex's signature and its counter of steps by group."""

from __future__ import annotations

import torch

STEPS: list[int] = []  # parameters moved, one entry a call


class FusedAdam(torch.optim.Optimizer):
    def __init__(  # noqa: ANN204
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,  # noqa: ANN001
    ):
        assert bias_correction and adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ANN001, ANN201
        moved = 0
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            one, two = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, moved = self.state[p], moved + 1
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["exp_avg"].lerp_(p.grad, 1 - one)
                state["exp_avg_sq"].mul_(two).add_(p.grad.square(), alpha=1 - two)
                first = state["exp_avg"] / (1 - one ** group["step"])
                second = (state["exp_avg_sq"] / (1 - two ** group["step"])).sqrt() + group["eps"]
                p.sub_(group["lr"] * (first / second + group["weight_decay"] * p))
        STEPS.append(moved)


class FusedSGD:
    pass
