"""A random model of one of the benchmark's shapes, for checks that need no oracle: norms and gradients of one step."""

from __future__ import annotations

from typing import Any

from tests.gpu.checklist import Missed, Place


class Bench:
    """Its gradients are those of a step that is not taken: the parameters stay as they are."""

    def __init__(self, place: Place, dtype: str, **model: str) -> None:
        """``model``: more keys of [model]."""
        import torch
        from benchmarks import step as benchmark

        from vcpo_megatron.learner.megatron.parallel import initialize
        from vcpo_megatron.learner.megatron.training import build_trainable

        shape, median = ("10M", 512) if place.large else ("1M", 32)
        self._work = benchmark.Workload(shape, median, 2, 4, dtype=dtype)
        self._folder, self._model = place.folder, model
        self._batch = benchmark.make_batch(self._work)
        config = self.config({}, 4096)
        self.parallel = initialize(config)
        self.trainable = build_trainable(config, self.parallel, load=False)
        torch.manual_seed(0)
        for parameter in self.trainable.chunks[0].parameters():
            parameter.data.fill_(1.0) if parameter.dim() == 1 else parameter.data.normal_(0.0, 0.02)

    def config(self, keys: dict[str, str], pack: int) -> Any:
        """``keys`` of [algorithm]; ``pack``: tokens of a pack."""
        from benchmarks import step as benchmark

        made = benchmark.make_config(self._folder, self._work, keys)
        train = made.train.model_copy(update={"max_pack_tokens": pack})
        return made.model_copy(update={"model": made.model.model_copy(update=self._model), "train": train})

    def step(self, keys: dict[str, str], pack: int) -> Any:
        """A ``VcpoStep``, as often as it is called: its gradients are formed, its optimizer does nothing."""
        from vcpo_megatron.learner.step.vcpo_step import VcpoStep

        self.trainable.optimizer.step = lambda: (True, 0.0, None)
        return VcpoStep(self.config(keys, pack), self.parallel, self.trainable)

    def take(self, step: Any) -> Any:
        """The result of ``step`` on the batch."""
        from vcpo_megatron.types import PolicyVersion

        result = step.run(self._batch, PolicyVersion(1, 1))
        if result.skipped:
            raise Missed(f"the step was skipped: {result.skipped}")
        return result

    def gradient(self, keys: dict[str, str], pack: int) -> tuple[Any, list[Any]]:
        """(result of the step, gradients in fp32 on the host)."""
        step, gradients = self.step(keys, pack), []

        def instead() -> tuple[bool, float, None]:
            gradients.extend(p.main_grad.float().cpu().clone() for p in self.trainable.chunks[0].parameters())
            return True, 0.0, None

        self.trainable.optimizer.step = instead
        return self.take(step), gradients

    def close(self) -> None:
        """So that another can be built."""
        from tests.learner.world import leave_layout

        leave_layout()
