"""Weights on their way out: copies on the host, the broadcasting process and a server's, and a real server's update."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.gpu.checklist import Found, Missed, Place, require
from tests.gpu.models import Size, make_random_model

ROOT = Path(__file__).resolve().parents[3]
TRANSPORTS = ("tensor", "distributed", "disk")
#: Part of a check's time that one wait may take: for a process to start and join, for a peer's end to be noticed.
_WAIT = 0.25


def snapshots(place: Place) -> Found:
    """A version's copy while training goes on: it stays as it was. How fast it is made, into memory that is in use."""
    import torch
    from benchmarks import step as benchmark

    from vcpo_megatron.learner.weights.gather import WeightGatherer
    from vcpo_megatron.learner.weights.snapshots import Snapshots
    from vcpo_megatron.types import PolicyVersion

    work = benchmark.Workload("500M" if place.large else "1M", 64, 1, 2, dtype="bfloat16")
    bench = benchmark.Bench(place.folder, work, ("plain",))
    snapshots = Snapshots(WeightGatherer(bench.trainable, bench.parallel), bench.parallel, bench.trainable.shape)
    parameters = [p for chunk in bench.trainable.chunks for p in chunk.parameters()]
    size, seconds, sums = sum(p.nbytes for p in parameters), [], []
    for number in (1, 2, 3):
        version = PolicyVersion(1, number)
        _synchronize()
        started = time.perf_counter()
        snapshots.take(version, 2, place.seconds, lambda: None)
        seconds.append(time.perf_counter() - started)
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(0.5)  # trained on at once
        sums.append(sum(float(t.double().sum()) for _, t in snapshots.stream(version, place.seconds, None)))
        snapshots.release(version)
    _leave()
    count = sum(p.numel() for p in parameters)
    worst = max(abs((after - before) / count - 0.5) for before, after in zip(sums, sums[1:], strict=False))
    rate = size / min(seconds[1:])
    text = f"{size / 1e9:.2f} GB at {rate / 1e9:.1f} GB/s, {require(worst, 0.01, 'a version told from the next')}"
    return Found(text, {"bytes": size, "seconds": seconds, "bytes a second": rate})


def broadcast(place: Place) -> Found:
    """Buckets to a process of its own, byte for byte; it is killed while one is on its way, and the sender says so; the
    sender is killed, and it notices; and then another group takes them all."""
    from vcpo_megatron.weight_sync.distributed.broadcaster import Broadcaster

    backend = "nccl" if place.gpus > 1 else "gloo"
    sizes = [64 << 20] * 7 + [1237] if place.large else [4 << 20] * 3 + [1237]
    texts, figures, wait_s = [], {"backend": backend}, _WAIT * place.seconds
    sender = Broadcaster(max(sizes), backend, wait_s, place.folder / "sender.log")
    try:
        figures["bytes a second"] = _whole_update(place, sender, "first", sizes, backend)
        texts.append(f"{backend}, {figures['bytes a second'] / 1e9:.2f} GB/s")
        figures["a killed receiver is noticed after"] = _receiver_killed(place, sender, sizes, backend)
        texts.append(f"a killed receiver is noticed after {figures['a killed receiver is noticed after']:.1f} s")
    finally:
        sender.kill()
    sender = Broadcaster(max(sizes), backend, wait_s, place.folder / "sender.log")
    try:
        _whole_update(place, sender, "again", sizes, backend)
        noticed = _sender_killed(place, sender, sizes, backend)
    finally:
        sender.kill()
    figures["a killed sender is noticed after"] = noticed
    if noticed is None and backend == "gloo":
        raise Missed(f"a receiver did not notice within {wait_s:.0f} s that the sender was killed")
    said = f"after {noticed:.1f} s" if noticed is not None else f"not within {wait_s:.0f} s: it has to be replaced"
    texts.append(f"a killed sender {said}")
    return Found(", ".join(texts), figures)


def _whole_update(place: Place, sender: Any, name: str, sizes: list[int], backend: str) -> float:
    """All buckets arrive as they were sent; bytes a second, the receiver's checksums included."""
    import torch

    from tests.gpu.receiver import checksum

    with _receiver(place, sender, name, sizes, backend) as receiver:
        whole = (torch.arange(max(sizes) + len(sizes), dtype=torch.int32) * 7).remainder(251).to(torch.uint8)
        flats = [whole[number : number + size] for number, size in enumerate(sizes)]
        sent = [checksum(flat) for flat in flats]
        receiver.wait_for("waiting", 1)
        started = time.perf_counter()
        for number, flat in enumerate(flats):
            sender.slot(number, lambda: None)[: len(flat)].copy_(flat)
            sender.broadcast(name, number, len(flat))
        sender.finish(lambda: None)
        lines = receiver.wait_for("bucket ", len(sizes))
        seconds = time.perf_counter() - started
    arrived = [line.split()[1] for line in lines]
    if arrived != sent:
        raise Missed(f"buckets arrived as {arrived}, sent were {sent}")
    return sum(sizes) / seconds


def _receiver_killed(place: Place, sender: Any, sizes: list[int], backend: str) -> float:
    """Seconds from the kill of a receiver, which took one bucket and would not take the next, to the sender's word."""
    from vcpo_megatron.weight_sync.distributed.broadcaster import BroadcastError

    with _receiver(place, sender, "killed", sizes[:1], backend, stays=True) as receiver:
        receiver.wait_for("waiting", 1)
        sender.slot(0, lambda: None)
        sender.broadcast("killed", 0, sizes[0])
        receiver.wait_for("bucket ", 1)
        for number in (1, 2):  # more than the kernel's buffers take
            sender.slot(number, lambda: None)
            sender.broadcast("killed", number, sizes[0])
        receiver.process.kill()
        receiver.process.wait(receiver.wait_s)
        killed = time.monotonic()
        try:
            for number in (3, 4):
                sender.slot(number, lambda: None)
                sender.broadcast("killed", number, sizes[0])
            sender.finish(lambda: None)
        except BroadcastError:
            return time.monotonic() - killed
    raise Missed("every bucket left, although the receiver was killed before it had taken the second")


def _sender_killed(place: Place, sender: Any, sizes: list[int], backend: str) -> float | None:
    """Seconds from the kill of the broadcasting process to the end of a receiver that waits in a broadcast; None where
    it still waits."""
    with _receiver(place, sender, "left", [sizes[0]] * 2, backend) as receiver:
        receiver.wait_for("waiting", 1)
        sender.slot(0, lambda: None)
        sender.broadcast("left", 0, sizes[0])
        receiver.wait_for("waiting", 2)
        sender.kill()
        killed = time.monotonic()
        try:
            code = receiver.process.wait(receiver.wait_s)
        except subprocess.TimeoutExpired:
            return None
        if code != 3:
            raise Missed(f"the receiver ended with status {code}: {receiver.text()[-300:]}")
        return time.monotonic() - killed


class Receiver:
    """A process of ``tests.gpu.receiver`` and what it has said."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, wait_s: float) -> None:
        self.process, self._log, self.wait_s = process, log, wait_s

    def text(self) -> str:
        return self._log.read_text()

    def wait_for(self, word: str, count: int) -> list[str]:
        """The lines that begin with ``word``, once there are ``count``; Missed after ``wait_s``."""
        deadline = time.monotonic() + self.wait_s
        while True:
            lines = [line for line in self.text().splitlines() if line.startswith(word)]
            if len(lines) >= count:
                return lines
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise Missed(f"{len(lines)} of {count} lines {word!r} from the receiver: {self.text()[-300:]}")
            time.sleep(0.005)


@contextmanager
def _receiver(
    place: Place, sender: Any, name: str, sizes: list[int], backend: str, *, stays: bool = False
) -> Iterator[Receiver]:
    """A receiver that joins group ``name``; ``stays``: after the last bucket it goes on to be a member of the group."""
    from tests.gpu.receiver import STAY
    from vcpo_megatron.transport.child import start_child, stop_child

    port = sender.open(name, 2, lambda: None)
    command = [sys.executable, "-m", "tests.gpu.receiver", name, str(port), backend, repr(place.seconds)]
    command += ["1" if place.gpus > 1 else "0", *map(str, sizes)]
    command += [STAY] * stays
    log = place.folder / f"{name}.log"
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = start_child(command, env={"PYTHONPATH": paths}, log=log)
    try:
        yield Receiver(process, log, _WAIT * place.seconds)
    finally:
        stop_child(process, grace_s=0.0)


def made_versions(place: Place) -> dict[str, Any]:
    """``model``: a folder. ``versions``: for each transport the factor of every weight of the version that it sends,
    and the log-probs of ``tokens`` by it, fp64, of transformers' model. In the parent: see ``steps.made_models``."""
    import torch

    from vcpo_megatron.rollout.embedded.loading import load_model

    size = Size(512, 8, 1536, 8, 2, 8192, 512) if place.large else Size(64, 2, 96, 4, 2, 128, 128)
    model = make_random_model(place.folder / "sent", size, "float32")
    tokens = [(7 * i * i + 3) % size.vocabulary for i in range(64)]
    versions, ids = {}, torch.tensor([tokens])
    for number, transport in enumerate(TRANSPORTS, 1):
        exact, factor = load_model(model, "float32").double(), 1.0 + 0.05 * number
        with torch.no_grad():
            for parameter in exact.parameters():
                parameter.mul_(factor)
            logs = torch.log_softmax(exact(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        versions[transport] = (factor, logs.tolist())
    return {"model": model, "tokens": tokens, "vocabulary": size.vocabulary, "versions": versions}


def to_a_server(
    place: Place, model: Path, tokens: list[int], vocabulary: int, versions: dict[str, tuple[float, list[float]]]
) -> Found:
    """A server of the embedded engine gets a version by each transport, while the learner has trained on: its log-probs
    are those of that version's weights."""
    from benchmarks.rollout import engine_server
    from benchmarks.sync import Learner, Orchestrator

    figures: dict[str, Any] = {}
    with engine_server(model, place.folder / "server.log", 4, start_s=place.seconds / 2) as url:
        for transport, (factor, expected) in versions.items():
            learner = Learner(model, place.folder / transport, transport, 32 << 20 if place.large else 64 << 10)
            try:
                found = _updated(learner, Orchestrator, url, vocabulary, factor, tokens)
            finally:
                learner.close()
            pairs = zip(found.pop("scored"), expected, strict=True)
            figures[transport] = {**found, "difference": max(abs(a - b) for a, b in pairs)}
    text = ", ".join(
        f"{require(found['difference'], 1e-3, transport)} in {found['update s']:.2f} s"
        for transport, found in figures.items()
    )
    return Found(text, figures)


def _updated(learner: Any, orchestrator_of: Any, url: str, vocabulary: int, factor: float, tokens: list[int]) -> Any:
    """Publish every weight times ``factor``, train on, update the server; what it says of ``tokens``."""

    async def update() -> tuple[float, list[float]]:
        orchestrator = orchestrator_of(learner, [url], vocabulary)
        try:
            started = time.perf_counter()
            await orchestrator.update()
            seconds = time.perf_counter() - started
            return seconds, await orchestrator.servers[0].client.score(tokens)
        finally:
            await orchestrator.close()

    for shard in learner.shards.values():
        shard.mul_(factor)
    stall = learner.publish()
    for shard in learner.shards.values():
        shard.add_(1.0)  # trained on, before anything is sent
    seconds, scored = asyncio.run(update())
    return {"update s": seconds, "learner waits s": stall, "bytes": learner.bytes, "scored": scored}


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _leave() -> None:
    from tests.learner.world import leave_layout

    leave_layout()
