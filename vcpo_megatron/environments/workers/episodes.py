"""The run's end of a conversation with a host: questions that wait for their replies, and episodes made of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..base import Observation, Outcome
from ..client import EpisodeFailure, Prompt
from .messages import Message, MessageError


@dataclass(frozen=True)
class Waiting:
    """A question that has no reply yet; ``about``: the prompt that it is about, in words; ``asked``: when."""

    reply: asyncio.Future[Message]
    about: str
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
        self._over: str | None = None

    def ask(self, message: Message, about: str) -> asyncio.Future[Message]:
        """The reply to ``message``, whose second item is its job; EpisodeFailure for one that failed."""
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        if self._over is not None:
            reply.set_exception(EpisodeFailure(self._over, "none"))
        else:
            self.waiting[message[1]] = Waiting(reply, about, time.monotonic())
            self._send(message)
        return reply

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
        self._over = why
        left, self.waiting = self.waiting, {}
        self.open.clear()
        return left


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
