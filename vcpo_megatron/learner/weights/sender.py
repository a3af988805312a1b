"""Sends weights while the learner trains: a thread a rank, over copies of the shards and a group of its own.

    publish (main thread) --copy of the shards--> snapshots --> _lead (rank 0's thread) --> orchestrator, disk, servers
                                                                  ^ shards, by ``_follow`` of the other ranks

``publish``   consumes: a version's parameters    produces: a snapshot
              waits for: room for one more        unblocked by: the orchestrator taking over, or releasing, an older one
``_lead``     consumes: published versions, the orchestrator's messages for the sender
              produces: WeightsReady, GroupOpened, WeightsSent, SendingFailed
              waits for: either                   unblocked by: either; every second it says so to the other ranks
              produces, with "tensor": WeightsBucket; waits for BucketTaken, ``rollout.sync_timeout_s`` at most
``_follow``   consumes: rank 0's jobs             produces: this rank's shards, parameter by parameter
              waits for: the next job             unblocked by: rank 0, at least every second

The step knows of ``publish`` only. How weights leave rank 0 is in ``_announce`` and ``_serve``: a relay on every node
would take their place.
"""

from __future__ import annotations

import datetime
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ...config.process import ProcessContext
from ...config.schema import RunConfig
from ...transport.control import ControlClient
from ...transport.messages import (
    BucketTaken,
    Heartbeat,
    Message,
    OpenGroup,
    ReleaseWeights,
    SendingFailed,
    SendWeights,
    StopSending,
    SyncDone,
    WeightsReady,
    WeightsSent,
)
from ...types import PolicyVersion
from ...weight_sync.disk.learner import WeightFolders
from ...weight_sync.distributed.broadcaster import BroadcastError
from ...weight_sync.distributed.learner import GroupSender
from ...weight_sync.plan import plan_buckets
from ...weight_sync.stream_checksums import Checksums
from ...weight_sync.tensor.learner import NotTaken, TextSender
from ..megatron import platform
from ..megatron.parallel import Parallel
from ..megatron.training import Trainable
from .gather import WeightGatherer
from .snapshots import Snapshots

#: Seconds between two words of rank 0 to the other ranks' threads.
_IDLE_S = 1.0
#: Versions held: the one on its way, a pinned one, the newest, and the one being copied. What is on the disk is not.
_HELD = {"distributed": 4, "disk": 2, "tensor": 4}
_Job = tuple[str, PolicyVersion | None]
_IDLE: _Job = ("idle", None)
_STOP: _Job = ("stop", None)


class SenderError(RuntimeError):
    """The sender's thread failed; the message says why."""


class _GivenUp(Exception):
    """The orchestrator gave up what was on its way."""


class WeightSender:
    """Made, and ``publish`` called, alike on all ranks. ``control`` is rank 0's. ``plan``: how the weights are cut into
    buckets, as in WeightsReady."""

    def __init__(
        self,
        config: RunConfig,
        context: ProcessContext,
        parallel: Parallel,
        trainable: Trainable,
        gatherer: WeightGatherer,
        control: ControlClient | None,
    ) -> None:
        rollout = config.rollout
        self._config, self._parallel, self._trainable, self._control = config, parallel, trainable, control
        broadcasts = platform.has_gpu() or rollout.tensor_parallel > 1
        self._way = rollout.sync if rollout.sync != "auto" else "distributed" if broadcasts else "tensor"
        self._gatherer = gatherer
        self._snapshots = Snapshots(self._gatherer.shards, _HELD[self._way])
        # a server may keep what is on its way until the deadline of its update, and that is no fault of the learner
        self._patience_s = config.launch.timeout_s + rollout.sync_timeout_s
        patience = datetime.timedelta(seconds=self._patience_s)
        self._group = dist.new_group(backend="gloo", timeout=patience) if parallel.world_size > 1 else None
        self._outline = gatherer.outline()
        self._folders = WeightFolders(context.directory.weights, config.model.path)
        self.plan: list[Any] = plan_buckets(self._outline, rollout.bucket_bytes)
        self._groups = GroupSender(
            self.plan, platform.backend(), rollout.sync_timeout_s, context.directory.log("broadcaster", 0), self._poll
        )
        self._texts = TextSender(self.plan, rollout.sync_timeout_s, self._tell, self._poll)
        self._published: deque[PolicyVersion] = deque()
        self._later: deque[Message] = deque()
        self._stopping = False
        self._failure: Exception | None = None
        work = self._lead if parallel.rank == 0 else self._follow
        self._thread = threading.Thread(target=self._guarded, args=(work,), name="weight sender", daemon=True)
        self._thread.start()

    # --- main thread --------------------------------------------------------------------------

    def publish(self, version: PolicyVersion) -> None:
        """Copy this version's parameters; they are sent from there. SnapshotError when there is no room in time."""
        self._snapshots.take(version, self._patience_s, self.check)
        self._published.append(version)
        self._wake()

    def check(self) -> None:
        """SenderError when the thread has failed."""
        if self._failure is not None:
            raise SenderError(f"sending weights failed: {type(self._failure).__name__}: {self._failure}")

    def close(self) -> None:
        """End the thread, and the broadcaster with it; called alike on all ranks."""
        self._stopping = True
        self._wake()
        self._thread.join(10.0)

    def _wake(self) -> None:
        if self._control is not None:
            self._control.post_to_sender(Heartbeat("learner", "published"))

    # --- threads ------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            if torch.cuda.is_available():
                torch.cuda.set_device(platform.device())
            work()
        except Exception as error:  # fault boundary of the thread: the main thread raises it
            self._failure = error
        finally:
            self._groups.kill()

    def _lead(self) -> None:
        if self._way == "disk":
            self._folders.clear()
        if self._way == "distributed":
            self._groups.start()
        while not self._stopping:
            if self._published:
                self._announce(self._published.popleft())
            elif (message := self._next_message()) is not None:
                self._serve(message)
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
                self._snapshots.release(version)

    def _share(self, job: _Job | None) -> _Job:
        """Rank 0's job on every rank."""
        jobs = [job]
        if self._group is not None:
            dist.broadcast_object_list(jobs, src=0, group=self._group)
        assert jobs[0] is not None
        return jobs[0]

    def _stream(self, version: PolicyVersion) -> Iterator[tuple[str, torch.Tensor]]:
        shards = self._snapshots.get(version, self._config.launch.timeout_s)
        return self._gatherer.stream(lambda name: shards[name], self._group)

    # --- rank 0 -------------------------------------------------------------------------------

    def _next_message(self) -> Message | None:
        assert self._control is not None
        if self._later:
            return self._later.popleft()
        return self._control.receive_for_sender(_IDLE_S)

    def _tell(self, message: Message) -> None:
        assert self._control is not None
        self._control.send(message)

    def _poll(self, wait_s: float = 0.0) -> None:
        """While something is on its way: _GivenUp when the orchestrator does not want it any more, or the run ends."""
        assert self._control is not None
        while (message := self._control.receive_for_sender(wait_s)) is not None:
            match message:
                case StopSending(reason):
                    raise _GivenUp(reason)
                case BucketTaken(name, number):
                    self._texts.taken(name, number)
                case _:
                    self._later.append(message)
            wait_s = 0.0
        if self._stopping:
            raise _GivenUp("the learner ends")

    def _announce(self, version: PolicyVersion) -> None:
        """Tell the orchestrator that ``version`` can be had, and make it so."""
        if self._way != "disk":
            self._tell(WeightsReady(version, self._way, self.plan))
            return
        self._share(("stream", version))
        checksums = self._checksums()
        path = self._folders.write(version, _noted(self._stream(version), checksums), self._outline)
        self._tell(WeightsReady(version, self._way, path=str(path), checksums=_result(checksums)))

    def _serve(self, message: Message) -> None:
        match message:
            case SyncDone(version) if self._way == "disk":
                self._release(version)
            case ReleaseWeights(version):
                self._release(version)
            case StopSending():
                self._groups.close()
            case OpenGroup(name, world_size):
                self._guarded_sending(name, lambda: self._tell(self._groups.open(name, world_size)))
            case SendWeights(name, version):
                self._send(name, version)

    def _send(self, name: str, version: PolicyVersion) -> None:
        self._share(("stream", version))
        checksums = self._checksums()
        stream = self._stream(version)
        way = self._groups if self._way == "distributed" else self._texts
        sent = self._guarded_sending(name, lambda: way.send(name, _noted(stream, checksums)))
        for _ in stream:  # what is left after a failure: the other ranks send it in any case
            pass
        if sent:
            self._tell(WeightsSent(name, version, _result(checksums)))

    def _guarded_sending(self, name: str, work: Callable[[], None]) -> bool:
        """Whether ``work``, which was asked for under ``name``, came to its end; the groups are gone otherwise, and the
        orchestrator knows."""
        try:
            work()
        except (BroadcastError, NotTaken) as error:
            self._groups.kill()
            self._tell(SendingFailed(name, str(error)))
            return False
        except _GivenUp:
            self._groups.close()
            return False
        return True

    def _release(self, version: PolicyVersion) -> None:
        self._share(("release", version))
        self._snapshots.release(version)

    def _checksums(self) -> Checksums | None:
        rollout = self._config.rollout
        if not rollout.verify_sync:
            return None
        return Checksums("sglang" if rollout.engine == "sglang" else "embedded", self._trainable.shape)


def _noted(
    stream: Iterator[tuple[str, torch.Tensor]], checksums: Checksums | None
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in stream:
        if checksums is not None:
            checksums.add(name, tensor)
        yield name, tensor


def _result(checksums: Checksums | None) -> dict[str, str]:
    return checksums.result() if checksums is not None else {}
