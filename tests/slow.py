"""How a matrix is divided between the default suite and the slow one (the rule: pyproject.toml, ``slow``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def matrix(rows: Iterable[Any], default: Iterable[Any]) -> list[Any]:
    """Every one of ``rows`` as a parameter; those that are not in ``default`` are slow."""
    rows, kept = list(rows), list(default)
    unknown = [row for row in kept if row not in rows]
    assert not unknown, f"no such rows: {unknown}"
    return [
        pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=[] if row in kept else pytest.mark.slow)
        for row in rows
    ]


class Made(dict[Any, Any]):
    """What ``make(key)`` returns, made when it is asked for first: some rows of a matrix cost no more."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Any) -> Any:
        self[key] = self._make(key)
        return self[key]
