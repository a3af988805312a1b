"""Whether the rewards of a group differ: one rule for whoever trains, drops or counts zero-variance groups."""

from __future__ import annotations

from collections.abc import Collection

#: Rewards that differ by no more than this share of the largest one are equal. A reward that was computed in float32,
#: or averaged over some terms in another order, is off by less; what a reward function means to tell apart is not.
ROUNDING = 1e-6


def has_variance(rewards: Collection[float]) -> bool:
    """max R - min R > 1e-6 max |R| over the rewards of one group, at least one, all finite.

    The measure is relative, so that the unit of a reward does not matter: 3e-12 and 0 differ, 0.3 and 0.1 + 0.2 do not.
    """
    return max(rewards) - min(rewards) > ROUNDING * max(abs(reward) for reward in rewards)
