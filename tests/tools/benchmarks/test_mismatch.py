"""What is left of ESS at length: all of it with recorded log-probs; shrinking loses the lag with the noise."""

from __future__ import annotations

import math

import pytest
from benchmarks.mismatch import WAYS, Outcome, Scene, draw, outcomes


def by_way(scene: Scene) -> dict[str, Outcome]:
    return {one.way: one for one in outcomes(scene)}


@pytest.mark.parametrize("noise", [0.031, 0.062])
@pytest.mark.parametrize("tokens", [512, 2048, 8192])
def test_without_lag_recorded_logprobs_keep_the_full_step_at_any_length(tokens: int, noise: float) -> None:
    found = by_way(Scene(128, tokens, noise))
    assert found["recorded"].ess >= 0.8 and found["recorded"].scale >= 0.9
    # exp(- L sigma^2) of endless batches, more of short ones
    assert found["none"].scale < 0.85 and (tokens * noise**2 < 1 or found["none"].scale < 0.6)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_a_true_lag_is_found_within_a_tenth_only_from_recorded_logprobs(kind: str) -> None:
    """Shrinking takes it out with the noise, whatever is known of both; then ESS looks better than it is."""
    found = by_way(Scene(128, 2048, 0.031, 0.5, kind))
    assert found.keys() == WAYS.keys()
    assert found["recorded"].error < 0.1
    assert found["recorded"].ess == pytest.approx(found["recorded"].true_ess, rel=0.02)
    for way in ("shrunk by batch", "shrunk by age", "shrunk by token"):
        assert found[way].error > 0.4 and found[way].ess > found[way].true_ess + 0.02, way
    assert found["none"].error > 2


def test_the_lag_has_the_size_that_it_is_said_to_have() -> None:
    for kind in ("dense", "sparse"):
        drawn = draw(Scene(2000, 200, 0.0, 0.5, kind))
        assert float(drawn.truth[drawn.aged].std()) == pytest.approx(0.5, rel=0.1), kind
        assert float(drawn.truth[~drawn.aged].abs().max()) == 0
        assert float((drawn.now - drawn.behavior).sum(1).sub(drawn.truth).abs().max()) < 1e-4
    # half the answers at 1, the others' sums normal with variance 1/4
    share = (1 + math.exp(0.125)) ** 2 / (2 * (1 + math.exp(0.5)))
    assert by_way(Scene(2000, 64, 1e-9, 0.5))["none"].true_ess == pytest.approx(share, abs=0.05)
