"""The orchestrator's end of the control channel: who asked, who waits, and for how long.

``LearnerLink.receive``    consumes: messages of the learner    produces: answers, ``on_weights`` calls
                           waits for: the next message          unblocked by: the learner
``LearnerLink.heartbeat``  consumes: nothing                    produces: Heartbeat, for the learner's own deadline
                           waits for: time; ends the run when weights are owed and the learner is silent
``train``, ``checkpoint``, ``probe``, ``score``
                           wait for: their answer               unblocked by: ``receive``, or by the learner's silence:
                           ``launch.timeout_s`` seconds without any message end the wait with ControlError

One question of a kind is open at a time. The learner answers in order, but for a checkpoint: it goes on to the next
question while that is being written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import numpy as np

from ...transport.messages import (
    AbortStep,
    BatchReady,
    Checkpoint,
    CheckpointDone,
    ControlError,
    Error,
    GroupOpened,
    GroupsScored,
    Heartbeat,
    Hello,
    Loaded,
    Message,
    Probe,
    ProbeResult,
    ScoreGroups,
    SendingFailed,
    StepAborted,
    StepDone,
    Stop,
    SyncDone,
    WeightsBucket,
    WeightsReady,
    WeightsSent,
)
from ...types import Batch, Group, PolicyVersion, StepResult

_M = TypeVar("_M", Hello, Loaded, ProbeResult, GroupsScored, StepDone, CheckpointDone, WeightsReady)


class ControlSocket(Protocol):
    """What the link needs of ``transport.control.ControlServer``."""

    async def receive(self) -> Message: ...

    async def send(self, message: Message) -> None: ...


class LearnerLink:
    """``on_weights`` is called for every WeightsReady, before it is acknowledged, and ``on_sender`` for what else the
    learner's sender of weights says. ``needs_weights``: it is an error when the learner does not send any after its
    start or after a step of which it says that they follow."""

    def __init__(
        self,
        socket: ControlSocket,
        timeout_s: float,
        *,
        on_weights: Callable[[WeightsReady], None],
        on_sender: Callable[[Message], None] = lambda message: None,
        needs_weights: bool = True,
    ) -> None:
        self._on_sender = on_sender
        self._needs_weights = needs_weights
        self._socket = socket
        self._timeout_s = timeout_s
        self._on_weights = on_weights
        self._answers: dict[type, asyncio.Future[Any]] = {}
        self._last_message_at = time.monotonic()
        #: What it does, as it said last.
        self.doing = "loads its libraries"
        self._asked: dict[type, str] = {}
        self._given_up: set[type] = set()  # asked for by somebody who was cancelled, or lost patience
        self._connected = False
        self._owes_weights = False
        self._weights = PolicyVersion(0, 0)  # the newest that came
        self._hello: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._loaded: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()

    # --- loops --------------------------------------------------------------------------------

    async def receive(self) -> None:
        """Dispatch messages until cancelled. ControlError when the learner reports an error or speaks out of turn."""
        while True:
            message = await self._socket.receive()
            self._last_message_at = time.monotonic()
            match message:
                case Error():
                    raise ControlError(f"{message.sender}: {message.message}")
                case Heartbeat():
                    self.doing = message.doing
                case WeightsReady():
                    self._owes_weights, self._weights = False, message.version
                    self._on_weights(message)
                    await self._socket.send(SyncDone(message.version))
                case GroupOpened() | WeightsBucket() | WeightsSent() | SendingFailed():
                    self._on_sender(message)
                case Hello():
                    if self._connected:
                        raise ControlError("the learner said hello twice: it was restarted behind the run's back")
                    self._connected = True
                    self._owes_weights = self._needs_weights
                    self._hello.set_result(message)
                case Loaded() if not self._loaded.done():
                    self._loaded.set_result(message)
                case _:
                    kind = StepDone if isinstance(message, StepAborted) else type(message)
                    waiting = self._answers.pop(kind, None)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(message)
                    elif kind in self._given_up:
                        self._given_up.remove(kind)  # an answer after its time must not hide why nobody waits for it
                    else:
                        raise ControlError(f"the learner sent {type(message).__name__}, which nobody asked for")

    async def heartbeat(self) -> None:
        """Tell the learner regularly that the orchestrator lives; ControlError when it owes weights and is silent."""
        while True:
            if self._owes_weights and time.monotonic() - self._last_message_at > self._timeout_s:
                raise ControlError(
                    f"the learner was silent for {self._timeout_s:g} s (launch.timeout_s) while it owed the weights of "
                    f"its newest version; it last said: {self.doing}"
                )
            if self._connected:
                await self._socket.send(Heartbeat("orchestrator", "running"))
            await asyncio.sleep(min(10.0, self._timeout_s / 4))

    # --- questions ----------------------------------------------------------------------------

    async def hello(self) -> Hello:
        """The learner's first message; ControlError when none comes in time."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._hello), self._timeout_s)
        except TimeoutError:
            raise ControlError(
                f"the learner did not connect within {self._timeout_s:g} s (launch.timeout_s); see its log"
            ) from None

    async def loaded(self) -> None:
        """Wait until the learner holds the parameters that this attempt begins with; ControlError when it is silent."""
        self._asked[Loaded] = "its parameters"
        await self._answer(self._loaded, Loaded)

    async def probe(self, tokens: np.ndarray) -> np.ndarray:
        """Log-probs float32 [L-1] of ``tokens`` int32 [L] under the learner's parameters."""
        return (await self._ask(Probe(tokens), ProbeResult)).logprobs

    async def score(self, batch: Batch) -> tuple[Group, ...]:
        """The groups of ``batch``, whose ``step`` is the learner's version, with its own log-probs of their tokens.
        ControlError when it answers by another version, or for other tokens."""
        answer = await self._ask(ScoreGroups(batch), GroupsScored)
        sizes = [sum(len(trajectory.tokens) for trajectory in group.trajectories) for group in batch.groups]
        if answer.version.number != batch.step or answer.logprobs.shape != (sum(sizes),):
            raise ControlError(
                f"the learner was asked for log-probs of {sum(sizes)} tokens by version {batch.step} and answered "
                f"{list(answer.logprobs.shape)} by version {answer.version}"
            )
        parts = np.split(answer.logprobs, np.cumsum(sizes)[:-1])
        return tuple(group.with_recorded(answer.version, own) for group, own in zip(batch.groups, parts, strict=True))

    async def train(self, batch: Batch) -> StepResult | None:
        """Have the learner take one step; None when it was aborted. ControlError when it answers for another one."""
        answer: StepDone | StepAborted = await self._ask(BatchReady(batch), StepDone)
        if isinstance(answer, StepAborted):
            return None
        result = answer.result
        if answer.weights_follow:
            self._owes_weights = self._needs_weights and self._weights < result.version
        if result.step != batch.step or result.version.number != batch.step + 1:
            raise ControlError(
                f"the learner was asked for step {batch.step} and answered step {result.step}, version {result.version}"
            )
        return result

    async def abort(self, step: int) -> None:
        """Ask the learner to abort ``step``, which ``train`` waits for."""
        await self._socket.send(AbortStep(step))

    async def checkpoint(self, step: int, state: dict[str, Any]) -> Coroutine[Any, Any, float]:
        """Have the learner save checkpoint ``step`` with our ``state`` in its manifest. Returns when it is asked,
        before any later question; what it returns waits for the checkpoint to be complete: seconds it took."""
        answer = await self._put(Checkpoint(step, state), CheckpointDone)
        return self._checkpoint_done(step, answer)

    async def _checkpoint_done(self, step: int, answer: asyncio.Future[CheckpointDone]) -> float:
        done = await self._answer(answer, CheckpointDone)
        if done.step != step:
            raise ControlError(f"the learner was asked for checkpoint {step} and answered {done.step}")
        return done.seconds

    async def stop(self, reason: str) -> None:
        """Tell the learner to end with exit code 0; nothing when it never connected."""
        if self._connected:
            await self._socket.send(Stop(reason))

    async def report(self, failure: str) -> None:
        """Tell the learner that the run failed, and why; nothing when it never connected."""
        if self._connected:
            await self._socket.send(Error("orchestrator", failure))

    async def send(self, message: Message) -> None:
        """Send what the learner's sender of weights is to do."""
        await self._socket.send(message)

    async def _ask(self, question: Message, kind: type[_M]) -> _M:
        return await self._answer(await self._put(question, kind), kind)

    async def _put(self, question: Message, kind: type[_M]) -> asyncio.Future[_M]:
        answer: asyncio.Future[_M] = asyncio.get_running_loop().create_future()
        self._answers[kind] = answer
        self._asked[kind] = type(question).__name__
        self._last_message_at = time.monotonic()
        await self._socket.send(question)
        return answer

    async def _answer(self, answer: asyncio.Future[_M], kind: type[_M]) -> _M:
        try:
            while not answer.done():
                left = self._last_message_at + self._timeout_s - time.monotonic()
                if left <= 0:
                    raise ControlError(
                        f"the learner was silent for {self._timeout_s:g} s (launch.timeout_s) while it owed "
                        f"{kind.__name__}; it last said: {self.doing}"
                    )
                await asyncio.wait([answer], timeout=left)
            return answer.result()
        finally:
            if not answer.done():
                self._given_up.add(kind)
            self._answers.pop(kind, None)
            self._asked.pop(kind, None)

    def describe(self) -> str:
        """One phrase for the watchdog."""
        silent = time.monotonic() - self._last_message_at
        asked = " and ".join(self._asked.values()) or "nothing"
        return f"learner asked for {asked}, silent for {silent:.0f} s, last said: {self.doing}"


def version_mismatch(hello: Hello, expected: PolicyVersion) -> str | None:
    """Why the learner that said ``hello`` is not the one this attempt needs, or None."""
    if hello.version == expected:
        return None
    return f"the learner's parameters are version {hello.version}, this attempt starts at {expected}"
