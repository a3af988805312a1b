"""The orchestrator's end of the control channel: an answer that comes when nobody waits for it any more."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest

from vcpo_megatron.orchestrator.peers.learner import LearnerLink
from vcpo_megatron.transport.messages import ControlError, Hello, Message, ProbeResult, StepDone, WeightsReady
from vcpo_megatron.types import Batch, PolicyVersion, StepResult

pytestmark = pytest.mark.timeout(30)


class Channel:
    """A socket whose incoming messages the test puts in."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[Message] = asyncio.Queue()

    async def receive(self) -> Message:
        return await self.incoming.get()

    async def send(self, message: Message) -> None:
        pass


def test_an_answer_to_a_cancelled_question_is_dropped_once_and_one_to_none_is_an_error() -> None:
    async def scenario() -> None:
        channel, answer = Channel(), ProbeResult(np.zeros(1, np.float32))
        link = LearnerLink(cast(Any, channel), 20.0, on_weights=lambda message: None)
        receiving = asyncio.create_task(link.receive())
        asking = asyncio.create_task(link.probe(np.zeros(2, np.int32)))
        await asyncio.sleep(0)  # it has asked
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        channel.incoming.put_nowait(answer)
        await asyncio.wait([receiving], timeout=0.1)
        assert not receiving.done()
        channel.incoming.put_nowait(answer)
        with pytest.raises(ControlError, match="ProbeResult, which nobody asked for"):
            await asyncio.wait_for(receiving, 10.0)

    asyncio.run(scenario())


@pytest.mark.parametrize("follow", [False, True])
def test_weights_are_owed_after_a_step_only_where_the_learner_says_that_they_follow(follow: bool) -> None:
    async def scenario() -> None:
        channel, first = Channel(), PolicyVersion(1, 0)
        link = LearnerLink(cast(Any, channel), 0.3, on_weights=lambda message: None)
        receiving = asyncio.create_task(link.receive())
        for message in (Hello("t", first, 1), WeightsReady(first, "tensor", [])):
            channel.incoming.put_nowait(message)
        training = asyncio.create_task(link.train(Batch(0, ())))
        await asyncio.sleep(0)
        channel.incoming.put_nowait(StepDone(StepResult(0, PolicyVersion(1, 1), "", {}, ()), follow))
        assert await asyncio.wait_for(training, 10.0) is not None
        beating = asyncio.create_task(link.heartbeat())
        await asyncio.wait([beating], timeout=10.0 if follow else 0.6)
        if follow:
            with pytest.raises(ControlError, match="owed the weights"):
                beating.result()
        else:
            assert not beating.done()
        for task in (beating, receiving):
            task.cancel()
        await asyncio.wait([beating, receiving])

    asyncio.run(scenario())
