"""An environment of a test as a run sees it, without processes: the same host, which is asked directly."""

from __future__ import annotations

import asyncio
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vcpo_megatron.config.schema import EnvironmentConfig
from vcpo_megatron.environments.base import EnvironmentSetupError
from vcpo_megatron.environments.registry import make_environment
from vcpo_megatron.environments.workers import values
from vcpo_megatron.environments.workers.activity import Activity
from vcpo_megatron.environments.workers.episodes import Conversation, RemoteEnvironment, Tally, described
from vcpo_megatron.environments.workers.host import EnvironmentHost
from vcpo_megatron.environments.workers.setup import WorkerSetup
from vcpo_megatron.rollout.agent_loop import Generate, run_episode
from vcpo_megatron.types import Trajectory


class InProcess(RemoteEnvironment):
    """``environment``, whose episodes have ``limit_s`` seconds in its code. An ``EnvironmentClient``, to be made in the
    running event loop."""

    def __init__(self, environment: Any, limit_s: float = 60.0) -> None:
        heldout = values.heldout(environment)
        self.description = described(values.description(environment, heldout))
        self._conversation = Conversation(lambda message: self._host.handle(message), Tally())
        memory = Activity(mmap.mmap(-1, mmap.PAGESIZE))
        self._host = EnvironmentHost(environment, heldout, limit_s, self._conversation.on_message, memory)

    async def _place(self) -> Conversation:
        return self._conversation

    async def supervise(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def stop(self) -> None:
        await self._host.stop(5.0)


@contextmanager
def forgotten_modules() -> Iterator[None]:
    """A user's modules are forgotten at the end, and their folders: other tests have modules of the same names."""
    before, path = set(sys.modules), list(sys.path)
    yield
    added = [folder for folder in sys.path if folder not in path]
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(tuple(added) or "-"):
            del sys.modules[name]


def setup_problems(config: EnvironmentConfig, tokenizer_dir: Path, seed: int = 0) -> list[str]:
    """What keeps the environment of ``config`` from being made."""
    try:
        make_environment(config, tokenizer_dir, seed)
    except EnvironmentSetupError as error:
        return list(error.problems)
    return []


class InProcessPool(InProcess):
    """Takes the place of a ``WorkerPool`` where no code of a user runs; ``options``: as there."""

    def __init__(self, setup: WorkerSetup, **options: Any) -> None:
        super().__init__(make_environment(setup.environment, setup.tokenizer_dir, setup.seed))

    async def __aenter__(self) -> InProcessPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


async def play(generate: Generate, environment: Any, *, heldout: int | None = None, **how: Any) -> Trajectory:
    """One episode of the environment's first training prompt, or of a held-out one; ``how``: see ``run_episode``. The
    episode is closed when this returns."""
    how = {"group_id": 0, "sample_index": 0, "context_length": 100, "seed_for_turn": lambda turn: None, **how}
    client = InProcess(environment)
    try:
        prompt = await client.train_prompt(0) if heldout is None else client.description.heldout[heldout]
        return await run_episode(generate, client, prompt, **how)
    finally:
        await client.stop()
