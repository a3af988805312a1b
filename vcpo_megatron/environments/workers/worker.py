"""One worker process as its parent sees it: its start, its end, and whose fault that was."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...transport.child import signal_group, start_child
from ..base import EnvironmentSetupError
from ..client import Blame, EpisodeFailure
from .activity import Activity, Doing
from .episodes import Conversation, Tally, settle
from .host import timed_out
from .messages import Channel, Message, MessageError
from .setup import WorkerSetup

#: Beyond its deadline a call has this many seconds more before its worker is killed: the worker ends it if it can.
MARGIN_S = 1.0
#: An event loop that has not turned for so long is busy with one episode.
BUSY_S = 1.5
#: Seconds without any reply, beyond an episode's time, after which a worker whose event loop turns is taken to hang.
_UNHEARD_S = 60.0
_REAP_S = 10.0
_POLL_S = 0.02


class WorkerStartError(RuntimeError):
    """A worker ended before it had made its environment; the message is one line."""


class EnvironmentWorker:
    """``index`` of its log; ``on_end(worker)`` is called once, when the process has ended after it was ready.
    OSError when it cannot be started."""

    def __init__(
        self, index: int, setup: WorkerSetup, log: Path, tally: Tally, on_end: Callable[[EnvironmentWorker], None]
    ) -> None:
        self.index, self.log = index, log
        self._setup = setup
        self._on_end = on_end
        self._killed: str | None = None  # why, when it was us
        self._suspect = 0
        self._heard = time.monotonic()
        self._lost = asyncio.Event()
        self._lost_why = ""
        self._first: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._ending: asyncio.Task[None] | None = None
        ours, theirs = socket.socketpair()
        self.activity, page = Activity.create()
        try:
            self.process = _start(theirs.fileno(), page, log)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(page)
        self._socket = ours
        self._channel: Channel | None = None
        self.conversation = Conversation(self._send, tally)
        #: Whether it is busy with one episode: others are better off elsewhere.
        self.busy = False

    @property
    def name(self) -> str:
        return f"environment worker {self.index} (pid {self.process.pid})"

    async def make(self, timeout_s: float) -> dict[str, Any]:
        """Have it make the environment; what that says of itself. EnvironmentSetupError when it refuses its settings,
        WorkerStartError when it ends or takes longer."""
        loop = asyncio.get_running_loop()
        _, self._channel = await loop.create_unix_connection(
            lambda: Channel(self._on_message, self._on_lost), sock=self._socket
        )
        self._channel.send(["setup", pickle.dumps(self._setup)])
        lost = asyncio.ensure_future(self._lost.wait())
        waits: list[asyncio.Future[Any]] = [self._first, lost]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
        if self._first.done():
            match self._first.result():
                case ["ready", dict(description)]:
                    self._watch()
                    return description
                case ["refused", list(problems)]:
                    raise EnvironmentSetupError(*problems)
        what = f"environment.name = {self._setup.environment.name!r}: {self.name}"
        doing = self.activity.read()
        if not self._lost.is_set():
            where = f"{doing.phase} did not return" if doing.phase else "it did not answer"
            raise WorkerStartError(f"{what}: {where} within {timeout_s:g} s (launch.timeout_s); see {self.log}")
        await self._reap()
        where = f" in {doing.phase}" if doing.phase else ""
        raise WorkerStartError(f"{what} {self._how()}{where} while it made the environment; see {self.log}")

    # --- messages -----------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        assert self._channel is not None
        self._channel.send(message)

    def _on_message(self, message: Message) -> None:
        self._heard = time.monotonic()
        if not self._first.done():
            self._first.set_result(message)
            return
        try:
            self.conversation.on_message(message)
        except MessageError as error:
            self.kill(f"sent what is no message ({error})")

    def _on_lost(self, why: str) -> None:
        self._lost_why = why
        self._lost.set()

    # --- its end ------------------------------------------------------------------------------

    def look(self) -> None:
        """Kill it when it hangs: to be called now and then."""
        if self._killed is not None:
            return
        if self.process.poll() is not None:
            self._lost.set()  # whoever else holds its end of the socket
            return
        now, doing = time.monotonic(), self.activity.read()
        limit = self._setup.episode_timeout_s
        self.busy = now - doing.tick > BUSY_S
        overdue = doing.job != 0 and now > doing.deadline + MARGIN_S
        if overdue and doing.job == self._suspect:  # twice the same: not read while it was being written
            self.kill("was killed: it computed without awaiting beyond an episode's deadline")
        elif doing.job == 0 and now - doing.tick > limit + MARGIN_S:
            self.kill(f"was killed: it did not answer for {now - doing.tick:.1f} s (environment.episode_timeout_s)")
        elif self.conversation.waiting and now - max(self._heard, self._asked()) > limit + _UNHEARD_S:
            self.kill(f"was killed: it owed a reply and sent none for {now - self._heard:.0f} s")
        self._suspect = doing.job if overdue else 0

    def _asked(self) -> float:
        """When the oldest question that has no reply was asked."""
        return next(iter(self.conversation.waiting.values())).asked

    def kill(self, why: str) -> None:
        """End it by SIGKILL, grandchildren included; ``why`` follows its name in what is said of its end."""
        self._killed = self._killed or why
        signal_group(self.process, signal.SIGKILL)

    def _watch(self) -> None:
        async def watch() -> None:
            await self._lost.wait()
            await self._reap()
            self._on_end(self)

        self._ending = asyncio.create_task(watch())

    async def _reap(self) -> None:
        """Wait until the process is gone, which is killed if it only closed its connection; then what it left in its
        process group."""
        deadline = time.monotonic() + MARGIN_S
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                self.kill(self._lost_why or "was killed")
                deadline += _REAP_S
            await asyncio.sleep(_POLL_S)
        signal_group(self.process, signal.SIGKILL)

    def _how(self) -> str:
        """How it ended, to follow its name."""
        if self._killed is not None:
            return self._killed
        code = self.process.returncode
        if code >= 0:
            return f"ended with exit code {code}"
        hint = " (by hand, or by the system when memory runs out)" if -code == signal.SIGKILL else ""
        return f"ended with signal {signal.Signals(-code).name}{hint}"

    def settle(self) -> tuple[str, bool]:
        """Fail what still waited for it, each with its own share of the blame; one line for the log, and whether
        somebody is to blame."""
        doing, how = self.activity.read(), f"{self.name} {self._how()}"
        about = self.conversation.about(doing.job)
        line = f"{how}{f' in {doing.phase} of {about}' if about else ''}; see {self.log}"
        for job, question in self.conversation.end(line).items():
            blame: Blame = "own" if job == doing.job else "none" if doing.job else "unknown"
            settle(question, EpisodeFailure(self._reason(doing, line, blame), blame))
        return line, doing.job != 0

    def _reason(self, doing: Doing, line: str, blame: Blame) -> str:
        if blame == "own" and self._killed is not None and doing.job:
            limit = timed_out(doing.phase, self._setup.episode_timeout_s)
            return f"{limit}; it computed without awaiting, so {self.name} was killed, see {self.log}"
        return line

    # --- stopping -----------------------------------------------------------------------------

    def tell_to_stop(self) -> None:
        """It gives its episodes up and ends by itself, if it can."""
        if self._ending is None:
            return self.kill("was killed")  # it makes the environment, and hears nothing
        self._ending.cancel()
        self._send(["stop"])

    async def stopped(self, deadline: float) -> None:
        """Wait until it has ended, on the monotonic clock until ``deadline``; then it is killed."""
        while self.process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        self.kill("was killed")
        given_up = time.monotonic() + _REAP_S
        while self.process.poll() is None and time.monotonic() < given_up:
            await asyncio.sleep(_POLL_S)
        self.release()

    def release(self) -> None:
        """Give back what this process holds of one that has ended."""
        for question in self.conversation.end(f"{self.name} was stopped").values():
            settle(question, EpisodeFailure(f"{self.name} was stopped", "none"))
        if self._channel is not None:
            self._channel.close()
        else:
            self._socket.close()
        self.activity.close()


def _start(connection: int, page: int, log: Path) -> subprocess.Popen[bytes]:
    environment = {
        "PYTHONUNBUFFERED": "1",  # so that what was printed is in the log when the process dies
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),  # sets in the same order in all workers of all runs
    }
    command = [sys.executable, "-m", f"{__package__}", str(connection), str(page)]
    return start_child(command, env=environment, log=log, pass_fds=(connection, page))
