"""Sends weights while the learner trains: a thread a rank, over copies of the shards and a group of its own.

    publish (main thread) --copy of the shards--> source --> _lead (rank 0's thread) --> orchestrator, disk, servers
                                                               ^ shards, by ``_follow`` of the other ranks

``publish``   consumes: a version's parameters    produces: a copy of them
              waits for: room for one more        unblocked by: the orchestrator taking over, or releasing, an older one
``_lead``     consumes: published versions, the orchestrator's messages for the sender
              produces: WeightsReady, GroupOpened, WeightsSent, SendingFailed
              waits for: either                   unblocked by: either; every second it says so to the other ranks
              produces, with "tensor": WeightsBucket; waits for BucketTaken, ``rollout.sync_timeout_s`` at most
``_follow``   consumes: rank 0's jobs             produces: this rank's shards, parameter by parameter
              waits for: the next job             unblocked by: rank 0, at least every second

The step knows of ``publish`` only. How weights leave rank 0 is the business of a ``Sender``, one a transport: a relay
on every node would be another one.
"""

from __future__ import annotations

import datetime
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..config.process import ProcessContext
from ..config.schema import RunConfig
from ..config.weight_transport import weight_transport
from ..models.shape import ModelShape
from ..transport.control import ControlClient
from ..transport.messages import (
    BucketTaken,
    Heartbeat,
    Message,
    OpenGroup,
    ReleaseWeights,
    SendingFailed,
    SendWeights,
    StopSending,
    SyncDone,
    WeightsSent,
)
from ..types import PolicyVersion
from .disk.learner import DiskSender
from .distributed.learner import DistributedSender
from .expected_checksums import CheckedStream, ExpectedChecksums
from .plan import Stream, plan_buckets
from .sender import Sender, TransferError
from .tensor.learner import TensorSender

#: Seconds between two messages of rank 0 to the other ranks' threads.
_IDLE_S = 1.0
_Job = tuple[str, PolicyVersion | None]
_IDLE: _Job = ("idle", None)
_STOP: _Job = ("stop", None)


class SenderError(RuntimeError):
    """The sender's thread failed; the message says why."""


class _GivenUp(Exception):
    """The orchestrator gave up what was being sent."""


class WeightSource(Protocol):
    """What the sender needs of the learner, on every rank; ``device`` is that of its parameters."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def shape(self) -> ModelShape: ...

    def outline(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every Hugging Face tensor, in the order of ``stream``."""
        ...

    def take(self, version: PolicyVersion, at_most: int, timeout_s: float, check: Callable[[], None]) -> None:
        """Copy this rank's shards as ``version``, once fewer than ``at_most`` versions are held. ``check`` is called
        while it waits; what it raises ends the wait."""
        ...

    def stream(self, version: PolicyVersion, timeout_s: float, group: dist.ProcessGroup | None) -> Stream:
        """Every tensor of ``version`` on rank 0, nothing elsewhere; ``group`` is gloo's over all ranks, each of which
        must run it to its end."""
        ...

    def release(self, version: PolicyVersion) -> None:
        """Give a copy back; nothing when it is not held."""
        ...


class WeightSender:
    """Made, and ``publish`` called, alike on all ranks. ``control`` is rank 0's. ``plan``: how the weights are cut into
    buckets, as in WeightsReady."""

    def __init__(
        self, config: RunConfig, context: ProcessContext, source: WeightSource, control: ControlClient | None
    ) -> None:
        rollout = config.rollout
        self._config, self._source, self._control = config, source, control
        outline = source.outline()
        self.plan: list[Any] = plan_buckets(outline, rollout.bucket_bytes)
        self._sender = self._make_sender(context, outline)
        evaluated = config.train.eval_every > 0 and config.staleness.lag == "bounded"  # while training goes on
        self._held = self._sender.held + int(evaluated and not self._sender.stored)
        # a server may keep what is being sent until the deadline of its update, and that is no fault of the learner
        self._patience_s = config.launch.timeout_s + rollout.sync_timeout_s
        patience = datetime.timedelta(seconds=self._patience_s)
        self._group = dist.new_group(backend="gloo", timeout=patience) if source.world_size > 1 else None
        self._published: deque[tuple[PolicyVersion, list[float]]] = deque()
        self._later: deque[Message] = deque()
        self._stopping = False
        self._failure: Exception | None = None
        work = self._lead if source.rank == 0 else self._follow
        self._thread = threading.Thread(target=self._guarded, args=(work,), name="weight sender", daemon=True)
        self._thread.start()

    def _make_sender(
        self, context: ProcessContext, outline: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> Sender:
        rollout = self._config.rollout
        chosen = weight_transport(rollout, learner_on_gpus=self._source.device.type == "cuda")
        match chosen.name:
            case "disk":
                return DiskSender(context.directory.weights, self._config.model.path, outline)
            case "distributed":
                assert chosen.backend is not None
                log, address = context.directory.log("broadcaster", 0), self._config.launch.address or "127.0.0.1"
                return DistributedSender(self.plan, chosen.backend, rollout.sync_timeout_s, log, self._poll, address)
            case "tensor":
                return TensorSender(self.plan, rollout.sync_timeout_s, self._send_message, self._poll)

    # --- main thread --------------------------------------------------------------------------

    def publish(self, version: PolicyVersion, probe: Sequence[float] = ()) -> None:
        """Copy this version's parameters; they are sent from there. ``probe``: as in WeightsReady. SnapshotError when
        there is no room in time."""
        self._source.take(version, self._held, self._patience_s, self.check)
        self._published.append((version, list(probe)))
        self._wake()

    def check(self) -> None:
        """SenderError when the thread has failed."""
        if self._failure is not None:
            raise SenderError(f"sending weights failed: {type(self._failure).__name__}: {self._failure}")

    def close(self) -> None:
        """End the thread, and what the transport started with it; called alike on all ranks."""
        self._stopping = True
        self._wake()
        self._thread.join(10.0)

    def _wake(self) -> None:
        if self._control is not None:
            self._control.post_to_sender(Heartbeat("learner", "published"))

    # --- threads ------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            if self._source.device.type == "cuda":
                torch.cuda.set_device(self._source.device)
            work()
        except Exception as error:  # fault boundary of the thread: the main thread raises it
            self._failure = error
        finally:
            self._sender.kill()

    def _lead(self) -> None:
        self._sender.start()
        while not self._stopping:
            if self._published:
                self._offer(*self._published.popleft())
            elif (message := self._next_message()) is not None:
                self._on_message(message)
            else:
                self._share(_IDLE)
        self._share(_STOP)

    def _follow(self) -> None:
        while (job := self._share(None)) != _STOP:
            kind, version = job
            if kind == "stream" and version is not None:
                for _ in self._stream(version):
                    pass
            elif kind == "release" and version is not None:
                self._source.release(version)

    def _share(self, job: _Job | None) -> _Job:
        """Rank 0's job on every rank."""
        jobs = [job]
        if self._group is not None:
            dist.broadcast_object_list(jobs, src=0, group=self._group)
        assert jobs[0] is not None
        return jobs[0]

    def _stream(self, version: PolicyVersion) -> Stream:
        return self._source.stream(version, self._config.launch.timeout_s, self._group)

    # --- rank 0 -------------------------------------------------------------------------------

    def _next_message(self) -> Message | None:
        assert self._control is not None
        if self._later:
            return self._later.popleft()
        return self._control.receive_for_sender(_IDLE_S)

    def _send_message(self, message: Message) -> None:
        assert self._control is not None
        self._control.send(message)

    def _poll(self, wait_s: float = 0.0) -> None:
        """While something is being sent: _GivenUp when the orchestrator does not want it any more, or the run ends."""
        assert self._control is not None
        while (message := self._control.receive_for_sender(wait_s)) is not None:
            match message:
                case StopSending(reason):
                    raise _GivenUp(reason)
                case BucketTaken(name, number):
                    self._sender.on_taken(name, number)
                case _:
                    self._later.append(message)
            wait_s = 0.0
        if self._stopping:
            raise _GivenUp("the learner ends")

    def _offer(self, version: PolicyVersion, probe: list[float]) -> None:
        """Make it so that ``version`` can be had, and tell the orchestrator."""
        self._send_message(replace(self._sender.offer(version, lambda: self._open(version)), probe=probe))

    def _on_message(self, message: Message) -> None:
        match message:
            case SyncDone(version) if self._sender.stored:
                self._release(version)
            case ReleaseWeights(version):
                self._release(version)
            case StopSending():
                self._sender.abort()
            case OpenGroup(name, world_size):
                self._attempt(name, lambda: self._send_message(self._sender.open_group(name, world_size)))
            case SendWeights(name, version):
                stream = self._open(version)
                sent = self._attempt(name, lambda: self._sender.send(name, stream))
                stream.drain()
                if sent:
                    self._send_message(WeightsSent(name, version, stream.checksums()))

    def _attempt(self, name: str, work: Callable[[], None]) -> bool:
        """Whether ``work``, which was asked for under ``name``, came to its end; the groups are gone otherwise, and the
        orchestrator knows."""
        try:
            work()
        except TransferError as error:
            self._sender.kill()
            self._send_message(SendingFailed(name, str(error)))
            return False
        except _GivenUp:
            self._sender.abort()
            return False
        return True

    def _release(self, version: PolicyVersion) -> None:
        self._share(("release", version))
        self._source.release(version)

    def _open(self, version: PolicyVersion) -> CheckedStream:
        """All ranks begin to stream ``version``; with the checksums of it where ``rollout.verify_sync`` asks for
        them."""
        self._share(("stream", version))
        rollout, expected = self._config.rollout, None
        if rollout.verify_sync:
            expected = ExpectedChecksums("sglang" if rollout.engine == "sglang" else "embedded", self._source.shape)
        return CheckedStream(self._stream(version), expected)
