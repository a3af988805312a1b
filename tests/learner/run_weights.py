"""Executed on every rank of a test world: one version of the weights, sent by each of the three transports."""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vcpo_megatron.config.process import ProcessContext
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.learner.megatron import platform
from vcpo_megatron.rollout.client.protocol import TRIAL
from vcpo_megatron.transport.messages import (
    BucketTaken,
    GroupOpened,
    OpenGroup,
    ReleaseWeights,
    SendWeights,
    SyncDone,
    WeightsBucket,
    WeightsReady,
    WeightsSent,
)
from vcpo_megatron.types import PolicyVersion
from vcpo_megatron.weight_sync.wire import WeightGroup, find_store, flat_size, unflatten

from .world import leave_layout

PATIENCE_S = 60.0


class Control:
    """The orchestrator's end of the control socket, in the process of rank 0."""

    def __init__(self) -> None:
        self.sent: queue.Queue[Any] = queue.Queue()
        self.posted: queue.Queue[Any] = queue.Queue()

    def send(self, message: Any) -> None:
        self.sent.put(message)

    def post_to_sender(self, message: Any) -> None:
        self.posted.put(message)

    def receive_for_sender(self, timeout_s: float) -> Any:
        try:
            return self.posted.get(block=timeout_s > 0, timeout=timeout_s)
        except queue.Empty:
            return None

    def next(self, kind: type) -> Any:
        message = self.sent.get(timeout=PATIENCE_S)
        assert isinstance(message, kind), message
        return message


def send_each(cases: list[RunConfig], run_dir: str) -> list[dict[str, Any]]:
    """For each run: what arrived of six versions; the parameters change as soon as each is copied."""
    platform.prepare()
    from vcpo_megatron.learner.megatron.model import build_model
    from vcpo_megatron.learner.megatron.parallel import initialize
    from vcpo_megatron.learner.weights.gather import WeightGatherer
    from vcpo_megatron.learner.weights.snapshots import Snapshots
    from vcpo_megatron.weight_sync.learner import WeightSender

    outcomes = []
    for number, config in enumerate(cases):
        parallel = initialize(config)
        chunks, family, shape = build_model(config, parallel, load=True)
        control = Control() if parallel.rank == 0 else None
        context = ProcessContext(Path(run_dir) / str(number), 1, None, "token", "tcp://none", ())
        trainable: Any = SimpleNamespace(chunks=chunks, family=family, shape=shape)
        gatherer = WeightGatherer(trainable, parallel)
        sender = WeightSender(config, context, Snapshots(gatherer, parallel, shape), control)  # type: ignore[arg-type]
        outcome = _versions(sender, control, chunks)
        sender.close()
        sender.check()
        outcomes.append(outcome)
        leave_layout()
    return outcomes


def _versions(sender: Any, control: Control | None, chunks: Any) -> dict[str, Any]:
    """Publish 1.1, train on at once, publish 1.2 and so on, as many as room is made for."""
    outcome: dict[str, Any] = {}
    for number in range(1, 7):
        version = PolicyVersion(1, number)
        sender.publish(version)
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.add_(1.0)
        if control is None:
            continue
        ready = control.next(WeightsReady)
        assert ready.version == version
        tensors, checksums = _receive(control, ready, number)
        control.post_to_sender(SyncDone(version))
        control.post_to_sender(ReleaseWeights(version))
        if number == 1:
            outcome = {"tensors": tensors, "checksums": checksums, "buckets": ready.plan}
        elif number == 6:
            outcome["last"] = tensors
    return outcome


def _receive(control: Control, ready: WeightsReady, number: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    import base64
    import pickle

    from safetensors.torch import load_file

    if ready.path:
        files = sorted(Path(ready.path).glob("*.safetensors"))
        assert (Path(ready.path) / "config.json").is_file()
        return {k: v for file in files for k, v in load_file(file).items()}, ready.checksums
    if ready.transport == "tensor":
        control.post_to_sender(SendWeights("t", ready.version))
        pairs: list[Any] = []
        for number, entries in enumerate(ready.plan):
            bucket = control.next(WeightsBucket)
            assert (bucket.name, bucket.number) == ("t", number)
            pairs += pickle.loads(base64.b64decode(bucket.data, validate=True))
            assert [name for name, _ in pairs[-len(entries) :]] == [name for name, _, _ in entries]
            control.post_to_sender(BucketTaken("t", number))
        return dict(pairs), control.next(WeightsSent).checksums
    if number == 1:
        control.post_to_sender(OpenGroup("g", 2))
        opened = control.next(GroupOpened)
        store = find_store("127.0.0.1", opened.port, PATIENCE_S)
        control.group = WeightGroup(store, "g", 1, 2, "gloo", PATIENCE_S)  # type: ignore[attr-defined]
        control.group.broadcast(torch.empty(flat_size(TRIAL), dtype=torch.uint8))  # type: ignore[attr-defined]
    control.post_to_sender(SendWeights("g", ready.version))
    found: dict[str, torch.Tensor] = {}
    for entries in ready.plan:
        flat = torch.empty(flat_size(entries), dtype=torch.uint8)
        control.group.broadcast(flat)  # type: ignore[attr-defined]
        found.update(unflatten(flat, entries))
    return found, control.next(WeightsSent).checksums
