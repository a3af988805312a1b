"""Built-in environments are checked without a process."""

from __future__ import annotations

import pytest

from tests.environments.in_process import InProcessPool
from vcpo_megatron.orchestrator.modes import environment_check


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_check, "WorkerPool", InProcessPool)
