"""Buckets of age and of length that a batch's trajectories are told apart by: few, fixed, and alike in every run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

#: A bucket with fewer trajectories has no effective sample size to speak of, and is left out.
FEWEST = 4


@dataclass(frozen=True, slots=True)
class MetricBucket:
    """Trajectories whose number is from ``least`` to ``most``, both included; ``key`` is the metric's name."""

    key: str
    least: int
    most: float

    @property
    def range(self) -> str:
        """In words."""
        if math.isinf(self.most):
            return f"{self.least} or more"
        return f"{self.least}" if self.most == self.least else f"{self.least} to {self.most:g}"


def _buckets(prefix: str, edges: tuple[int, ...]) -> Iterator[MetricBucket]:
    """Each edge begins a bucket; the last has no end."""
    for least, following in zip(edges, (*edges[1:], math.inf), strict=True):
        most = following - 1
        span = "up" if math.isinf(most) else f"{most:g}"
        yield MetricBucket(f"{prefix}_{least}" if most == least else f"{prefix}_{least}_{span}", least, most)


#: Age: learner version at use - oldest version that sampled a token.
AGES = tuple(_buckets("ess/ratio_age", (0, 1, 4, 16, 64, 256)))
#: Length: sampled tokens.
LENGTHS = tuple(_buckets("ess/ratio_len", (1, 65, 257, 1025, 4097, 16385)))
