"""The limit of open files, with the process's own left alone."""

from __future__ import annotations

import re
import resource

import pytest

from vcpo_megatron.rollout.client.open_files import allow_connections

NONE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "raised", "refused"),
    [
        ((1024, 20000), (10256, 20000), None),
        ((20000, 20000), None, None),
        ((1024, NONE), (10256, NONE), None),
        ((NONE, NONE), None, None),
        ((1024, 4096), (4096, 4096), "10000 requests in flight need 10256 open files, the hard limit .* is 4096"),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_the_hard_one_allows(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], raised: tuple[int, int] | None, refused: str | None
) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: seen.append(new))
    found = allow_connections(10_000)
    assert seen == ([raised] if raised else [])
    assert (found is None) == (refused is None)
    assert re.search(refused or "", found or "")
