"""The run's end of a conversation with a host: questions that wait for their replies, and episodes made of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...run.tasks import RunError
from ..base import Observation, Outcome
from ..client import Description, EpisodeFailure, Prompt
from .messages import Message, MessageError

#: A question that workers die of by another's fault is asked so often.
TRIES = 3
#: Jobs of a host that are known by what they are about.
_REMEMBERED = 16384


@dataclass(frozen=True)
class Waiting:
    """A question that has no reply yet; ``asked``: when, on the monotonic clock."""

    reply: asyncio.Future[Message]
    asked: float


@dataclass
class Tally:
    """``outcomes``: episodes that came to their end, in all workers together."""

    outcomes: int = 0


class Conversation:
    """Questions to one host, by the number of their job. ``send`` takes messages; ``on_message`` gets its replies."""

    def __init__(self, send: Callable[[Message], None], tally: Tally) -> None:
        self._send, self._tally = send, tally
        #: Jobs that owe a reply.
        self.waiting: dict[int, Waiting] = {}
        #: Episodes that have begun and have not ended.
        self.open: set[int] = set()
        self._about: dict[int, str] = {}  # the latest jobs, in order
        self._over: str | None = None

    def ask(self, message: Message, about: str) -> asyncio.Future[Message]:
        """The reply to ``message``, whose second item is its job; EpisodeFailure for one that failed. ``about``: its
        prompt, in words."""
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        if self._over is not None:
            reply.set_exception(EpisodeFailure(self._over, "none"))
        else:
            self.waiting[message[1]] = Waiting(reply, time.monotonic())
            self._about[message[1]] = about
            if len(self._about) > _REMEMBERED:
                del self._about[next(iter(self._about))]
            self._send(message)
        return reply

    def about(self, job: int) -> str | None:
        """What a job was about, also of one that was given up: its host may still be busy with it."""
        return self._about.get(job)

    def close(self, job: int) -> None:
        """Give an open episode up."""
        self.waiting.pop(job, None)
        if job in self.open and self._over is None:
            self._send(["close", job])
        self.open.discard(job)

    def on_message(self, message: Message) -> None:
        """MessageError when it is no reply."""
        match message:
            case ["observed" | "ended" | "answer" | "failed" as kind, int(job), _, *_]:
                waiting = self.waiting.pop(job, None)
            case _:
                raise MessageError(f"unknown reply {message[0]!r}")
        if kind in ("ended", "failed"):
            self.open.discard(job)
        self._tally.outcomes += kind == "ended"
        if waiting is None or waiting.reply.done():
            return  # given up meanwhile
        if kind == "failed":
            waiting.reply.set_exception(EpisodeFailure(str(message[2])))
        else:
            waiting.reply.set_result(message)

    def end(self, why: str) -> dict[int, Waiting]:
        """The host is gone: whatever is asked from now on fails with ``why``. Questions without a reply, whose futures
        the caller settles."""
        self._over = self._over or why
        left, self.waiting = self.waiting, {}
        self.open.clear()
        return left


def settle(question: Waiting, error: EpisodeFailure) -> None:
    """It gets no reply: ``error`` to whoever waits for it, if anybody does."""
    if not question.reply.done():
        question.reply.set_exception(error)
        question.reply.exception()  # seen: the one who asked may be gone


class RemoteEpisode:
    """An episode of ``prompt`` as job ``job``. ``place()`` chooses the host when it begins."""

    def __init__(self, prompt: Prompt, job: int, place: Callable[[], Awaitable[Conversation]]) -> None:
        self._prompt, self._job, self._place = prompt, job, place
        self._host: Conversation | None = None

    async def reset(self) -> tuple[int, ...]:
        """See ``EpisodeClient``."""
        self._host = await self._place()
        self._host.open.add(self._job)
        _, _, token_ids = await self._ask(["reset", self._job, self._prompt.stream, self._prompt.index])
        return tuple(token_ids)

    async def step(self, token_ids: Sequence[int], finish_reason: str) -> Observation | Outcome:
        """See ``EpisodeClient``."""
        match await self._ask(["step", self._job, list(token_ids), finish_reason]):
            case ["ended", _, float(reward), dict(info)]:
                return Outcome(reward, info)
            case ["observed", _, list(seen)]:
                return Observation(tuple(seen))
            case other:
                raise EpisodeFailure(f"its worker answered {other!r}")

    async def _ask(self, message: Message) -> Any:
        assert self._host is not None, "an episode begins with reset"
        return await self._host.ask(message, f"prompt {self._prompt.prompt_id}")

    def close(self) -> None:
        """See ``EpisodeClient``."""
        if self._host is not None:
            self._host.close(self._job)


class RemoteEnvironment:
    """The questions of an ``EnvironmentClient``; where they go is the business of those that derive from it."""

    description: Description
    _last_job = 0

    async def _place(self) -> Conversation:
        """The host of the next job."""
        raise NotImplementedError

    async def train_prompt(self, index: int) -> Prompt:
        """See ``EnvironmentClient``."""
        return Prompt(await self._ask("prompt", index, f"train_example({index})"), "train", index)

    async def reference(self, prompt: Prompt) -> tuple[int, ...]:
        """Tokens of an answer that the environment gives for right; none where it does not say. RunError."""
        about = f"the reference answer of prompt {prompt.prompt_id}"
        return tuple(await self._ask("reference", [prompt.stream, prompt.index], about))

    def episode(self, prompt: Prompt) -> RemoteEpisode:
        """See ``EnvironmentClient``."""
        return RemoteEpisode(prompt, self._new_job(), self._place)

    def _new_job(self) -> int:
        self._last_job += 1
        return self._last_job

    async def _ask(self, kind: str, what: Any, about: str) -> Any:
        """The answer to a question that is no episode's. It is asked again when another's fault ended the worker."""
        tries = 0
        while True:
            host, tries = await self._place(), tries + 1
            try:
                _, _, answer = await host.ask([kind, self._new_job(), what], about)
                return answer
            except EpisodeFailure as error:
                if error.blame == "own" or tries == TRIES:
                    raise RunError(f"environment {self.description.name}: {about} has no answer: {error}") from error


def described(said: Mapping[str, Any]) -> Description:
    """What a host said of its environment."""
    heldout = tuple(Prompt(name, "heldout", index) for index, name in enumerate(said["heldout"]))
    sampling = {key: tuple(value) if isinstance(value, list) else value for key, value in said["sampling"].items()}
    return Description(
        said["name"], said["fingerprint"], sampling, said["max_prompt_tokens"], heldout, tuple(said["notes"])
    )
