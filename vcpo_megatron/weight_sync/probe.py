"""Do learner and servers compute the same function, and does a server follow when the learner moves? No torch.

Both know the log-probs of one fixed token sequence: the learner those of every version, which come with its weights,
and a server is asked after every load. Parameters cannot be compared instead without reading all of them
(``rollout.verify_sync`` does): each side stores them in its own layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_LENGTH = 16
#: Largest difference of a log-prob that the arithmetic of a dtype explains.
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
#: Largest change of the learner's log-probs, of a dtype, that may leave a server's as they are to the last bit.
_UNSEEN = {"float32": 1e-4, "bfloat16": 1e-3}
#: Differences of a server's movement from the learner's, in tolerances, that are not taken for a fault; what is larger
#: must be less than half of the movement.
_SLACK = 8


def probe_tokens(vocab_size: int) -> np.ndarray:
    """int32 [16], the same for every run of one vocabulary."""
    return (np.arange(_LENGTH, dtype=np.int64) * 7919 % vocab_size).astype(np.int32)


@dataclass(frozen=True)
class _Seen:
    """Log-probs float64 [15] of a server, and of the learner's version that it had taken."""

    server: np.ndarray
    learner: np.ndarray


class Movement:
    """Whether one server follows the learner, by its log-probs after every load. ``dtype`` is that of the parameters.

    A difference between the two is no fault by itself, since they may round differently, and so differ more as a
    policy sharpens. What is held against each other is how far they moved: since the server last moved at all, and
    since the first load.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._first: _Seen | None = None
        self._moved: _Seen | None = None

    def problem(self, server: np.ndarray, learner: np.ndarray) -> str | None:
        """Why the ``server``, with these log-probs [15], does not compute with the weights that gave the ``learner``
        its own; None where it may."""
        seen = _Seen(np.asarray(server, np.float64), np.asarray(learner, np.float64))
        if seen.server.shape != seen.learner.shape:
            return f"scores {seen.server.size} tokens of the probe, the learner {seen.learner.size}"
        if self._first is None or self._moved is None:
            self._first = self._moved = seen
            return None
        if not np.array_equal(seen.server, self._moved.server):
            self._moved = seen
        elif (change := float(np.max(np.abs(seen.learner - self._moved.learner)))) > _UNSEEN[self._dtype]:
            return f"still computes what it did before (the learner's log-probs of a probe changed by {change:.3g})"
        return self._astray(seen, self._first)

    def _astray(self, seen: _Seen, first: _Seen) -> str | None:
        learner = seen.learner - first.learner
        difference = float(np.linalg.norm(seen.server - first.server - learner))
        slack = _SLACK * TOLERANCE[self._dtype] * math.sqrt(len(learner))
        if difference <= max(slack, float(np.linalg.norm(learner)) / 2):
            return None
        own, other = (float(np.linalg.norm(moved)) for moved in (seen.server - first.server, learner))
        return (
            f"does not follow the learner (since the first load its log-probs of a probe moved by {own:.3g}, the "
            f"learner's by {other:.3g}, in directions that differ by {difference:.3g})"
        )
