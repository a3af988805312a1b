"""Buckets as text to an orchestrator that is slow, silent, or does not want them any more."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vcpo_megatron.transport.messages import WeightsBucket
from vcpo_megatron.weight_sync.tensor.learner import NotTaken, TextSender

PLAN = [[["a", "float32", [2]], ["b", "float32", [1]]], [["c", "float32", [3]]], [["d", "float32", [1]]]]
VALUES = {"a": [1.0, 2.0], "b": [3.0], "c": [4.0, 5.0, 6.0], "d": [7.0]}


class Receiver:
    """Takes the oldest bucket whenever the sender looks."""

    def __init__(self, act: Callable[[Receiver], None] | None = None, timeout_s: float = 5.0) -> None:
        self.sent: list[WeightsBucket] = []
        self.done = self.most = 0
        self.sender = TextSender(PLAN, timeout_s, self.send, self.poll)
        self._act = act or Receiver.take

    def send(self, message: Any) -> None:
        self.sent.append(message)
        self.most = max(self.most, len(self.sent) - self.done)

    def poll(self, wait_s: float) -> None:
        self._act(self)

    def take(self) -> None:
        self.sender.taken("t", self.done)
        self.done += 1

    def run(self) -> None:
        self.sender.send("t", iter((name, torch.tensor(values)) for name, values in VALUES.items()))


def test_every_tensor_comes_in_the_order_of_the_plan_and_two_buckets_exist_at_a_time() -> None:
    receiver = Receiver()
    receiver.run()
    found = [pair for bucket in receiver.sent for pair in pickle.loads(base64.b64decode(bucket.text))]
    assert {name: tensor.tolist() for name, tensor in found} == VALUES
    assert [(bucket.name, bucket.number) for bucket in receiver.sent] == [("t", 0), ("t", 1), ("t", 2)]
    assert receiver.most == 2 and receiver.done == 3


def test_a_silent_orchestrator_is_an_error_in_time() -> None:
    receiver = Receiver(lambda self: None, timeout_s=0.05)
    with pytest.raises(NotTaken, match=r"took no bucket of weights for 0\.05 s \(rollout.sync_timeout_s\)"):
        receiver.run()
    assert len(receiver.sent) == 2


def test_an_answer_to_what_was_given_up_makes_no_room() -> None:
    receiver = Receiver(lambda self: self.sender.taken("s", 0), timeout_s=0.05)
    with pytest.raises(NotTaken):
        receiver.run()
    assert len(receiver.sent) == 2


def test_what_the_look_raises_ends_the_sending() -> None:
    def give_up(self: Receiver) -> None:
        raise KeyError("given up")

    with pytest.raises(KeyError, match="given up"):
        Receiver(give_up).run()
