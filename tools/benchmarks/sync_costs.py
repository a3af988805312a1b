"""Time of a weight update by broadcast, from rates: the formula of docs/weight_sync.md."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Bytes a second, but ``http_s``: seconds of one request. ``copy`` is from a rank's device to its host memory."""

    gather: float
    rename: float
    broadcast: float
    load: float
    copy: float
    http_s: float


#: What docs/weight_sync.md projects with.
CLUSTER = Rates(gather=3e9, rename=10e9, broadcast=40e9, load=1e12, copy=25e9, http_s=0.005)


def update_seconds(total: float, bucket: float, rates: Rates) -> float:
    """Pause of a server while ``total`` bytes come in buckets of ``bucket``: the sender fills one while the one before
    is broadcast and loaded, and each is asked for by a request."""
    count = math.ceil(total / bucket)
    fill = bucket / rates.gather + bucket / rates.rename
    take = bucket / rates.broadcast + bucket / rates.load
    return fill + count * (max(fill, take) + rates.http_s)


def stall_seconds(total: float, ranks: int, rates: Rates) -> float:
    """What a step waits for: each of ``ranks`` ranks copies its share."""
    return total / ranks / rates.copy
