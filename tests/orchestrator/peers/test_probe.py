"""Which answers to the probe are held against which weights."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from vcpo_megatron.orchestrator.peers.probe import Prober
from vcpo_megatron.transport.messages import WeightsReady
from vcpo_megatron.types import PolicyVersion


@pytest.mark.parametrize("overtaken", ["before", "meanwhile"])
def test_log_probs_of_a_later_version_are_not_held_against_an_earlier_one(overtaken: str) -> None:
    """The second update comes before the probe of the first: the load of the second has changed something."""
    server: Any = type("Server", (), {})()  # servers are told apart by what they are
    prober = Prober(97, "float32")

    async def ask(number: int, computed: float, *, late: bool) -> object:
        server.version = PolicyVersion(1, number)
        server.updating = late and overtaken == "before"

        async def score(tokens: list[int]) -> list[float]:
            server.updating = server.updating or late
            return [computed] * 15

        server.client = SimpleNamespace(score=score)
        question = prober.question(server, WeightsReady(server.version, "tensor", probe=[-1.0 - number] * 15))
        assert question is not None
        return await question()

    assert asyncio.run(ask(0, -1.0, late=False)) is None
    assert asyncio.run(ask(1, -3.0, late=True)) is None
    assert asyncio.run(ask(2, -3.0, late=False)) is None
    assert asyncio.run(ask(3, -3.0, late=False)) is not None  # this one took its weights and kept the old ones
