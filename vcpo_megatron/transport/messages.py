"""What the orchestrator and learner rank 0 say to each other; no torch.

orchestrator (ROUTER, asyncio)                    learner rank 0 (DEALER, blocking)
    <-- Hello        once, with the run's token
    <-- Loaded       once, when its parameters are those of that version
    <-- WeightsReady after the start and after the last step of every batch
    --> SyncDone     it was received; what lies on the disk need not be kept in memory any more
    --> OpenGroup    <-- GroupOpened    rollout.sync = "distributed": servers and sender meet at an address
    --> SendWeights  <-- WeightsSent    all buckets of a version, in the order of its plan: broadcast, or, with
                                        "tensor", each as <-- WeightsBucket --> BucketTaken
    --> StopSending, ReleaseWeights     <-- SendingFailed
    --> Probe        <-- ProbeResult
    --> ScoreGroups  <-- GroupsScored   algorithm.mismatch = "recorded": what it gives the tokens of complete groups
    --> BatchReady   <-- StepDone, or StepAborted
    --> AbortStep    asks for StepAborted; StepDone comes all the same when the step is too far
    --> Checkpoint   <-- CheckpointDone
    --> Stop         the learner ends with exit code 0
    <-> Error        the run ends; <-> Heartbeat
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..types import Batch, PolicyVersion, StepResult


class ControlError(RuntimeError):
    """The peer is silent past a deadline, speaks wrongly, or reported an error."""


@dataclass(frozen=True)
class Hello:
    """First message of the learner. ``version`` is the policy that its parameters are to be."""

    token: str
    version: PolicyVersion
    world_size: int


@dataclass(frozen=True)
class Loaded:
    """All ranks hold ``version``: what a resumed run goes back to could be read, and is what was written."""

    version: PolicyVersion


@dataclass(frozen=True)
class WeightsReady:
    """All tensors of ``version`` under Hugging Face names can be had by ``transport``, one of ``rollout.sync``.

    plan       "tensor", "distributed": buckets in the order in which they will be sent, each a list of
               [name, dtype, shape]
    path       "disk": a folder of safetensors, complete
    checksums  "disk": name of a server's parameter -> checksum, with ``rollout.verify_sync``; else they come with
               WeightsSent
    probe      log-probs that ``version`` gives the tokens of ``weight_sync.probe``
    """

    version: PolicyVersion
    transport: str
    plan: list[Any] = field(default_factory=list)
    path: str = ""
    checksums: dict[str, Any] = field(default_factory=dict)
    probe: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class SyncDone:
    version: PolicyVersion


@dataclass(frozen=True)
class OpenGroup:
    """Asks the sender to wait, as rank 0, for the servers of group ``name``; ``world_size`` counts it."""

    name: str
    world_size: int


@dataclass(frozen=True)
class GroupOpened:
    """The servers of group ``name`` are awaited at ``address``:``port``; ``backend`` is torch's."""

    name: str
    address: str
    port: int
    backend: str


@dataclass(frozen=True)
class SendWeights:
    """Asks the sender for all buckets of ``version``: to be broadcast in group ``name``, or, with "tensor", sent here
    under ``name``."""

    name: str
    version: PolicyVersion


@dataclass(frozen=True)
class WeightsBucket:
    """Bucket ``number``, counted from 0, of what SendWeights ``name`` asked for. ``data`` is opaque: what SGLang's
    ``update_weights_from_tensor`` takes as one element of ``serialized_named_tensors`` (base64), forwarded unread."""

    name: str
    number: int
    data: bytes


@dataclass(frozen=True)
class BucketTaken:
    """Every server has loaded the bucket: room for another one."""

    name: str
    number: int


@dataclass(frozen=True)
class WeightsSent:
    """Every bucket has left. ``checksums`` as in WeightsReady."""

    name: str
    version: PolicyVersion
    checksums: dict[str, Any]


@dataclass(frozen=True)
class StopSending:
    """Ends what is being sent and every group at once, also in the middle of a broadcast."""

    reason: str


@dataclass(frozen=True)
class SendingFailed:
    """What OpenGroup or SendWeights ``name`` asked for could not be done; no group is left."""

    name: str
    reason: str


@dataclass(frozen=True)
class ReleaseWeights:
    """``version`` will not be asked for any more."""

    version: PolicyVersion


@dataclass(frozen=True)
class Probe:
    """Asks for log-probs of ``tokens`` [L] (int32) under the current parameters."""

    tokens: np.ndarray


@dataclass(frozen=True)
class ProbeResult:
    """``logprobs`` [L-1] (float32): log pi(tokens[t] | tokens[:t]) for t = 1..L-1."""

    logprobs: np.ndarray


@dataclass(frozen=True)
class ScoreGroups:
    """Asks for the learner's own log-probs of complete groups. ``batch.step``: number of the version that it holds."""

    batch: Batch


@dataclass(frozen=True)
class GroupsScored:
    """``logprobs`` float32: log pi of every token of ScoreGroups under ``version``, at the sampling temperature, one
    trajectory after another; 0 where the policy did not sample it."""

    version: PolicyVersion
    logprobs: np.ndarray


@dataclass(frozen=True)
class BatchReady:
    batch: Batch


@dataclass(frozen=True)
class StepDone:
    """``weights_follow``: a WeightsReady of the step's version comes next, as it does after the last one of a batch."""

    result: StepResult
    weights_follow: bool = True


@dataclass(frozen=True)
class AbortStep:
    """Asks to abort ``step`` before its optimizer step. It may be done already: StepDone is then the answer."""

    step: int


@dataclass(frozen=True)
class StepAborted:
    """``step`` was aborted: parameters and optimizer are as before it."""

    step: int


@dataclass(frozen=True)
class Checkpoint:
    """Asks for a checkpoint of the current parameters as ``step``; ``state`` goes into its manifest."""

    step: int
    state: dict[str, Any]


@dataclass(frozen=True)
class CheckpointDone:
    step: int
    seconds: float


@dataclass(frozen=True)
class Stop:
    reason: str


@dataclass(frozen=True)
class Error:
    """Fatal: the sender is about to end. ``message`` is one line for the user."""

    sender: str
    message: str


@dataclass(frozen=True)
class Heartbeat:
    """``doing`` says what the sender does or waits for."""

    sender: str
    doing: str


Message = (
    Hello
    | Loaded
    | WeightsReady
    | SyncDone
    | Probe
    | ProbeResult
    | ScoreGroups
    | GroupsScored
    | BatchReady
    | StepDone
    | AbortStep
    | StepAborted
    | Checkpoint
    | CheckpointDone
    | Stop
    | Error
    | Heartbeat
    | OpenGroup
    | GroupOpened
    | SendWeights
    | WeightsBucket
    | BucketTaken
    | WeightsSent
    | StopSending
    | SendingFailed
    | ReleaseWeights
)
#: What the learner's sender of weights reads, whatever its main thread does meanwhile.
FOR_SENDER = (SyncDone, OpenGroup, SendWeights, BucketTaken, StopSending, ReleaseWeights)
