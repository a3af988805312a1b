"""Serialized buckets, as SGLang reads them, to an orchestrator that is slow, silent, or does not want them any more."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vcpo_megatron.transport.messages import WeightsBucket
from vcpo_megatron.weight_sync.sender import TransferError
from vcpo_megatron.weight_sync.tensor.learner import TensorSender, serialize_bucket

PLAN = [[["a", "float32", [2]], ["b", "float32", [1]]], [["c", "float32", [3]]], [["d", "float32", [1]]]]
VALUES = {"a": [1.0, 2.0], "b": [3.0], "c": [4.0, 5.0, 6.0], "d": [7.0]}


class Receiver:
    """Takes the oldest bucket whenever the sender looks."""

    def __init__(self, act: Callable[[Receiver], None] | None = None, timeout_s: float = 5.0) -> None:
        self.sent: list[WeightsBucket] = []
        self.done = self.most = 0
        self.sender = TensorSender(PLAN, timeout_s, self.send, self.poll)
        self._act = act or Receiver.take

    def send(self, message: Any) -> None:
        self.sent.append(message)
        self.most = max(self.most, len(self.sent) - self.done)

    def poll(self, wait_s: float) -> None:
        self._act(self)

    def take(self) -> None:
        self.sender.on_taken("t", self.done)
        self.done += 1

    def run(self) -> None:
        self.sender.send("t", iter((name, torch.tensor(values)) for name, values in VALUES.items()))


def test_every_tensor_comes_in_the_order_of_the_plan_and_two_buckets_exist_at_a_time() -> None:
    receiver = Receiver()
    receiver.run()
    found = [pair for bucket in receiver.sent for pair in pickle.loads(base64.b64decode(bucket.data))]
    assert {name: tensor.tolist() for name, tensor in found} == VALUES
    assert [(bucket.name, bucket.number) for bucket in receiver.sent] == [("t", 0), ("t", 1), ("t", 2)]
    assert receiver.most == 2 and receiver.done == 3


def test_a_silent_orchestrator_is_an_error_in_time() -> None:
    receiver = Receiver(lambda self: None, timeout_s=0.05)
    with pytest.raises(TransferError, match=r"no bucket .*for 0\.05 s \(rollout.sync_timeout_s\)"):
        receiver.run()
    assert len(receiver.sent) == 2


def test_an_answer_to_what_was_given_up_makes_no_room() -> None:
    receiver = Receiver(lambda self: self.sender.on_taken("s", 0), timeout_s=0.05)
    with pytest.raises(TransferError):
        receiver.run()
    assert len(receiver.sent) == 2


def test_what_the_look_raises_ends_the_sending() -> None:
    def give_up(self: Receiver) -> None:
        raise KeyError("given up")

    with pytest.raises(KeyError, match="given up"):
        Receiver(give_up).run()


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 1000, (3 << 20) // 4 + 1, 5 << 20])
def test_a_bucket_is_base64_of_a_pickled_list(size: int) -> None:
    tensors = [("a", torch.arange(size, dtype=torch.float32)), ("b", torch.ones(3, dtype=torch.bfloat16))]
    text = serialize_bucket(tensors)
    found = pickle.loads(base64.b64decode(text, validate=True))
    assert [name for name, _ in found] == ["a", "b"]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(found, tensors, strict=True))


def test_a_part_of_a_tensor_does_not_carry_the_whole() -> None:
    whole = torch.arange(300_000, dtype=torch.float32).reshape(3, 100_000)
    text = serialize_bucket([("row", whole[1]), ("column", whole[:, 7])])
    assert len(text) < 2 * whole[1].nbytes
    found = dict(pickle.loads(base64.b64decode(text)))
    assert torch.equal(found["row"], whole[1]) and found["column"].tolist() == [7.0, 100_007.0, 200_007.0]
