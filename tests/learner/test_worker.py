"""When a rank sends weights; what a real one does is in ``tests/end_to_end``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vcpo_megatron.config.schema import TrainConfig
from vcpo_megatron.learner.worker import Worker
from vcpo_megatron.transport.messages import Message, StepDone
from vcpo_megatron.types import Batch, PolicyVersion, StepResult


class OfStandIns(Worker):
    """A rank at version 1 of a run whose batches have three updates; ``said``: messages, and versions of weights."""

    def __init__(self) -> None:
        self.said: list[Message | int] = []
        self._config: Any = SimpleNamespace(train=TrainConfig(steps=9, groups_per_step=3, updates_per_batch=3))
        self._version, self._stall_s = PolicyVersion(1, 1), 0.0
        self._step: Any = SimpleNamespace(run=lambda batch, version: StepResult(batch.step, version, "", {}, ()))
        self._sender: Any = SimpleNamespace()
        self._exports: Any = SimpleNamespace(is_due=lambda number: False)

    def _send(self, message: Message) -> None:
        self.said.append(message)

    def _set_doing(self, doing: str) -> None: ...

    def _publish_weights(self) -> None:
        self.said.append(self._version.number)
        self._stall_s = 0.25


def test_weights_follow_the_last_update_of_a_batch_and_are_announced() -> None:
    worker = OfStandIns()
    for step in range(1, 7):
        worker._train(Batch(step, ()))
    done = [message for message in worker.said if isinstance(message, StepDone)]
    assert [(message.result.version.number, message.weights_follow) for message in done] == [
        (2, False),
        (3, True),
        (4, False),
        (5, False),
        (6, True),
        (7, False),
    ]
    assert [number for number in worker.said if isinstance(number, int)] == [3, 6]
    assert worker.said[2] == 3  # after its StepDone
    # the seconds of a copy are those of the step that starts from it
    assert [message.result.metrics["time/sync_stall"] for message in done] == [0, 0, 0.25, 0, 0, 0.25]
