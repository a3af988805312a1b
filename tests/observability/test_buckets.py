"""The buckets tile all ages and lengths, and are named after what is in them."""

from __future__ import annotations

import math

from vcpo_megatron.observability.buckets import AGES, LENGTHS, MetricBucket
from vcpo_megatron.observability.metrics import METRICS


def test_they_tile_what_they_tell_apart() -> None:
    for buckets, first in ((AGES, 0), (LENGTHS, 1)):
        assert buckets[0].least == first and math.isinf(buckets[-1].most)
        assert all(a.most + 1 == b.least for a, b in zip(buckets, buckets[1:], strict=False))


def test_their_names() -> None:
    assert [bucket.key.removeprefix("ess/ratio_age_") for bucket in AGES] == "0 1_3 4_15 16_63 64_255 256_up".split()
    lengths = "1_64 65_256 257_1024 1025_4096 4097_16384 16385_up"
    assert [bucket.key.removeprefix("ess/ratio_len_") for bucket in LENGTHS] == lengths.split()
    assert {bucket.key for bucket in (*AGES, *LENGTHS)} <= METRICS.keys()
    assert [b.range for b in (MetricBucket("a", 0, 0), MetricBucket("b", 1, 3), MetricBucket("c", 4, math.inf))] == [
        "0",
        "1 to 3",
        "4 or more",
    ]
