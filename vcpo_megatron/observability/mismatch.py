"""A warning when learner and rollout servers disagree on tokens that both computed with the same weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ..config.schema import RunConfig
from ..models.folder import read_model


class MismatchWatch:
    """Looks at every step's ``mismatch/mean``; speaks when it rises above ``observability.mismatch_warning``, and
    again each time it has doubled since."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._limit = config.observability.mismatch_warning

    def observe(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """The line for the user, or None when there is nothing (new) to say."""
        mean = metrics.get("mismatch/mean", math.nan)
        if mean <= self._config.observability.mismatch_warning:
            self._limit = self._config.observability.mismatch_warning
        if not mean > self._limit:
            return None
        self._limit = 2 * mean
        return (
            f"step {step}: learner and servers differ by {mean:.3g} nats on average (at most "
            f"{metrics['mismatch/max']:.3g}) over {metrics['mismatch/tokens']:.0f} tokens of the same version, above "
            f"observability.mismatch_warning = {self._config.observability.mismatch_warning:g}; likely causes: "
            f"{'; '.join(_likely_causes(self._config))}"
        )


def _likely_causes(config: RunConfig) -> Iterator[str]:
    """The most probable first."""
    if config.rollout.pause_mode == "in_place":
        yield 'rollout.pause_mode = "in_place" goes on with keys and values of older weights (use "retract")'
    if read_model(config.model.path).experts is not None:
        yield "the router chooses other experts in the learner than in the servers"
    if config.model.dtype == "bfloat16" and not config.model.fp32_lm_head:
        yield "model.fp32_lm_head = false rounds logits to 16 bits"
    elif config.model.upcasts_logits and config.rollout.addresses:
        yield "a server of rollout.addresses that was started without --enable-fp32-lm-head"
    if config.model.dtype == "bfloat16":
        yield "bfloat16 is rounded at different places by the two implementations"
    yield "a sampling option (temperature, top_p, a penalty) that only one side applies"
    yield "a server that does not hold the weights of the version that it names"
