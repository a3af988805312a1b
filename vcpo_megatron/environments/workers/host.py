"""The environment and its episodes inside a worker: the boundary around a user's code.

A job is an episode, or a single question about a prompt or a text. Whatever a user's code raises in it, SystemExit and
a CancelledError of its own included, is a failed reply of this job alone. A job has ``limit_s`` seconds in a user's
code, in all of its calls together: what takes longer is answered "timed out", and cancelled. Code that does not let
itself be cancelled goes on unheard. An episode is closed when it has ended, in whatever way: after an outcome before
that is told, else in the background, where its errors go to the log.
"""

from __future__ import annotations

import asyncio
import time
import traceback
import types
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...run.text import kind_of, printable
from ..base import Action, Environment, Episode, Example, Outcome
from . import values
from .activity import Activity
from .messages import Message

#: Seconds that an episode gets to close itself when nobody waits for it.
CLOSE_S = 30.0
#: Seconds for which a cancelled call is waited for before its episode is closed all the same.
CANCEL_S = 5.0
#: Who holds the event loop for longer costs the others time, which is given back to them.
LONG_S = 0.05
#: How often the event loop says that it turns.
TICK_S = 0.5
#: Examples that are kept: those of the groups in flight.
_EXAMPLES = 1024
#: Kinds of failures whose traceback is written to the log, once each.
_TRACEBACKS = 50


@dataclass(eq=False)
class _Job:
    """``left_s``: seconds that it still has in a user's code; ``deadline``: the end of them in this call.

    ``held_s``: seconds for which it held the event loop, a long while at a time; ``lost_s``: for which others did, as
    far as it is known here; ``given_s``: of these, what was added to its deadlines. ``runs``: its call has begun.
    ``over``: nobody waits for a reply any more.
    """

    number: int
    left_s: float
    episode: Episode | None = None
    phase: str = ""
    deadline: float = 0.0
    held_s: float = 0.0
    lost_s: float = 0.0
    given_s: float = 0.0
    timer: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = None
    runs: bool = False
    over: bool = False


@dataclass
class _Tracebacks:
    """Writes the traceback of the first failure of each kind."""

    seen: set[str] = field(default_factory=set)

    def write(self, message: str, error: BaseException) -> None:
        kind = kind_of(message)
        if kind not in self.seen and len(self.seen) < _TRACEBACKS:
            self.seen.add(kind)
            print(printable(message), flush=True)
            try:
                traceback.print_exception(error)
            except Exception as second:  # fault boundary: a user's exception that cannot be shown
                print(f"(its traceback cannot be shown: {type(second).__name__})", flush=True)


class EnvironmentHost:
    """Serves ``environment``, whose held-out examples are ``heldout``; ``reply`` takes what is answered. To be made and
    used in a running event loop."""

    def __init__(
        self,
        environment: Environment,
        heldout: Sequence[Example],
        limit_s: float,
        reply: Callable[[Message], None],
        activity: Activity,
    ) -> None:
        self._environment = environment
        self._heldout = heldout
        self._limit_s = limit_s
        self._reply = reply
        self._activity = activity
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[int, _Job] = {}
        self._examples: OrderedDict[int, Example] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        self._tracebacks = _Tracebacks()
        self._held_s = 0.0
        self._tick()

    def _tick(self) -> None:
        self._activity.tick()
        self._loop.call_later(TICK_S, self._tick)

    def handle(self, message: Message) -> None:
        """Begin what ``message`` asks for; its reply comes later."""
        match message:
            case ["prompt", int(number), int(index)]:
                job = self._new(number)
                self._begin(job, self._prompt(job, index))
            case ["reset", int(number), str(stream), int(index)]:
                job = self._new(number)
                self._begin(job, self._reset(job, stream, index))
            case ["step", int(number), list(token_ids), str(finish_reason)]:
                if (known := self._jobs.get(number)) is not None:
                    self._begin(known, self._step(known, tuple(token_ids), finish_reason))
            case ["reference", int(number), [str(stream), int(index)]]:
                job = self._new(number)
                self._begin(job, self._reference(job, stream, index))
            case ["close", int(number)]:
                if (known := self._jobs.pop(number, None)) is not None:
                    self._give_up(known)
            case _:
                raise ValueError(f"unknown message {message!r}")

    def _new(self, number: int) -> _Job:
        self._jobs[number] = job = _Job(number, self._limit_s)
        return job

    # --- what jobs do -------------------------------------------------------------------------

    def _enter(self, job: _Job, phase: str) -> None:
        """The job's next call into a user's code; BadValue when the one before computed to beyond the deadline."""
        self._give_back(job)
        if time.monotonic() > job.deadline:
            raise values.BadValue(timed_out(job.phase, self._limit_s))
        job.phase = phase
        self._activity.enter(job.number, phase, job.deadline)

    def _example(self, job: _Job, stream: str, index: int) -> Example:
        if stream == "heldout":
            return self._heldout[index]
        if index in self._examples:
            self._examples.move_to_end(index)
            return self._examples[index]
        self._enter(job, "train_example")
        found = _checked(job, values.example, self._environment.train_example(index))
        self._examples[index] = found
        if len(self._examples) > _EXAMPLES:
            self._examples.popitem(last=False)
        return found

    async def _prompt(self, job: _Job, index: int) -> Message:
        prompt_id = self._example(job, "train", index).prompt_id
        self._jobs.pop(job.number, None)
        return ["answer", job.number, prompt_id]

    async def _reference(self, job: _Job, stream: str, index: int) -> Message:
        example = self._example(job, stream, index)
        self._enter(job, "reference")
        ask = getattr(self._environment, "reference", None)  # an environment need not have one
        tokens = [] if ask is None else _checked(job, values.tokens, ask(example))
        self._jobs.pop(job.number, None)
        return ["answer", job.number, tokens]

    async def _reset(self, job: _Job, stream: str, index: int) -> Message:
        example = self._example(job, stream, index)
        self._enter(job, "episode")
        job.episode = self._environment.episode(example)
        self._enter(job, "reset")
        return [
            "observed",
            job.number,
            _checked(job, values.prompt, await _checked(job, values.awaitable, job.episode.reset())),
        ]

    async def _step(self, job: _Job, token_ids: tuple[int, ...], finish_reason: str) -> Message:
        assert job.episode is not None
        text = self._text(job, token_ids) if token_ids else ""
        self._enter(job, "step")
        result = await _checked(job, values.awaitable, job.episode.step(Action(token_ids, text, finish_reason)))
        if isinstance(result, Outcome):
            reward, info = _checked(job, values.outcome, result)
            self._enter(job, "close")
            episode, job.episode = job.episode, None
            await _checked(job, values.awaitable, episode.close())
            self._jobs.pop(job.number, None)
            return ["ended", job.number, reward, info]
        return ["observed", job.number, _checked(job, values.observed, result)]

    def _text(self, job: _Job, token_ids: tuple[int, ...]) -> str:
        self._enter(job, "decode")
        return _checked(job, values.text, self._environment.decode(token_ids))

    # --- the boundary -------------------------------------------------------------------------

    def _begin(self, job: _Job, work: Coroutine[Any, Any, Message]) -> None:
        job.runs = False
        job.task = self._loop.create_task(self._run(job, work))

    async def _run(self, job: _Job, work: Coroutine[Any, Any, Message]) -> None:
        """Run one call of a job and answer it."""
        if job.over:
            return work.close()
        job.runs = True
        job.deadline = time.monotonic() + job.left_s
        job.lost_s = self._held_s - job.held_s
        job.timer = self._loop.call_later(job.left_s, self._too_late, job)
        result = await self._watched(work, job)
        if job.timer is not None:
            job.timer.cancel()
        if job.over:
            return
        self._give_back(job)
        job.left_s = job.deadline - time.monotonic()
        if isinstance(result, BaseException):
            self._fail(job, self._why(job, result))
        elif job.left_s <= 0:  # it computed to beyond its deadline
            self._fail(job, timed_out(job.phase, self._limit_s))
        else:
            self._reply(result)

    def _why(self, job: _Job, error: BaseException) -> str:
        if isinstance(error, values.BadValue):
            return str(error)
        message = values.raised(job.phase, error)
        self._tracebacks.write(message, error)
        return message

    @types.coroutine
    def _watched(self, work: Coroutine[Any, Any, Message], job: _Job) -> Generator[Any, Any, Message | BaseException]:
        """What ``work`` returns, or raises; whenever its code runs, the page of memory says so."""
        value, error = None, None
        while True:
            entered = time.monotonic()
            self._give_back(job)
            deadline = entered + self._limit_s if job.over else job.deadline
            self._activity.enter(job.number, job.phase, deadline)
            try:
                awaited = work.send(value) if error is None else work.throw(error)
            except StopIteration as end:
                return end.value
            except BaseException as raised:  # fault boundary: whatever a user's code raises; the caller answers it
                return raised
            finally:
                self._activity.leave()
                if (held := time.monotonic() - entered) > LONG_S:
                    self._held_s += held
                    job.held_s += held
            try:
                value, error = (yield awaited), None
            except BaseException as thrown:  # passed on to ``work``
                value, error = None, thrown

    def _give_back(self, job: _Job) -> None:
        """Add the time to a job's deadline in which others held the event loop, but a whole limit at most."""
        lost = self._held_s - job.held_s
        given = min(lost - job.lost_s, self._limit_s - job.given_s)
        job.lost_s = lost
        job.given_s += given
        job.deadline += given

    def _too_late(self, job: _Job) -> None:
        if job.over:
            return
        self._give_back(job)
        if (left := job.deadline - time.monotonic()) > 0:
            job.timer = self._loop.call_later(left, self._too_late, job)
        else:
            self._fail(job, timed_out(job.phase, self._limit_s))

    def _fail(self, job: _Job, message: str) -> None:
        self._jobs.pop(job.number, None)
        self._reply(["failed", job.number, message])
        self._give_up(job)

    def _give_up(self, job: _Job) -> None:
        """Nobody waits for ``job`` any more: cancel what it does, and close its episode."""
        job.over = True
        if job.timer is not None:
            job.timer.cancel()
        current = asyncio.current_task(self._loop)
        running = job.task if job.runs and job.task is not current else None
        if running is not None:
            running.cancel()
        if running is not None or job.episode is not None:
            task = self._loop.create_task(self._dismiss(job, running))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _dismiss(self, job: _Job, running: asyncio.Task[None] | None) -> None:
        if running is not None and not running.done():
            _, stuck = await asyncio.wait([running], timeout=CANCEL_S)
            if stuck:
                print(f"{job.phase} goes on {CANCEL_S:g} s after its cancellation; nobody hears it", flush=True)
        if job.episode is None:
            return
        closing = self._loop.create_task(self._close(job, job.episode))
        _, stuck = await asyncio.wait([closing], timeout=CLOSE_S)
        if stuck:
            closing.cancel()
            print(f"close did not return within {CLOSE_S:g} s; it is cancelled", flush=True)

    async def _close(self, job: _Job, episode: Episode) -> None:
        async def work() -> Message:
            await episode.close()
            return []

        job.phase, job.deadline = "close", time.monotonic() + CLOSE_S
        result = await self._watched(work(), job)
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            self._why(job, result)  # nobody waits for this: it is written down

    async def stop(self, grace_s: float) -> None:
        """Give up every job, and wait ``grace_s`` seconds for what is being closed."""
        for job in list(self._jobs.values()):
            self._give_up(job)
        self._jobs.clear()
        if self._closing:
            await asyncio.wait(self._closing, timeout=grace_s)


def timed_out(phase: str, limit_s: float) -> str:
    """Why an episode failed whose ``limit_s`` seconds in the environment's code were over in ``phase``."""
    return (
        f"timed out: {phase} did not return within the {limit_s:g} s that the environment's code has for an episode "
        "(environment.episode_timeout_s)"
    )


def _checked(job: _Job, check: Callable[[Any], Any], value: object) -> Any:
    try:
        return check(value)
    except values.BadValue as error:
        raise values.BadValue(f"{job.phase} {error}") from None
