"""Weights by broadcast and by disk: a server holds the bytes that were sent, or says what is wrong with them.

The sender is the learner's own broadcaster.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vcpo_megatron.conversion.dtypes import dtype_name
from vcpo_megatron.rollout.client.http import ServerClient, ServerError
from vcpo_megatron.rollout.client.protocol import TRIAL
from vcpo_megatron.weight_sync.distributed.broadcaster import Broadcaster
from vcpo_megatron.weight_sync.wire import flat_size

pytestmark = pytest.mark.timeout(400)  # longer than the sender and a server may take to start

START_S = 180.0
PROMPT = [5, 17, 42, 8, 60]
SLOT = 1 << 20
_names = iter(f"test-{i}" for i in range(1000))


def nothing() -> None:
    pass


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Broadcaster]:
    """A broadcaster whose process has started: on a busy machine that alone may take longer than a scenario may."""
    started = Broadcaster(SLOT, "gloo", START_S, tmp_path / "log")
    started.open("started", 1, nothing)
    yield started
    started.kill()


async def join(client: ServerClient, sender: Broadcaster) -> str:
    """Name of a group that the sender and the server are in."""
    name = next(_names)
    port = await asyncio.to_thread(sender.open, name, 2, nothing)
    await client.init_weights_update_group("127.0.0.1", port, 1, 2, name, "gloo")
    return name


def entries(tensors: list[tuple[str, Any]]) -> list[list[Any]]:
    return [[name, dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in tensors]


def fill(sender: Broadcaster, group: str, number: int, tensors: list[tuple[str, Any]]) -> None:
    flat = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for _, tensor in tensors])
    sender.slot(number, nothing)[: len(flat)].copy_(flat)
    sender.broadcast(group, number, len(flat))


def close(got: Any, expected: Any) -> bool:
    return len(got) == len(expected) and all(abs(a - b) < 1e-5 for a, b in zip(got, expected, strict=True))


def test_a_group_is_tried_without_a_pause_and_leaves_the_weights_alone(
    use: Callable[..., Any], sender: Broadcaster
) -> None:
    """What it is tried with has a name that no server loads."""

    async def scenario(client: ServerClient) -> None:
        group = await join(client, sender)
        before = await client.weights_checksums()
        sender.broadcast(group, 0, flat_size(TRIAL))
        await client.begin_weight_update()
        await client.update_weights_from_distributed(TRIAL, group, None)
        await client.end_weight_update()
        await asyncio.to_thread(sender.finish, nothing)
        assert await client.weights_checksums() == before

    use(scenario)


def test_two_buckets_by_broadcast(use: Callable[..., Any], versions: Any, sender: Broadcaster) -> None:
    async def scenario(client: ServerClient) -> None:
        group = await join(client, sender)
        for version in ("1", "2"):  # the group is used again
            tensors = versions.tensors(version)
            await client.pause("retract")
            await client.begin_weight_update()
            for number, bucket in enumerate((tensors[:3], tensors[3:])):
                fill(sender, group, number, bucket)
                await client.update_weights_from_distributed(entries(bucket), group, version)
            await asyncio.to_thread(sender.finish, nothing)
            await client.end_weight_update()
            await client.resume()
            assert close(await client.score(PROMPT), versions.logprobs(version, PROMPT))
            assert (await client.model_info())["weight_version"] == version
        await client.destroy_weights_update_group(group)
        with pytest.raises(ServerError, match="does not exist"):
            await client.destroy_weights_update_group(group)

    use(scenario)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: ["model.unknown", *row[1:]], "unknown parameter"),
        (lambda row: [row[0], row[1], [row[2][0] * row[2][1]]], "has shape"),
        (lambda row: [row[0], "int8", row[2]], "dtype 'int8'"),
    ],
)
def test_a_bucket_that_does_not_fit_changes_nothing(
    change: Callable[[list[Any]], list[Any]], message: str, use: Callable[..., Any], versions: Any, sender: Broadcaster
) -> None:
    async def scenario(client: ServerClient) -> None:
        before = await client.score(PROMPT)
        group = await join(client, sender)
        tensors = versions.tensors("1")[:1]
        await client.begin_weight_update()
        fill(sender, group, 0, tensors)
        with pytest.raises(ServerError, match=message):
            await client.update_weights_from_distributed([change(entries(tensors)[0])], group, "1")
        with pytest.raises(ServerError, match="refused"):
            await client.end_weight_update()
        assert await client.score(PROMPT) == before

    use(scenario)


def test_without_a_session_or_a_group_it_is_refused_before_anything_is_received(use: Callable[..., Any]) -> None:
    async def scenario(client: ServerClient) -> None:
        with pytest.raises(ServerError, match="/begin_weight_update"):
            await client.update_weights_from_distributed([["a", "float32", [1]]], "nobody", "1")
        await client.begin_weight_update()
        with pytest.raises(ServerError, match="group nobody does not exist"):
            await client.update_weights_from_distributed([["a", "float32", [1]]], "nobody", "1")
        with pytest.raises(ServerError, match="refused"):
            await client.end_weight_update()
        with pytest.raises(ServerError, match="no store at"):
            await client.init_weights_update_group("127.0.0.1", 1, 1, 2, "none", "gloo")
        with pytest.raises(ServerError, match="rank_offset = 2"):
            await client.init_weights_update_group("127.0.0.1", 1, 2, 2, "none", "gloo")

    use(scenario)


def test_a_sender_that_dies_in_a_bucket_leaves_the_server_well(
    use: Callable[..., Any], versions: Any, sender: Broadcaster
) -> None:
    async def scenario(client: ServerClient) -> None:
        before = await client.score(PROMPT)
        group = await join(client, sender)
        await client.begin_weight_update()
        waiting = asyncio.create_task(
            client.update_weights_from_distributed(entries(versions.tensors("1")), group, "1")
        )
        await asyncio.sleep(0.3)
        assert not waiting.done() and await client.score(PROMPT) == before  # it serves while it waits
        sender.kill()
        with pytest.raises(ServerError, match="broadcast of weights failed"):
            await waiting
        with pytest.raises(ServerError, match="refused"):
            await client.end_weight_update()
        assert await client.score(PROMPT) == before

    use(scenario)


def test_a_folder_is_read_whole(use: Callable[..., Any], versions: Any) -> None:
    async def scenario(client: ServerClient) -> None:
        await client.update_weights_from_disk(str(versions.folder.parent / "1"), "1")
        assert close(await client.score(PROMPT), versions.logprobs("1", PROMPT))
        (one,) = await client.weights_checksums()
        await client.update_weights_from_disk(str(versions.folder.parent / "0"), "0")
        (zero,) = await client.weights_checksums()
        assert one.keys() == zero.keys() and all(len(checksum) == 16 for checksum in one.values())
        assert one["model.embed_tokens.weight"] != zero["model.embed_tokens.weight"]

    use(scenario)


@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_both_ranks_of_a_real_server_take_their_places_in_the_group(
    start_sglang: Callable[..., Any], versions: Any, sender: Broadcaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a joined server, which tells how many it has; each loads its part of what is broadcast."""
    core = min(os.sched_getaffinity(0))
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{core}|{core}")  # else it wants a memory node a rank
    server = start_sglang(versions.folder, "--tensor-parallel-size", "2")

    async def scenario() -> None:
        client = ServerClient(server.url, 97, 120.0)
        try:
            await client.check_capabilities()
            assert client.info.ranks == 2 and not client.info.on_gpus
            name, tensors = next(_names), versions.tensors("1")
            port = await asyncio.to_thread(sender.open, name, 3, nothing)
            await client.init_weights_update_group("127.0.0.1", port, 1, 3, name, "gloo")
            await client.pause("retract")
            await client.begin_weight_update()
            fill(sender, name, 0, tensors)
            await client.update_weights_from_distributed(entries(tensors), name, "1")
            await asyncio.to_thread(sender.finish, nothing)
            await client.end_weight_update()
            await client.resume()
            assert close(await client.score(PROMPT), versions.logprobs("1", PROMPT))
            assert len(await client.weights_checksums()) == 2
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 400))
