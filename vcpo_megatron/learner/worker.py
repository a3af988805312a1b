"""A learner rank: serves commands, all ranks alike, until Stop.

    orchestrator <--control socket--> rank 0 --broadcast of every message--> all ranks

The loop (all ranks)    consumes: commands
                        produces: StepDone, WeightsReady, CheckpointDone, ProbeResult, GroupsScored
                        waits for: rank 0's next broadcast; rank 0 for the orchestrator
                        unblocked by: a message, or rank 0's idle command every few seconds (so that a
                        silent orchestrator never lets a collective run into its deadline)

Weights are copied right after the last step of a batch and sent by a thread of their own (``weight_sync.learner``). A
checkpoint is written by a thread while further commands are served; it is looked after between commands.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from ..config.process import ENDED_BY_ORCHESTRATOR, ProcessContext
from ..config.schema import RunConfig
from ..transport.control import ControlClient, Received
from ..transport.frames import decode, encode
from ..transport.messages import (
    AbortStep,
    BatchReady,
    Checkpoint,
    CheckpointDone,
    ControlError,
    Error,
    GroupsScored,
    Heartbeat,
    Hello,
    Loaded,
    Message,
    Probe,
    ProbeResult,
    ScoreGroups,
    StepAborted,
    StepDone,
    Stop,
)
from ..types import Batch, PolicyVersion
from ..weight_sync.learner import WeightSender
from ..weight_sync.probe import probe_tokens
from .checkpoint.checkpoints import Checkpoints
from .checkpoint.exports import Exports
from .megatron import platform
from .megatron.layer_specs import describe_kernels
from .megatron.parallel import Parallel, initialize
from .megatron.training import build_trainable
from .step.vcpo_step import VcpoStep
from .weights.gather import WeightGatherer
from .weights.scoring import score_tokens
from .weights.snapshots import Snapshots

#: Seconds after which rank 0, without a command, lets the other ranks pass through their collective.
IDLE_S = 2.0
#: The same while a checkpoint is being written, so that its end is seen soon.
SAVING_S = 0.1


class Worker:
    """One rank. Built by ``__main__`` after the process context is known."""

    def __init__(self, config: RunConfig, context: ProcessContext) -> None:
        self._config = config
        self._parallel = initialize(config)
        self._control = ControlClient(context.control) if self._parallel.rank == 0 else None
        if self._parallel.rank == 0:
            method = f"{config.algorithm.method}, opob_mode {config.algorithm.opob_mode}"
            print(f"{self._parallel.layout}; {method}; Adam: {platform.kernels().adam}'s", flush=True)
        self._version = PolicyVersion(context.attempt, context.resume_step or 0, context.run)
        self._send(Hello(context.token, self._version, self._parallel.world_size))
        fresh, start = context.resume_step is None, config.train.start_from
        # weights that a checkpoint replaces are read only where they are the reference of the KL term
        initial = (fresh and start is None) or config.algorithm.kl_reference == "initial"
        self._set_doing(f"builds the model and loads {config.model.path}")
        trainable = build_trainable(config, self._parallel, load=initial)
        self._trainable = trainable
        if self._parallel.rank == 0:
            print(describe_kernels(trainable.chunks[0].config, config.model, trainable.shape), flush=True)
        self._step = VcpoStep(config, self._parallel, trainable, abort_requested=self._abort_requested)
        self._checkpoints = Checkpoints(config, context.directory, self._parallel, trainable)
        if context.resume_step is not None:
            self._set_doing(f"loads checkpoint step_{context.resume_step}")
            self._step.ess_state = self._checkpoints.load(context.resume_step)
        elif start is not None:
            self._set_doing(f"loads the weights of {start}")
            self._checkpoints.start_from(start, optimizer=config.train.start_optimizer)
        gatherer = WeightGatherer(trainable, self._parallel)
        self._exports = Exports(config, context.directory, self._parallel, trainable, gatherer)
        # a replay has no servers
        sends = config.rollout.engine != "replay"
        source = Snapshots(gatherer, self._parallel, trainable.shape)
        self._sender = WeightSender(config, context, source, self._control) if sends else None
        self._stall_s = 0.0  # seconds that the last version's copy took
        self._inbox: deque[Received] = deque()
        self._last_message = time.monotonic()

    def run(self) -> None:
        """Serve until Stop."""
        self._send(Loaded(self._version))
        self._publish_weights()
        while True:
            self._set_doing(f"idle at version {self._version}, waits for a batch")
            if self._sender is not None:
                self._sender.check()
            self._look_after_checkpoint()
            match self._next_command():
                case BatchReady(batch):
                    self._set_doing(f"trains step {batch.step}")
                    self._train(batch)
                case Checkpoint(step, state):
                    self._set_doing(f"copies its state for checkpoint {step}")
                    self._look_after_checkpoint(wait=True)
                    self._checkpoints.start(step, self._version, self._step.ess_state, state)
                case Probe(tokens):
                    logprobs = score_tokens(self._trainable, self._parallel, tokens)
                    self._send(ProbeResult(logprobs))
                case ScoreGroups(batch):
                    self._set_doing(f"scores {len(batch.groups)} groups by version {self._version}")
                    self._send(GroupsScored(self._version, self._step.record(batch)))
                case Stop():
                    self._look_after_checkpoint(wait=True)
                    return
                case Heartbeat() | AbortStep():  # the abort of a step that is done
                    pass
                case Error(_, message):
                    raise ControlError(f"{ENDED_BY_ORCHESTRATOR}{message}")
                case other:
                    raise ControlError(f"the learner cannot serve {type(other).__name__}")

    def _train(self, batch: Batch) -> None:
        result = self._step.run(batch, self._version.next())
        if result is None:
            return self._send(StepAborted(batch.step))
        self._version = result.version
        if self._sender is not None:  # of the version that this step started from: its own is copied after StepDone
            result = replace(result, metrics={**result.metrics, "time/sync_stall": self._stall_s})
        weights_follow = self._config.train.begins_batch(self._version.number)
        self._send(StepDone(result, weights_follow))
        self._stall_s = 0.0
        if weights_follow:
            self._publish_weights()
        if self._exports.is_due(self._version.number):
            self._set_doing(f"exports the policy of step {self._version.number}")
            self._exports.write(self._version.number)

    def _abort_requested(self) -> bool:
        """Rank 0, during a step: whether it is to be aborted. Other messages wait in the inbox."""
        assert self._control is not None
        while (received := self._control.receive(0.0)) is not None:
            self._last_message = time.monotonic()
            self._inbox.append(received)
        asked = [message for message, _ in self._inbox if isinstance(message, AbortStep)]
        return any(message.step == self._version.number for message in asked)

    def _look_after_checkpoint(self, *, wait: bool = False) -> None:
        """Complete the checkpoint that is being written when every rank has written its part."""
        if self._checkpoints.busy and (done := self._checkpoints.finished(wait=wait)) is not None:
            self._send(CheckpointDone(*done))

    # --- control ------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        if self._control is not None:
            self._control.send(message)

    def _set_doing(self, doing: str) -> None:
        """What the next Heartbeat says."""
        if self._control is not None:
            self._control.doing = doing

    def _next_command(self) -> Message:
        """The orchestrator's next message, on every rank."""
        if self._parallel.rank == 0:
            message, frames = self._receive()
            _broadcast_frames(frames, self._parallel)
            return message
        return decode(_broadcast_frames([], self._parallel))

    def _receive(self) -> Received:
        """Rank 0: the next command, or a Heartbeat for the other ranks when there is none for a while.

        The orchestrator sends heartbeats of its own; ControlError when it is silent for ``launch.timeout_s``.
        """
        assert self._control is not None
        if self._inbox:
            return self._inbox.popleft()
        idle_s = SAVING_S if self._checkpoints.busy else IDLE_S
        if (received := self._control.receive(idle_s)) is not None:
            self._last_message = time.monotonic()
            return received
        if time.monotonic() - self._last_message > self._config.launch.timeout_s:
            raise ControlError(
                f"the orchestrator was silent for {self._config.launch.timeout_s:g} s (launch.timeout_s); see its log"
            )
        idle = Heartbeat("learner", "idle")
        return Received(idle, encode(idle))

    def _publish_weights(self) -> None:
        """Copy this version's weights; the sender does the rest."""
        if self._sender is not None:
            self._set_doing(f"copies the weights of version {self._version}")
            probe = score_tokens(self._trainable, self._parallel, probe_tokens(self._trainable.shape.vocab_size))
            started = time.monotonic()
            self._sender.publish(self._version, probe.tolist())
            self._stall_s = time.monotonic() - started

    def report_failure(self, error: BaseException) -> None:
        """Tell the orchestrator why this rank ends."""
        self._sender = None  # its thread, which may wait for other ranks, ends with the process
        self._send(Error(f"learner rank {self._parallel.rank}", f"{type(error).__name__}: {error}"))

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        if self._control is not None:
            self._control.close()


def _broadcast_frames(frames: list[bytes], parallel: Parallel) -> list[bytes]:
    """Frames of rank 0 on every rank: lengths first, then one buffer."""
    lengths: list[list[int]] = [[len(frame) for frame in frames]]
    dist.broadcast_object_list(lengths, src=0, group=parallel.command_group)
    total = sum(lengths[0])
    data = torch.empty(total, dtype=torch.uint8)
    if parallel.rank == 0:
        data.numpy()[:] = np.frombuffer(b"".join(frames), dtype=np.uint8)
    dist.broadcast(data, src=0, group=parallel.command_group)
    whole, position, received = data.numpy().tobytes(), 0, []
    for length in lengths[0]:
        received.append(whole[position : position + length])
        position += length
    return received
