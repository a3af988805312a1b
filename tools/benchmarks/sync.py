"""Weight synchronisation: each transport against the raw transfer of the same bytes, the learner's stall, the memory.

A learner of one rank lives in this process, with the sender, the transports and the update of a real run; servers of
the embedded engine are processes of their own. Every figure stands beside a raw measurement of the same run, taken
alternately, because a machine's pace changes while it is shared.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import math
import os
import queue
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from vcpo_megatron.config.process import ProcessContext
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.conversion.families.registry import open_model
from vcpo_megatron.conversion.writer import FILE_BYTES, FolderWriter
from vcpo_megatron.rollout.client.http import ServerClient
from vcpo_megatron.rollout.client.protocol import SamplingParams
from vcpo_megatron.rollout.fleet.server import Server
from vcpo_megatron.transport.messages import Message, SyncDone, WeightsReady
from vcpo_megatron.types import PolicyVersion
from vcpo_megatron.weight_sync.orchestrator import Transports, Updater
from vcpo_megatron.weight_sync.wave import Wave
from vcpo_megatron.weight_sync.wire import flat_size

from .memory import PeakMemory
from .raw_transfer import PATIENCE_S, RawBroadcast, raw_disk
from .rollout import engine_server

TRANSPORTS = ("tensor", "disk", "distributed")
#: Times the bytes of a model that learner, server and requests hold at most while weights travel as text.
TENSOR_COPIES = 12
#: Name -> (hidden size, layers, units of the MLP, vocabulary); a head has 64 dimensions.
MODELS = {
    "2m": (128, 4, 384, 4096),
    "60m": (512, 14, 1536, 32000),
    "500m": (896, 24, 4864, 151936),
}


#: Makes names of groups unique: a server remembers those of senders that are gone.
_RUNS = itertools.count()


@dataclass(frozen=True)
class SyncRates:
    """Bytes a second, but ``http_s``: seconds of one request. ``copy`` is from a rank's device to its host memory."""

    gather: float
    rename: float
    broadcast: float
    load: float
    copy: float
    http_s: float


#: What docs/weight_sync.md projects with.
CLUSTER = SyncRates(gather=3e9, rename=10e9, broadcast=40e9, load=1e12, copy=25e9, http_s=0.005)


def update_seconds(total: float, bucket: float, rates: SyncRates) -> float:
    """Pause of a server while ``total`` bytes come in buckets of ``bucket``: the sender fills one while the one before
    is broadcast and loaded, and each is asked for by a request."""
    count = math.ceil(total / bucket)
    fill = bucket / rates.gather + bucket / rates.rename
    take = bucket / rates.broadcast + bucket / rates.load
    return fill + count * (max(fill, take) + rates.http_s)


def stall_seconds(total: float, ranks: int, rates: SyncRates) -> float:
    """What a step waits for: each of ``ranks`` ranks copies its share."""
    return total / ranks / rates.copy


@dataclass(frozen=True)
class Timing:
    """Medians over alternating repeats, in seconds. ``raw_s``: the same bytes, broadcast or written and nothing
    else; ``stall_s``: what the learner waits for; ``copy_s``: a copy of the same bytes to memory that is in use;
    ``formula_s``: what ``update_seconds`` makes of the rates of the same run, for a broadcast."""

    transport: str
    update_s: float
    raw_s: float
    stall_s: float
    copy_s: float
    extra_bytes: int
    formula_s: float | None

    @property
    def ratio(self) -> float:
        return self.update_s / self.raw_s

    @property
    def stall_ratio(self) -> float:
        return self.stall_s / self.copy_s


@dataclass(frozen=True)
class Pause:
    """What one update costs ``requests`` running answers in a pause mode: seconds that the server stands still, and
    by how much the answers end later than without an update."""

    mode: str
    standstill_s: float
    later_s: float


def make_model(name: str, folder: Path) -> Path:
    """The folder of a Qwen2 with random weights, written a tensor at a time."""
    hidden, layers, units, vocabulary = MODELS[name]
    heads = hidden // 64
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": "float32",
        "hidden_act": "silu",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": units,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "eos_token_id": 1,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    family, shape = open_model(config)
    outline = family.outline(shape, torch.float32)
    sizes = {tensor: size for tensor, (size, _) in outline.items()}
    dtypes = {tensor: kind for tensor, (_, kind) in outline.items()}
    writer = FolderWriter(folder, sizes, dtypes, FILE_BYTES)
    for tensor, size in sizes.items():
        writer.write(tensor, torch.randn(size) * 0.02 + (1.0 if "norm" in tensor else 0.0))
    writer.finish()
    return folder


class _Control:
    """The control socket of a learner whose orchestrator is in the same process."""

    def __init__(self) -> None:
        self.said: queue.Queue[Message] = queue.Queue()
        self._posted: queue.Queue[Message] = queue.Queue()

    def send(self, message: Message) -> None:
        self.said.put(message)

    def post_to_sender(self, message: Message) -> None:
        self._posted.put(message)

    def receive_for_sender(self, timeout_s: float) -> Message | None:
        try:
            return self._posted.get(block=timeout_s > 0, timeout=timeout_s)
        except queue.Empty:
            return None


class Learner:
    """One rank with the weights of ``model``, publishing version after version by ``transport``."""

    def __init__(self, model: Path, folder: Path, transport: str, bucket_bytes: int) -> None:
        from vcpo_megatron.learner.megatron import parallel as groups
        from vcpo_megatron.learner.megatron import platform
        from vcpo_megatron.learner.megatron.model import build_model
        from vcpo_megatron.learner.weights.gather import WeightGatherer
        from vcpo_megatron.learner.weights.snapshots import Snapshots
        from vcpo_megatron.weight_sync.learner import WeightSender

        config = RunConfig.model_validate(
            {
                "model": {"path": model, "dtype": "float32"},
                "train": {"steps": 1},
                "environment": {"name": "none"},
                "rollout": {"sync": transport, "bucket_bytes": bucket_bytes, "sync_timeout_s": PATIENCE_S},
            }
        )
        platform.prepare()
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        self._leave = groups.destroy
        parallel = groups.initialize(config)
        chunks, family, shape = build_model(config, parallel, load=True)
        trainable: Any = SimpleNamespace(chunks=chunks, family=family, shape=shape)
        self.control = _Control()
        context = ProcessContext(folder, 1, None, "bench", "", ())
        gatherer = WeightGatherer(trainable, parallel)
        source = Snapshots(gatherer, parallel, shape)
        self.sender = WeightSender(config, context, source, self.control)  # type: ignore[arg-type]
        self._gatherer, self.shards = gatherer, gatherer.shards()
        self.sizes = [flat_size(bucket) for bucket in self.sender.plan]
        self.bytes = sum(tensor.nbytes for tensor in self.shards.values())
        self._copies = {name: tensor.clone() for name, tensor in self.shards.items()}
        self.version = 0

    def publish(self) -> float:
        """Seconds that a step would wait."""
        self.version += 1
        started = time.perf_counter()
        self.sender.publish(PolicyVersion(1, self.version))
        return time.perf_counter() - started

    def copy(self) -> float:
        """Seconds of a copy of all shards."""
        started = time.perf_counter()
        for name, tensor in self.shards.items():
            self._copies[name].copy_(tensor)
        return time.perf_counter() - started

    def fill(self) -> tuple[float, float]:
        """Seconds to gather all tensors under their names, and to copy them to where buckets are made."""
        gather = copy = 0.0
        slot, last = torch.zeros(max(self.sizes), dtype=torch.uint8), time.perf_counter()
        for _, tensor in self._gatherer.stream(lambda name: self.shards[name], None):
            gather, last = gather + time.perf_counter() - last, time.perf_counter()
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            slot[: flat.numel()].copy_(flat)
            copy, last = copy + time.perf_counter() - last, time.perf_counter()
        return gather, copy

    def close(self) -> None:
        """End the sender, and free the model and all its copies before the next one is made."""
        self.sender.close()
        self._leave()
        del self.sender, self._gatherer, self.shards, self._copies
        gc.collect()


class Orchestrator:
    """Transports and updates for ``servers`` of one wave."""

    def __init__(self, learner: Learner, urls: list[str], vocab_size: int, mode: Any = "retract") -> None:
        self._learner = learner
        self.servers = [
            Server(i, ServerClient(url, vocab_size, PATIENCE_S), Path("server.log"), starts=1)
            for i, url in enumerate(urls)
        ]
        self._transports = Transports(self._send, prefix=f"bench-{os.getpid()}-{next(_RUNS)}", timeout_s=PATIENCE_S)
        self.mode = mode
        self._last: WeightsReady | None = None

    async def _send(self, message: Message) -> None:
        self._learner.control.post_to_sender(message)

    async def update(self) -> None:
        """The published version, from what the learner makes of it to the servers' next token."""
        ready = self._next(WeightsReady)
        await self._send(SyncDone(ready.version))
        wave = Wave(self.servers, ready)
        beside = asyncio.create_task(self._answers())
        try:
            await Updater(self._transports.of, self.mode).run(wave)
        finally:
            beside.cancel()
        if self._last is not None:
            await self._transports.of(self._last).release(self._last)
        self._last = ready

    def _next(self, kind: type) -> Any:
        message = self._learner.control.said.get(timeout=PATIENCE_S)
        assert isinstance(message, kind), message
        return message

    async def _answers(self) -> None:
        while True:
            try:
                self._transports.on_message(self._learner.control.said.get_nowait())
            except queue.Empty:
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        if self._last is not None and self._last.path:
            await self._transports.of(self._last).release(self._last)
        for server in self.servers:
            await server.client.close()


def measure(
    model: Path, transport: str, folder: Path, *, bucket_bytes: int, repeats: int, url: str, vocab: int
) -> Timing:
    """One transport, ``repeats`` times after a first one that opens groups and touches memory."""
    learner = Learner(model, folder, transport, bucket_bytes)
    raw = RawBroadcast(learner.sizes, folder) if transport != "disk" else None
    run_raw: Callable[[], float] = raw.run if raw is not None else lambda: raw_disk(learner.bytes, folder)
    updates, raws, stalls, copies, requests, fills = [], [], [], [], [], []
    peak = PeakMemory()

    async def main() -> None:
        orchestrator = Orchestrator(learner, [url], vocab)
        for _ in range(2):  # both sets of copies are touched
            learner.publish()
            await orchestrator.update()
        for _ in range(repeats):
            with peak:
                stalls.append(learner.publish())
                started = time.perf_counter()
                await orchestrator.update()
                updates.append(time.perf_counter() - started)
            copies.append(learner.copy())
            raws.append(run_raw())
            fills.append(learner.fill())
            started = time.perf_counter()
            await orchestrator.servers[0].client.model_info()
            requests.append(time.perf_counter() - started)
        await orchestrator.close()

    try:
        asyncio.run(main())
    finally:
        learner.close()
        if raw is not None:
            raw.close()
    median = statistics.median
    gather, rename = (learner.bytes / median(column) for column in zip(*fills, strict=True))
    copy = learner.bytes / median(copies)
    # on CPUs a server loads a parameter by a copy of it
    rates = SyncRates(gather, rename, learner.bytes / median(raws), load=copy, copy=copy, http_s=median(requests))
    formula = update_seconds(learner.bytes, max(learner.sizes), rates) if transport == "distributed" else None
    return Timing(transport, median(updates), median(raws), median(stalls), median(copies), peak.extra, formula)


def measure_pauses(
    model: Path, folder: Path, *, url: str, vocab: int, requests: int, tokens: int, repeats: int
) -> list[Pause]:
    """The cost of an update to answers in flight, for every pause mode, by broadcast."""
    learner = Learner(model, folder, "distributed", 256 << 20)
    sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    found = []

    async def answers(client: ServerClient, key: str) -> float:
        started = time.perf_counter()

        async def one(i: int) -> None:
            rest = tokens
            prompt = [5, 6, 7]
            while rest > 0:  # an aborted answer goes on with the tokens it has
                params = SamplingParams(max_new_tokens=rest, ignore_eos=sampling.ignore_eos)
                result = await client.generate(prompt, params, f"{key}-{i}-{rest}")
                prompt, rest = [*prompt, *result.output_ids], rest - len(result.output_ids)

        await asyncio.gather(*(one(i) for i in range(requests)))
        return time.perf_counter() - started

    async def main() -> None:
        orchestrator = Orchestrator(learner, [url], vocab)
        client = orchestrator.servers[0].client
        learner.publish()
        await orchestrator.update()  # opens the group
        for mode in ("retract", "in_place", "abort"):
            orchestrator.mode = mode
            alone, disturbed, still = [], [], []
            for repeat in range(repeats):
                alone.append(await answers(client, f"{mode}-a{repeat}"))
                task = asyncio.create_task(answers(client, f"{mode}-b{repeat}"))
                learner.publish()
                await asyncio.sleep(alone[-1] / 3)
                started = time.perf_counter()
                await orchestrator.update()
                still.append(time.perf_counter() - started)
                disturbed.append(await task)
            later = statistics.median(disturbed) - statistics.median(alone)
            found.append(Pause(mode, statistics.median(still), later))
        await orchestrator.close()

    try:
        asyncio.run(main())
    finally:
        learner.close()
    return found


def run(name: str, folder: Path, *, bucket_bytes: int, repeats: int, pauses: bool) -> dict[str, Any]:
    """All figures of one model."""
    model = make_model(name, folder / name)
    vocab = MODELS[name][3]
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    fits = psutil.virtual_memory().available > TENSOR_COPIES * size
    with engine_server(model, folder / f"{name}.log", 64) as url:
        timings = [
            measure(model, transport, folder, bucket_bytes=bucket_bytes, repeats=repeats, url=url, vocab=vocab)
            for transport in TRANSPORTS
            if transport != "tensor" or fits
        ]
        costs = (
            measure_pauses(model, folder, url=url, vocab=vocab, requests=8, tokens=64, repeats=repeats)
            if pauses
            else []
        )
    rows = [{**asdict(t), "ratio": t.ratio, "stall_ratio": t.stall_ratio} for t in timings]
    return {
        "model": name,
        "bytes": size,
        "bucket_bytes": bucket_bytes,
        "transports": rows,
        "pauses": [asdict(p) for p in costs],
    }


def table(result: dict[str, Any]) -> str:
    """The figures of one model for people."""
    lines = [
        f"{result['model']}: {result['bytes'] / 1e6:.0f} MB, buckets of {result['bucket_bytes'] / 1e6:.0f} MB",
        "  transport    update s    raw s   ratio   learner waits s   copy s   ratio   extra memory MB   formula s",
    ]
    for row in result["transports"]:
        lines.append(
            f"  {row['transport']:<12}{row['update_s']:9.3f}{row['raw_s']:9.3f}{row['ratio']:8.2f}"
            f"{row['stall_s']:18.4f}{row['copy_s']:9.4f}{row['stall_ratio']:8.2f}{row['extra_bytes'] / 1e6:18.1f}"
            f"{'' if row['formula_s'] is None else format(row['formula_s'], '12.3f')}"
        )
    if all(row["transport"] != "tensor" for row in result["transports"]):
        lines.append(f"  tensor: left out, it takes {TENSOR_COPIES} times the model's bytes of memory here")
    if result["pauses"]:
        lines.append("  pause mode   server stands still s   answers end later by s")
    for row in result["pauses"]:
        lines.append(f"  {row['mode']:<13}{row['standstill_s']:22.3f}{row['later_s']:25.3f}")
    return "\n".join(lines)
