"""Least seconds of a step's extra work, worked out by hand for rates that make it easy."""

from __future__ import annotations

import pytest
from benchmarks import roofline

RATES = roofline.MachineRates(product=1e6, far=1e3, near=1e4)


def test_reference_passes_over_full_buffers_eight_times_a_trajectory() -> None:
    """1,000 parameters: zeroed (1), squared (1), added twice (3 each), 4 bytes an element, from memory."""
    seconds = roofline.extra_seconds("reference", [10, 20, 30], [(20, 10)], 1000, RATES)
    assert seconds == pytest.approx(3 * 8 * 4 * 1000 / 1e3)


def test_exact_ways_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline.platform, "has_gpu", lambda: False)
    layer = (1000, 1000)  # crossover 500
    # 600 tokens: W_i is made, read, and added twice, in cache; or made, read, and added once
    assert roofline.extra_seconds("accumulate", [600], [layer], 0, RATES) == pytest.approx(8 * 4 * 1e6 / 1e4)
    assert roofline.extra_seconds("deferred", [600], [layer], 0, RATES) == pytest.approx(5 * 4 * 1e6 / 1e4)
    # 10 tokens: 2 T^2 (d_in + d_out) FLOPs for the norm, and a second product where sums are accumulated
    gram, product = 2 * 100 * 2000, 2 * 10 * 1e6
    assert roofline.extra_seconds("deferred", [10], [layer], 0, RATES) == pytest.approx(gram / 1e6)
    assert roofline.extra_seconds("accumulate", [10], [layer], 0, RATES) == pytest.approx((gram + product) / 1e6)
    assert roofline.plain_seconds([10, 5], [layer], RATES) == pytest.approx(6 * 15 * 1e6 / 1e6)


def test_rates_are_measured() -> None:
    rates = roofline.measure(64, 64, 32)
    assert min(rates.product, rates.far, rates.near) > 1e6
