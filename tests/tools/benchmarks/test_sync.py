"""The formula of the page on weight synchronisation, by hand."""

from __future__ import annotations

import pytest
from benchmarks.sync import CLUSTER, SyncRates, stall_seconds, update_seconds


def test_the_slower_side_bounds_a_bucket() -> None:
    """10 buckets of 1 B. Filling takes 1 + 1 s; receiving and loading 1 + 4 s, then 0.25 + 0.25 s."""
    slow_server = SyncRates(gather=1, rename=1, broadcast=1, load=0.25, copy=2, http_s=0.5)
    assert update_seconds(10, 1, slow_server) == pytest.approx(2 + 10 * (5 + 0.5))
    slow_sender = SyncRates(gather=1, rename=1, broadcast=4, load=4, copy=2, http_s=0.0)
    assert update_seconds(10, 1, slow_sender) == pytest.approx(2 + 10 * 2)
    assert update_seconds(9.5, 1, slow_sender) == pytest.approx(2 + 10 * 2)
    assert stall_seconds(12, 3, slow_sender) == 2.0


def test_what_the_page_says_of_70b() -> None:
    assert update_seconds(140e9, 256e6, CLUSTER) == pytest.approx(63.5, abs=0.5)
    assert stall_seconds(140e9, 64, CLUSTER) == pytest.approx(0.0875, abs=1e-4)
