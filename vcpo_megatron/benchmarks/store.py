"""Groups a minute that the rollout store takes, each commit with its fsync, on one core.

A group is admitted, its trajectories are written as they end, in the transactions that ``Recorder`` makes of what
came in while the last one was being written, and batches of groups are marked as trained: what a run asks of the
store. The core's time and the time that waits for the disk are measured apart, since either may be the limit.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..orchestrator.recorder import Recorder
from ..orchestrator.store import RolloutStore
from ..types import PolicyVersion, Trajectory, Turn, VersionSpan

#: What the project wants of the store.
TARGET = 2000.0
_GROUPS_PER_STEP = 8


@dataclass(frozen=True)
class Result:
    """``writers``: trajectories that end at the same time. Times in seconds; ``file_bytes`` of the store afterwards."""

    writers: int
    groups: int
    groups_per_minute: float
    cpu_s_per_group: float
    transactions_per_group: float
    file_bytes: int

    @property
    def cpu_share(self) -> float:
        """Part of the time in which the core was busy."""
        return self.cpu_s_per_group * self.groups_per_minute / 60

    @property
    def bound(self) -> str:
        return "the core" if self.cpu_share > 0.7 else "the disk (fsync)"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "cpu_share": self.cpu_share, "bound": self.bound}


@contextmanager
def one_core() -> Iterator[None]:
    """This process runs on one core meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def fsync_seconds(folder: Path, times: int = 50) -> float:
    """Median time of writing a page and bringing it to the disk of ``folder``."""
    found = []
    with open(folder / "fsync", "wb") as file:
        for _ in range(times):
            started = time.perf_counter()
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
            found.append(time.perf_counter() - started)
    return statistics.median(found)


def trajectory(group_id: int, sample: int, tokens: int, rng: np.random.Generator) -> Trajectory:
    """``tokens`` tokens, a quarter of them prompt, with values that do not compress."""
    prompt = tokens // 4
    mask = np.arange(tokens) >= prompt
    spans = (VersionSpan(prompt, tokens, PolicyVersion(1, group_id // _GROUPS_PER_STEP)),)
    return Trajectory(
        group_id=group_id, sample_index=sample, prompt_id=f"train/{group_id}", prompt_length=prompt,
        tokens=rng.integers(0, 150_000, tokens, dtype=np.int32), loss_mask=mask,
        behavior_logprobs=np.where(mask, -rng.random(tokens), 0.0).astype(np.float32),
        turns=(Turn(prompt, tokens, "stop", spans),), reward=float(sample % 2),
    )  # fmt: skip


async def _run(recorder: Recorder, groups: list[list[Trajectory]], writers: int) -> None:
    places = asyncio.Semaphore(writers)

    async def write(member: Trajectory) -> None:
        async with places:
            await recorder.write(lambda store: store.add_trajectory(member))

    for first in range(0, len(groups), _GROUPS_PER_STEP):
        chosen = groups[first : first + _GROUPS_PER_STEP]
        step, ids = first // _GROUPS_PER_STEP, [group[0].group_id for group in chosen]
        for group in chosen:
            _admit(recorder, group)
        await asyncio.gather(*(write(member) for group in chosen for member in group))
        await recorder.write(lambda store, step=step, ids=ids: store.mark_trained(step, [], ids, [0] * len(ids)))  # type: ignore[misc]


def _admit(recorder: Recorder, group: list[Trajectory]) -> None:
    first = group[0]
    recorder.submit(
        lambda store: store.admit(
            first.group_id, first.prompt_id, first.group_id, len(group), first.versions[0]
        )
    )


def measure(folder: Path, *, groups: int, size: int, tokens: int, writers: int) -> Result:
    """Write ``groups`` groups into a new store in ``folder``."""
    rng = np.random.default_rng(0)
    made = [[trajectory(group, sample, tokens, rng) for sample in range(size)] for group in range(groups)]
    transactions = 0

    class Counting(RolloutStore):
        @contextmanager
        def transaction(self) -> Iterator[None]:
            nonlocal transactions
            transactions += not self._in_transaction
            with super().transaction():
                yield

    path = folder / f"rollouts-{writers}.sqlite"

    async def main() -> tuple[float, float]:
        recorder = Recorder(lambda: Counting(path))
        await recorder.open()
        wall, cpu = time.perf_counter(), time.process_time()
        await _run(recorder, made, writers)
        spent = time.perf_counter() - wall, time.process_time() - cpu
        await recorder.finish("run ended")
        return spent

    wall, cpu = asyncio.run(main())
    return Result(writers, groups, 60 * groups / wall, cpu / groups, transactions / groups, path.stat().st_size)


def table(results: list[Result], fsync_s: float) -> str:
    """The results as text."""
    lines = ["writers  groups/min  core ms/group  transactions/group  core busy  limit"]
    lines += [
        f"{r.writers:>7}  {r.groups_per_minute:>10,.0f}  {1000 * r.cpu_s_per_group:>13.2f}  "
        f"{r.transactions_per_group:>18.2f}  {r.cpu_share:>9.0%}  {r.bound}"
        for r in results
    ]
    return "\n".join([*lines, f"one fsync takes {1000 * fsync_s:.2f} ms here; the target is {TARGET:,.0f} groups/min"])
