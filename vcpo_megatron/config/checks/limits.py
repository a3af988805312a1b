"""Values that a number may have and no run can mean: a deadline of a millisecond, a bucket of one byte.

The schema says what a number is; here is the least that a run may be given, with its unit. Parts of a run can be made
with less (tests do).
"""

from __future__ import annotations

from collections.abc import Iterator

from ..load import flatten
from ..schema import RunConfig

#: Seconds that any key ending in ``_s`` has at least: below it the scheduler of the machine decides.
_LEAST_S = 0.1
#: "section.key" -> its least value.
_LEAST: dict[str, float] = {
    "rollout.bucket_bytes": 2**20,
    "rollout.health_timeout_s": 1.0,
    "rollout.request_timeout_s": 1.0,
    "rollout.start_timeout_s": 1.0,
    "rollout.sync_timeout_s": 1.0,
    "staleness.wait_s": 1.0,
    "launch.grace_s": 1.0,
    "launch.timeout_s": 1.0,
}
_UNITS = {"_s": "s", "_bytes": "bytes"}


def least(key: str) -> float | None:
    """The least value that a run may be given for "section.key"; None where the schema says all."""
    return _LEAST.get(key, _LEAST_S if key.endswith("_s") else None)


def limit_problems(config: RunConfig) -> Iterator[str]:
    """Every number that is too small for its unit."""
    for key, value in flatten(config).items():
        bound = least(key)
        if bound is not None and value is not None and value < bound:
            unit = next(word for ending, word in _UNITS.items() if key.endswith(ending))
            yield f"{key} = {value}: must be at least {bound:.7g} {unit}; is it in another unit?"
