"""The sender of one rank against an orchestrator that is slow, gives up, or ends the run in mid-bucket."""

from __future__ import annotations

import base64
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.learner.run_weights import Control
from vcpo_megatron.config.process import ProcessContext
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.learner.weights.snapshots import Snapshots
from vcpo_megatron.transport.messages import (
    BucketTaken,
    OpenGroup,
    ReleaseWeights,
    SendingFailed,
    SendWeights,
    StopSending,
    WeightsBucket,
    WeightsReady,
    WeightsSent,
)
from vcpo_megatron.types import PolicyVersion
from vcpo_megatron.weight_sync.learner import WeightSender

pytestmark = pytest.mark.timeout(60)

NAMES = ("a", "b", "c", "d")


class Gatherer:
    """Four parameters, each a bucket of its own, all of the value that they had when they were copied."""

    def __init__(self) -> None:
        self.value = torch.zeros(1)

    def outline(self) -> dict[str, Any]:
        return {name: ((1,), torch.float32) for name in NAMES}

    def shards(self) -> dict[str, torch.Tensor]:
        return {name: self.value for name in NAMES}

    def stream(self, shard: Callable[[str], torch.Tensor], group: None) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, shard(name)) for name in NAMES)


@contextmanager
def sending(
    tmp_path: Path, *, timeout_s: float, sync_timeout_s: float
) -> Iterator[tuple[WeightSender, Control, Gatherer]]:
    values: dict[str, Any] = {
        "model": {"path": "/nowhere", "dtype": "float32"},
        "environment": {"name": "fake"},
        "train": {"steps": 1},
        "launch": {"timeout_s": timeout_s},
        "rollout": {"sync": "tensor", "bucket_bytes": 4, "sync_timeout_s": sync_timeout_s},
    }
    control, gatherer, one_rank = Control(), Gatherer(), SimpleNamespace(world_size=1, rank=0)
    sender = WeightSender(
        RunConfig.model_validate(values),
        ProcessContext(tmp_path, 1, None, "token", "tcp://none", ()),
        Snapshots(gatherer, one_rank, None),  # type: ignore[arg-type]
        control,  # type: ignore[arg-type]
    )
    try:
        yield sender, control, gatherer
    finally:
        sender.close()
        assert not sender._thread.is_alive()
        sender.check()


def version(number: int) -> PolicyVersion:
    return PolicyVersion(1, number)


def ask(sender: WeightSender, control: Control, name: str) -> None:
    """Publish version 1.0 and ask for it."""
    sender.publish(version(0))
    control.next(WeightsReady)
    control.post_to_sender(SendWeights(name, version(0)))


def test_training_waits_for_room_as_long_as_the_update_of_a_server_may_take(tmp_path: Path) -> None:
    """A server hangs in a bucket: the versions that come meanwhile cannot be offered, nor given back."""
    with sending(tmp_path, timeout_s=0.2, sync_timeout_s=30.0) as (sender, control, _):
        ask(sender, control, "t-1")
        control.next(WeightsBucket)
        for number in (1, 2):  # an evaluation may hold one of the three
            sender.publish(version(number))

        def give_up() -> None:
            control.post_to_sender(StopSending("out of time in step bucket 1 of 4"))
            control.post_to_sender(ReleaseWeights(version(0)))

        later = threading.Timer(1.0, give_up)
        later.start()
        started = time.monotonic()
        sender.publish(version(3))
        assert time.monotonic() - started > 0.5
        later.join(10)


def test_what_is_asked_for_after_a_failure_begins_anew(tmp_path: Path) -> None:
    with sending(tmp_path, timeout_s=5.0, sync_timeout_s=30.0) as (sender, control, gatherer):
        for number in (0, 1):
            gatherer.value = torch.full((1,), float(number))
            sender.publish(version(number))
            control.next(WeightsReady)
        control.post_to_sender(SendWeights("t-1", version(0)))
        assert [control.next(WeightsBucket).number for _ in range(2)] == [0, 1]
        control.post_to_sender(StopSending("a server refused"))
        control.post_to_sender(BucketTaken("t-1", 0))  # by another server, too late
        control.post_to_sender(SendWeights("t-2", version(1)))
        for number, name in enumerate(NAMES):
            bucket = control.next(WeightsBucket)
            assert (bucket.name, bucket.number) == ("t-2", number)
            ((found, tensor),) = pickle.loads(base64.b64decode(bucket.data))
            assert (found, tensor.tolist()) == (name, [1.0])
            control.post_to_sender(BucketTaken("t-2", number))
        assert control.next(WeightsSent) == WeightsSent("t-2", version(1), {})


def test_a_failure_names_what_was_asked_for(tmp_path: Path) -> None:
    with sending(tmp_path, timeout_s=5.0, sync_timeout_s=0.1) as (sender, control, _):
        ask(sender, control, "t-7")
        for _ in range(2):
            control.next(WeightsBucket)
        failed = control.next(SendingFailed)
        assert failed.name == "t-7" and "took no bucket of weights for 0.1 s" in failed.reason


def test_a_run_that_ends_does_not_wait_for_a_bucket_on_its_way(tmp_path: Path) -> None:
    with sending(tmp_path, timeout_s=60.0, sync_timeout_s=60.0) as (sender, control, _):
        ask(sender, control, "t-1")
        control.next(WeightsBucket)
        started = time.monotonic()
        sender.close()
        assert not sender._thread.is_alive() and time.monotonic() - started < 5.0


def test_what_a_transport_does_not_have_is_answered_as_a_failure(tmp_path: Path) -> None:
    with sending(tmp_path, timeout_s=5.0, sync_timeout_s=5.0) as (_, control, _):
        control.post_to_sender(OpenGroup("g-1", 2))
        failed = control.next(SendingFailed)
        assert failed.name == "g-1" and "this transport has none" in failed.reason
