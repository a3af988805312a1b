"""The broadcasting process against groups of its receivers: bytes, two slots, and an end that nobody hangs in."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vcpo_megatron.rollout.client.protocol import TRIAL
from vcpo_megatron.weight_sync.distributed import broadcaster as broadcaster_module
from vcpo_megatron.weight_sync.distributed.broadcaster import Broadcaster, BroadcastError
from vcpo_megatron.weight_sync.distributed.learner import DistributedSender
from vcpo_megatron.weight_sync.plan import plan_buckets
from vcpo_megatron.weight_sync.wire import GroupError, WeightGroup, find_store, flat_size, unflatten

PATIENCE_S = 60.0
SLOT = 4096


@pytest.fixture
def broadcaster(tmp_path: Path) -> Iterator[Broadcaster]:
    sender = Broadcaster(SLOT, "gloo", PATIENCE_S, tmp_path / "log")
    yield sender
    sender.kill()


def nothing() -> None:
    pass


def join(port: int, name: str, rank: int, size: int) -> WeightGroup:
    return WeightGroup(find_store("127.0.0.1", port, PATIENCE_S), name, rank, size, "gloo", PATIENCE_S)


def test_two_receivers_get_every_bucket_and_a_kill_ends_the_wait_for_the_next(broadcaster: Broadcaster) -> None:
    port = broadcaster.open("g", 3, nothing)
    got: dict[int, list[torch.Tensor]] = {1: [], 2: []}
    ended: dict[int, float] = {}

    def receive(rank: int) -> None:
        group = join(port, "g", rank, 3)
        for size in (SLOT, 100, SLOT, 7):
            flat = torch.zeros(size, dtype=torch.uint8)
            group.broadcast(flat)
            got[rank].append(flat)
        with pytest.raises(GroupError, match="broadcast of weights failed"):
            group.broadcast(torch.zeros(SLOT, dtype=torch.uint8))  # never sent
        ended[rank] = time.monotonic()

    threads = [threading.Thread(target=receive, args=(rank,), daemon=True) for rank in got]
    for thread in threads:
        thread.start()
    sent = [torch.arange(size).mul(7).remainder(251).to(torch.uint8) for size in (SLOT, 100, SLOT, 7)]
    for number, flat in enumerate(sent):
        broadcaster.slot(number, nothing)[: len(flat)].copy_(flat)
        broadcaster.broadcast("g", number, len(flat))
    broadcaster.finish(nothing)
    deadline = time.monotonic() + PATIENCE_S
    while any(len(flats) < len(sent) for flats in got.values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # they wait for the next one
    killed = time.monotonic()
    broadcaster.kill()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert all(torch.equal(a, b) for rank in got for a, b in zip(got[rank], sent, strict=True))
    assert all(ended[rank] - killed < 5.0 for rank in got)


@pytest.mark.parametrize(
    ("answer", "launch", "said"),
    [
        (0, "", ""),
        (2, "", "cudaHostRegister: error 2"),
        (712, "CUDA error: already registered\nrun with ...", "CUDA error: already registered"),
    ],
)
def test_pages_are_locked_or_a_line_says_why_not(
    answer: int, launch: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error that CUDA keeps for the next launch is taken here, and is not the broadcast's."""
    memory, asked, launched = torch.zeros(SLOT, dtype=torch.uint8), [], []

    def register(*arguments: int) -> int:
        asked.append(arguments)
        return answer

    def zeros(size: int, device: str) -> None:
        launched.append(device)
        if launch:
            raise RuntimeError(launch)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch, "zeros", zeros)
    broadcaster_module.lock_pages(memory)
    assert asked == [(memory.data_ptr(), SLOT, 0)] and launched == ["cuda"] * bool(answer)
    out = capsys.readouterr().out
    assert out.count("\n") == bool(answer) and said in out and ("4,096 bytes are not locked" in out) == bool(answer)


def test_a_broadcast_that_nobody_takes_is_given_up_by_what_poll_raises(broadcaster: Broadcaster) -> None:
    """A tensor larger than the kernel's buffers, whose receiver is there and does not ask for it."""

    class Enough(Exception):
        pass

    port = broadcaster.open("g", 2, nothing)
    joined: list[WeightGroup] = []
    thread = threading.Thread(target=lambda: joined.append(join(port, "g", 1, 2)), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    for number in range(2):
        broadcaster.slot(number, nothing)
        broadcaster.broadcast("g", number, SLOT)
    started = time.monotonic()

    def poll() -> None:
        if time.monotonic() - started > 0.3:
            raise Enough

    try:
        for number in range(2, 2000):  # gloo takes small ones ahead; memory of the kernel ends some time
            broadcaster.slot(number, poll)
            broadcaster.broadcast("g", number, SLOT)
    except Enough:
        pass
    broadcaster.kill()
    assert time.monotonic() - started < 20


def test_a_broadcaster_that_starts_outlives_what_is_given_up_meanwhile(tmp_path: Path) -> None:
    """One that takes longer to start than an update waits for it would else be killed in every one."""

    def enough() -> None:
        raise TimeoutError

    plan = [[["a", "float32", [2]]]]
    sender = DistributedSender(plan, "gloo", PATIENCE_S, tmp_path / "log", enough, "10.1.2.3")
    try:
        sender.start()
        process = sender._broadcaster._process  # type: ignore[union-attr]
        with pytest.raises(TimeoutError):
            sender.open_group("g-1", 2)
        sender.abort()
        sender._poll = nothing
        opened = sender.open_group("g-2", 2)
        assert opened.address == "10.1.2.3"  # where servers are told to find it
        assert process.poll() is None
        flat, trial = torch.zeros(8, dtype=torch.uint8), torch.zeros(flat_size(TRIAL), dtype=torch.uint8)

        def receive() -> None:
            group = join(opened.port, "g-2", 1, 2)
            group.broadcast(trial)  # what a group is tried with comes first
            group.broadcast(flat)

        thread = threading.Thread(target=receive, daemon=True)
        thread.start()
        sender.send("g-2", iter([("a", torch.tensor([1.5, -2.0]))]))
        thread.join(PATIENCE_S)
        assert flat.view(torch.float32).tolist() == [1.5, -2.0]
        sender.abort()  # it is in a group now
        assert process.poll() is not None
    finally:
        sender.kill()


def test_a_broadcaster_that_dies_is_told_of(broadcaster: Broadcaster) -> None:
    broadcaster.open("g", 2, nothing)
    os.kill(broadcaster._process.pid, 9)
    with pytest.raises(BroadcastError, match="ended|gone"):
        broadcaster.open("h", 2, nothing)


def test_a_receiver_that_goes_away_is_told_of(tmp_path: Path) -> None:
    sender = Broadcaster(64 << 20, "gloo", PATIENCE_S, tmp_path / "log")
    try:
        port = sender.open("g", 2, nothing)
        child = os.fork()
        if child == 0:  # joins, and dies
            join(port, "g", 1, 2)
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(BroadcastError):
            for number in range(4):
                sender.slot(number, nothing)
                sender.broadcast("g", number, 64 << 20)
            sender.finish(nothing)
    finally:
        sender.kill()


@pytest.mark.parametrize(
    ("backend", "alike"), [("gloo", {}), ("nccl", {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1"})]
)
def test_the_broadcaster_alone_gets_what_both_ends_need_alike(
    backend: str, alike: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner's other groups keep NCCL's defaults; what a user sets holds at both ends."""
    given: list[dict[str, str]] = []

    def start(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        given.append(env)
        return None

    monkeypatch.setattr(broadcaster_module, "start_child", start)
    monkeypatch.setitem(os.environ, "NCCL_NVLS_ENABLE", "1")
    Broadcaster(SLOT, backend, PATIENCE_S, tmp_path / "log")._pipe.close()
    assert given == [alike]


def test_a_plan_cuts_at_the_limit_and_at_another_dtype() -> None:
    """Two floats are 8 bytes: a, b fit into 12, c does not any more, d is larger than a bucket."""
    shapes = {"a": (2,), "b": (1,), "c": (1, 1), "d": (4,), "e": (3,)}
    plan = plan_buckets({name: (shape, torch.float32) for name, shape in shapes.items()}, 12)
    assert [[name for name, _, _ in bucket] for bucket in plan] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert plan[1] == [["c", "float32", [1, 1]]]
    mixed = {"a": ((3,), torch.bfloat16), "b": ((1,), torch.float32), "c": ((1,), torch.float32)}
    assert plan_buckets(mixed, 100) == [[["a", "bfloat16", [3]]], [["b", "float32", [1]], ["c", "float32", [1]]]]


def test_a_flat_bucket_holds_its_tensors_one_after_the_other() -> None:
    entries = [("a", "float32", [2]), ("b", "bfloat16", [1, 3]), ("c", "bfloat16", [1])]
    flat = torch.cat(
        [torch.tensor([1.5, -2.0]).view(torch.uint8), torch.tensor([1.0, 2.0, 3.0, 4.0]).bfloat16().view(torch.uint8)]
    )
    assert flat_size(entries) == len(flat) == 16
    found = dict(unflatten(flat, entries))
    assert found["a"].tolist() == [1.5, -2.0] and found["b"].tolist() == [[1, 2, 3]] and found["c"].tolist() == [4]
    with pytest.raises(ValueError, match="dtype 'int8'"):
        flat_size([("a", "int8", [1])])
