"""Copies of the weights on the host: how many sets there are, and which of them are page-locked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vcpo_megatron.learner.weights.snapshots import SnapshotError, Snapshots
from vcpo_megatron.types import PolicyVersion

SHARDS = {"a": torch.zeros(64, 32, dtype=torch.bfloat16), "b": torch.zeros(128, dtype=torch.bfloat16)}
SET_BYTES = 2 * (64 * 32 + 128)


class OnGpu(torch.Tensor):
    """A tensor on the CPU that says it is not."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, torch.Tensor]]:
    """(pinned, memory) of every copy that is made room for."""
    found: list[tuple[bool, torch.Tensor]] = []

    def empty_like(tensor: torch.Tensor, *, device: str, pin_memory: bool) -> torch.Tensor:
        found.append((pin_memory, torch.empty(tensor.shape, dtype=tensor.dtype, device=device)))
        return found[-1][1]

    monkeypatch.setattr(torch, "empty_like", empty_like)
    return found


def snapshots(kind: type[torch.Tensor]) -> Snapshots:
    shards = {name: tensor.as_subclass(kind) for name, tensor in SHARDS.items()}
    gatherer: Any = SimpleNamespace(shards=lambda: shards, stream=lambda shard, group: [(n, shard(n)) for n in shards])
    parallel: Any = SimpleNamespace(rank=0, world_size=1)
    shape: Any = None
    return Snapshots(gatherer, parallel, shape)


def version(number: int) -> PolicyVersion:
    return PolicyVersion(1, number)


@pytest.mark.parametrize("at_most", [1, 2, 3])
def test_host_bytes_are_so_many_sets_and_two_of_them_are_pinned(
    made: list[tuple[bool, torch.Tensor]], at_most: int
) -> None:
    """Of a long run whose first version is held all along where there is room for it."""
    source = snapshots(OnGpu)
    for number in range(12):
        source.take(version(number), at_most, 5.0, lambda: None)
        if number >= at_most - 1:
            source.release(version(number if at_most == 1 else number - at_most + 2))
    assert sum(memory.nbytes for _, memory in made) == at_most * SET_BYTES
    assert sum(memory.nbytes for pinned, memory in made if pinned) == min(at_most, 2) * SET_BYTES


def test_none_is_pinned_without_a_gpu(made: list[tuple[bool, torch.Tensor]]) -> None:
    snapshots(torch.Tensor).take(version(1), 2, 5.0, lambda: None)
    assert [pinned for pinned, _ in made] == [False, False]


def test_more_than_there_is_room_for_is_an_error_that_names_what_is_held() -> None:
    source = snapshots(torch.Tensor)
    for number in (1, 2):
        source.take(version(number), 2, 5.0, lambda: None)
    with pytest.raises(SnapshotError, match=r"versions 1\.1, 1\.2 are still to be sent"):
        source.take(version(3), 2, 0.3, lambda: None)
