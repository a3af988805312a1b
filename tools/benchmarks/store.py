"""Groups a minute that the rollout store takes, each commit with its fsync, on one core.

A group is admitted, its trajectories are written as they end, in the transactions that ``Recorder`` makes of what
came in while the last one was being written, and batches of groups are marked as trained: what a run asks of the
store. ``measure`` has a fixed number of writers that each wait for their last trajectory; ``offer`` has trajectories
end at the pace of a run, which waits for none of them. The core's time and the time that waits for the disk are
measured apart, since either may be the limit.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vcpo_megatron.orchestrator.store.recorder import Recorder
from vcpo_megatron.orchestrator.store.store import RolloutStore
from vcpo_megatron.types import PolicyVersion, Trajectory, Turn, VersionSpan

#: What the project wants of the store.
TARGET = 2000.0
_GROUPS_PER_STEP = 8


@dataclass(frozen=True)
class StoreThroughput:
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


@dataclass(frozen=True)
class Offered:
    """What became of trajectories that end at a steady pace. ``offered``: groups a minute; latencies in seconds."""

    offered: float
    groups_per_minute: float
    median_s: float
    p99_s: float
    cpu_s_per_group: float
    transactions_per_group: float


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
        group_id=group_id,
        sample_index=sample,
        prompt_id=f"train/{group_id}",
        prompt_length=prompt,
        tokens=rng.integers(0, 150_000, tokens, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -rng.random(tokens), 0.0).astype(np.float32),
        turns=(Turn(prompt, tokens, "stop", spans),),
        reward=float(sample % 2),
    )


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
        lambda store: store.admit(first.group_id, first.prompt_id, first.group_id, len(group), first.versions[0])
    )


class _Counting(RolloutStore):
    """A store that counts its transactions: one fsync each."""

    transactions = 0

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.transactions += not self._in_transaction
        with super().transaction():
            yield


@dataclass(frozen=True)
class _Spent:
    """Seconds of wall clock and of the core, and transactions, of some work with a recorder."""

    wall: float
    cpu: float
    transactions: int


def _spend(path: Path, work: Callable[[Recorder], Awaitable[None]]) -> _Spent:
    """Do ``work`` with a new store at ``path``."""

    async def main() -> _Spent:
        recorder = Recorder(lambda: _Counting(path))
        await recorder.open()
        wall, cpu = time.perf_counter(), time.process_time()
        await work(recorder)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        transactions = await recorder.write(lambda store: store.transactions)  # type: ignore[attr-defined]
        await recorder.finish("run ended")
        return _Spent(wall, cpu, transactions - 1)  # without the one that reads it

    return asyncio.run(main())


def _made(groups: int, size: int, tokens: int) -> list[list[Trajectory]]:
    rng = np.random.default_rng(0)
    return [[trajectory(group, sample, tokens, rng) for sample in range(size)] for group in range(groups)]


def measure(folder: Path, *, groups: int, size: int, tokens: int, writers: int) -> StoreThroughput:
    """Write ``groups`` groups into a new store in ``folder``."""
    made, path = _made(groups, size, tokens), folder / f"rollouts-{writers}.sqlite"
    spent = _spend(path, lambda recorder: _run(recorder, made, writers))
    return StoreThroughput(
        writers, groups, 60 * groups / spent.wall, spent.cpu / groups, spent.transactions / groups, path.stat().st_size
    )


async def _offer(recorder: Recorder, groups: list[list[Trajectory]], interval_s: float, seconds: list[float]) -> None:
    """Trajectories end every ``interval_s``, whatever the store does; ``seconds`` until each is durable."""
    started, pending = time.perf_counter(), list[asyncio.Future[bool]]()

    def ended(due: float) -> Callable[[object], None]:
        return lambda _: seconds.append(time.perf_counter() - due)

    for number, member in enumerate(member for group in groups for member in group):
        due = started + number * interval_s
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        if member.sample_index == 0:
            _admit(recorder, groups[member.group_id])
        pending.append(recorder.submit(lambda store, member=member: store.add_trajectory(member)))  # type: ignore[misc]
        pending[-1].add_done_callback(ended(due))
        if (number + 1) % (_GROUPS_PER_STEP * len(groups[0])) == 0:
            step = member.group_id // _GROUPS_PER_STEP
            ids = list(range(step * _GROUPS_PER_STEP, member.group_id + 1))
            recorder.submit(lambda store, step=step, ids=ids: store.mark_trained(step, [], ids, [0] * len(ids)))  # type: ignore[misc]
    await asyncio.gather(*pending)


def offer(folder: Path, *, groups: int, size: int, tokens: int, groups_per_minute: float) -> Offered:
    """Let trajectories end at a steady pace, one after the other, and see whether the store keeps up."""
    made, seconds = _made(groups, size, tokens), list[float]()
    interval_s = 60 / groups_per_minute / size
    spent = _spend(folder / "offered.sqlite", lambda recorder: _offer(recorder, made, interval_s, seconds))
    half, last = statistics.quantiles(seconds, n=100)[49::49]
    return Offered(
        groups_per_minute, 60 * groups / spent.wall, half, last, spent.cpu / groups, spent.transactions / groups
    )


def table(results: list[StoreThroughput], offered: Offered, fsync_s: float) -> str:
    """The results as text."""
    lines = ["writers  groups/min  core ms/group  transactions/group  core busy  limit"]
    lines += [
        f"{r.writers:>7}  {r.groups_per_minute:>10,.0f}  {1000 * r.cpu_s_per_group:>13.2f}  "
        f"{r.transactions_per_group:>18.2f}  {r.cpu_share:>9.0%}  {r.bound}"
        for r in results
    ]
    lines += [
        f"one fsync takes {1000 * fsync_s:.2f} ms here; the target is {TARGET:,.0f} groups/min",
        f"{offered.offered:,.0f} groups/min offered, one trajectory after the other: {offered.groups_per_minute:,.0f} "
        f"written; a trajectory is durable after {1000 * offered.median_s:.0f} ms, 99 % after "
        f"{1000 * offered.p99_s:.0f} ms; {offered.transactions_per_group:.2f} transactions and "
        f"{1000 * offered.cpu_s_per_group:.2f} ms of the core a group",
    ]
    return "\n".join(lines)
