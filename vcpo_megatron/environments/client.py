"""An environment as a run sees it: named prompts and episodes that are asked from outside. No code of a user runs here.

The environment itself (``base``) lives in worker processes (``workers``); this is all that the agent loop, the
controller and the commands know of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from .base import Observation, Outcome

#: Whose fault a failure is. "own": the episode's. "unknown": its worker ended, and nobody knows by which of its
#: episodes. "none": its worker ended by another one.
Blame = Literal["own", "unknown", "none"]
Stream = Literal["train", "heldout"]


class EpisodeFailure(RuntimeError):
    """The environment's part of an episode failed; the message says what, in one line. Other episodes go on."""

    def __init__(self, message: str, blame: Blame = "own") -> None:
        super().__init__(message)
        self.blame: Blame = blame


@dataclass(frozen=True)
class Prompt:
    """A prompt by name; ``stream`` and ``index`` say where the environment finds it."""

    prompt_id: str
    stream: Stream
    index: int


@dataclass(frozen=True)
class Description:
    """What an environment says about itself; the fields are those of ``base.Environment``. ``notes``: for the user."""

    name: str
    fingerprint: str
    sampling: Mapping[str, Any]
    max_prompt_tokens: int
    heldout: tuple[Prompt, ...]
    notes: tuple[str, ...] = ()


class EpisodeClient(Protocol):
    """One attempt at one prompt."""

    async def reset(self) -> tuple[int, ...]:
        """Token ids of the prompt, one at least; EpisodeFailure."""
        ...

    async def step(self, token_ids: Sequence[int], finish_reason: str) -> Observation | Outcome:
        """What follows the sampled ``token_ids``, checked: an outcome holds Python floats. EpisodeFailure."""
        ...

    def close(self) -> None:
        """The episode is given up: what it holds is released, and nobody waits for that. Nothing to do after an
        outcome or a failure, when it is closed already."""
        ...


class EnvironmentClient(Protocol):
    """A task with its prompts."""

    @property
    def description(self) -> Description: ...

    async def train_prompt(self, index: int) -> Prompt:
        """Prompt ``index`` = 0, 1, 2, ... of the endless training stream; RunError names an index without one."""
        ...

    def episode(self, prompt: Prompt) -> EpisodeClient: ...

    async def supervise(self) -> None:
        """Watch over what the environment runs in, until cancelled; RunError when it cannot go on."""
        ...
