"""Training prompts by data position, fetched from the environment before they are needed.

``get``    consumes: data positions      produces: their prompts
           waits for: nothing; a fetch notifies when it is done
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ...environments.client import EnvironmentClient, Prompt
from ...run.notifier import Notifier
from ...run.tasks import cancel

#: Positions that are asked for ahead of the next one.
AHEAD = 16


class PromptSource:
    """Prompts of ``environment``'s training stream; ``changes`` hears of each that has come."""

    def __init__(self, environment: EnvironmentClient, changes: Notifier) -> None:
        self._environment = environment
        self._changes = changes
        self._fetches: dict[int, asyncio.Task[Prompt]] = {}

    def get(self, positions: Sequence[int]) -> Prompt | None:
        """The prompt at the first of ``positions``, None while it is being fetched; the others will be next. Raises
        what its fetch raised."""
        for position in positions:
            if position not in self._fetches:
                self._fetches[position] = task = asyncio.create_task(self._environment.train_prompt(position))
                task.add_done_callback(self._came)
        first = self._fetches[positions[0]]
        return first.result() if first.done() else None

    def _came(self, task: asyncio.Task[Prompt]) -> None:
        self._changes.notify()
        if not task.cancelled():
            task.exception()  # raised by ``get`` when its turn comes

    def forget(self, position: int) -> None:
        """The prompt was taken."""
        self._fetches.pop(position, None)

    async def close(self) -> None:
        """Fetch nothing more."""
        await cancel(*self._fetches.values())
