"""An environment whose episodes do what a user's code should not: ``options`` say at which prompt, in which call."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vcpo_megatron.config.schema import EnvironmentConfig
from vcpo_megatron.environments.base import Action, Example, Observation, Outcome

#: What is raised while the module is imported.
IMPORT_FAULT = os.environ.get("FAULTY_IMPORT")


async def swallow() -> None:
    """Wait and take no notice of cancellations."""
    while True:
        try:
            await asyncio.sleep(1000.0)
        except asyncio.CancelledError:
            pass


async def commit(fault: str) -> None:
    """Do it."""
    match fault:
        case "raise":
            raise KeyError("tool")
        case "cancelled":
            raise asyncio.CancelledError
        case "cancel-self":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        case "exit":
            sys.exit("a tool gave up")
        case "interrupt":
            raise KeyboardInterrupt
        case "generator-exit":
            raise GeneratorExit
        case "unprintable":
            raise Unprintable
        case "surrogate":
            raise ValueError("half a pair: \ud83d")
        case "quit":
            os._exit(7)
        case "segfault":
            ctypes.string_at(0)
        case "quit-later":
            threading.Timer(0.1, os._exit, [9]).start()
            await asyncio.sleep(1000.0)
        case "background-exit":
            asyncio.get_running_loop().call_soon(sys.exit, 3)
            await asyncio.sleep(0.01)
        case "hang":
            await asyncio.sleep(1000.0)
        case "swallow":
            await swallow()
        case "compute":
            print(9**9**9)
        case "sleep":
            time.sleep(1000.0)
        case "nap":
            await asyncio.sleep(0.2)
        case "late":
            time.sleep(0.7)
        case "memory":
            bytearray(4 << 30)
        case "print":
            print("\x93\xc0 what looks like a message", flush=True)
            os.write(1, b"\x93\xc0\n")
        case _:
            raise AssertionError(fault)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class FaultyEpisode:
    def __init__(self, example: Example) -> None:
        self._faults = example.data["faults"]

    async def _maybe(self, call: str) -> None:
        if (fault := self._faults.get(call)) is not None:
            await commit(fault)

    async def reset(self) -> Observation:
        await self._maybe("reset")
        return Observation((1, 2))

    async def step(self, action: Action) -> Outcome:
        await self._maybe("step")
        return Outcome(float(sum(action.token_ids) % 2), {"pid": os.getpid()})

    async def close(self) -> None:
        await self._maybe("close")


class Faulty:
    """``options``: index of a training prompt -> {call: fault}; "heldout" likewise; "factory": what is wrong with the
    environment itself; "flag": a file, with which it cannot be made."""

    name = "faulty"
    sampling: Any = {"ignore_eos": True, "max_new_tokens": 4}  # noqa: RUF012
    max_prompt_tokens = 2
    notes = ("for tests",)

    def __init__(self, config: EnvironmentConfig, tokenizer_dir: Path, seed: int) -> None:
        self._options = config.options
        self.fingerprint = "f"
        match config.options.get("factory"):
            case "exit":
                sys.exit(3)
            case "quit":
                os._exit(5)
            case "random":
                self.fingerprint = str(os.getpid())
        if Path(config.options.get("flag", "/nonexistent")).exists():
            raise FileNotFoundError("the data has gone")

    def _example(self, name: str, index: int, faults: dict[str, Any]) -> Example:
        return Example(f"{name}-{index}", {"faults": faults.get(str(index), {})})

    def train_example(self, index: int) -> Example:
        fault = self._options.get(str(index), {}).get("train_example")
        if fault == "compute":
            print(9**9**9)
        if fault == "raise":
            raise LookupError(f"row {index}")
        return self._example("train", index, self._options)

    def heldout(self) -> Sequence[Example]:
        return [self._example("heldout", index, self._options.get("heldout", {})) for index in range(3)]

    def episode(self, example: Example) -> FaultyEpisode:
        return FaultyEpisode(example)

    def reference(self, example: Example) -> tuple[int, ...]:
        return (1, 2, 3)

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


if IMPORT_FAULT is not None:
    raise RuntimeError(IMPORT_FAULT)
