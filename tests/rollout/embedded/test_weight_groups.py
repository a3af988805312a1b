"""The memory that the embedded engine receives broadcasts into, against senders that are late or give up."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from vcpo_megatron.rollout.embedded.errors import RequestError
from vcpo_megatron.rollout.embedded.weight_groups import WeightGroups
from vcpo_megatron.rollout.embedded.weights import Parameters, UpdateSession
from vcpo_megatron.weight_sync.wire import GroupError

BODY = {"group_name": "g", "names": ["a"], "dtypes": ["float32"], "shapes": [[3]], "load_format": "flattened_bucket"}


class Group:
    """Broadcasts ``value`` in every element once it is let go."""

    def __init__(self, value: float, *, held: bool = False, error: str = "") -> None:
        self.value, self.error, self.go, self.done = value, error, threading.Event(), threading.Event()
        if not held:
            self.go.set()

    def broadcast(self, tensor: torch.Tensor) -> None:
        self.go.wait(10)
        if self.error:
            raise GroupError(self.error)
        tensor.view(torch.float32).fill_(self.value)
        self.done.set()


def groups_with(group: Group) -> WeightGroups:
    groups = WeightGroups()
    groups._groups["g"] = group  # type: ignore[assignment]
    return groups


def test_memory_of_a_loaded_update_is_used_again() -> None:
    async def main() -> None:
        groups = groups_with(Group(1.0))
        tensors, memory = await groups.receive(BODY)
        assert tensors[0][1].tolist() == [1.0] * 3
        groups.keep(memory)
        groups._groups["g"].value = 2.0  # type: ignore[attr-defined]
        again, same = await groups.receive(BODY)
        assert same[0] is memory[0] and again[0][1].tolist() == [2.0] * 3
        _, other = await groups.receive(BODY)  # it is given out once
        assert other[0] is not memory[0]

    asyncio.run(main())


def test_memory_that_a_late_broadcast_may_still_write_to_is_never_used_again() -> None:
    async def main() -> None:
        late = Group(9.0, held=True)
        groups = groups_with(late)
        first = torch.zeros(12, dtype=torch.uint8)
        groups.keep([first])
        given_up = asyncio.create_task(groups.receive(BODY))
        await asyncio.sleep(0.05)
        given_up.cancel()
        groups._groups["g"] = Group(2.0)  # type: ignore[assignment]
        tensors, memory = await groups.receive(BODY)
        late.go.set()
        assert await asyncio.to_thread(late.done.wait, 10)
        assert first.view(torch.float32).tolist() == [9.0] * 3
        assert memory[0] is not first and tensors[0][1].tolist() == [2.0] * 3

    asyncio.run(main())


def test_memory_of_a_failed_broadcast_is_let_go() -> None:
    async def main() -> None:
        groups = groups_with(Group(0.0, error="connection closed by peer"))
        groups.keep([torch.zeros(12, dtype=torch.uint8)])
        with pytest.raises(RequestError, match="closed by peer"):
            await groups.receive(BODY)
        assert groups._memory == []

    asyncio.run(main())


def test_a_session_hands_its_memory_over_only_with_an_update_that_may_be_loaded() -> None:
    session, flat = UpdateSession(Parameters({"a": torch.zeros(3)})), torch.zeros(12, dtype=torch.uint8)
    bucket: Any = [("a", flat.view(torch.float32))]
    session.begin()
    session.stage(bucket, "1", [flat])
    assert session.begin() == 1
    session.stage(bucket, "2", [flat])
    session.refuse("shape")
    with pytest.raises(RequestError, match="refused: shape"):
        session.end()
    session.begin()
    session.stage(bucket, "3", [flat])
    tensors, version, memory = session.end()
    assert (version, len(tensors)) == ("3", 1) and memory[0] is flat and session.begin() == 0
    assert session.end() == ([], None, [])
