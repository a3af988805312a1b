"""Peak memory is that of what happens inside, given back or not."""

from __future__ import annotations

import time

from benchmarks.memory import PeakMemory

MB = 1 << 20


def test_what_is_held_for_a_moment_is_seen() -> None:
    with PeakMemory() as peak:
        held = bytearray(b"x" * (64 * MB))
        time.sleep(0.2)
        del held
    assert 60 * MB < peak.extra < 256 * MB
    with PeakMemory() as idle:
        time.sleep(0.05)
    assert idle.extra < 32 * MB
