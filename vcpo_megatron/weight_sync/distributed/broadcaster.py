"""The process that broadcasts weights, so that a broadcast can be given up: it is killed, and its peers see it go.

A blocked broadcast cannot be called back (gloo waits out its timeout; NCCL must be aborted with all its state), and
neither the learner nor the servers may hang in one because another server refused. So learner rank 0 fills buckets
in memory that it shares with this process, which alone is a member of the groups.

    learner's sender --slot filled--> broadcaster --broadcast--> servers
                     <--slot free----

``Broadcaster`` is the learner's handle, ``main`` what the process runs.
Two slots: one is filled while the other is on its way. The process locks their pages, so that a GPU copies from them by
itself; the learner's end need not: it fills them from memory of the host.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ...config.weight_transport import nccl_variables
from ...run.text import one_line
from ...transport.child import start_child, stop_child
from ..sender import TransferError
from ..wire import GroupError, WeightGroup, open_store

SLOTS = 2


class BroadcastError(TransferError):
    """The broadcaster failed, died or was given up; the message says why."""


class Broadcaster:
    """Used from one thread, with which the process ends. ``poll`` is called while it waits; what it raises ends the
    wait. ``starting``: it is in no group yet, so nobody waits for it."""

    def __init__(self, slot_bytes: int, backend: str, timeout_s: float, log: Path) -> None:
        self._timeout_s = timeout_s
        memory = os.memfd_create("weights")
        ours, theirs = socket.socketpair()
        try:
            os.ftruncate(memory, SLOTS * slot_bytes)
            self._mapped = mmap.mmap(memory, SLOTS * slot_bytes)
            command = [
                sys.executable,
                "-m",
                "vcpo_megatron.weight_sync.distributed.broadcaster",
                str(theirs.fileno()),
                str(memory),
                str(slot_bytes),
                backend,
                repr(timeout_s),
            ]
            # it alone is in a group with servers: the learner's own groups keep NCCL's defaults
            env = nccl_variables() if backend == "nccl" else {}
            self._process = start_child(command, env=env, log=log, pass_fds=(theirs.fileno(), memory), with_thread=True)
        finally:
            os.close(memory)
            theirs.close()
        self._pipe = Connection(ours.detach())
        whole = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self._slots = [whole[i * slot_bytes : (i + 1) * slot_bytes] for i in range(SLOTS)]
        self._on_their_way: list[int] = []
        self.starting = True

    def open(self, name: str, world_size: int, poll: Callable[[], None]) -> int:
        """Begin to wait for the others of group ``name``; the port where they find it."""
        if self.starting:  # else what is given up before it has started would still be done
            self._answer("ready", poll)
            self.starting = False
        self._send(("open", name, world_size))
        return int(self._answer("port", poll))

    def slot(self, number: int, poll: Callable[[], None]) -> torch.Tensor:
        """Memory of bucket ``number``, counted from 0 over one update, once the bucket before in it has left."""
        while len(self._on_their_way) >= SLOTS:
            self._one_left(poll)
        return self._slots[number % SLOTS]

    def broadcast(self, name: str, number: int, size: int) -> None:
        """Send the first ``size`` bytes of bucket ``number``'s slot to the servers of group ``name``."""
        self._send(("broadcast", name, number % SLOTS, size))
        self._on_their_way.append(number)

    def finish(self, poll: Callable[[], None]) -> None:
        """Wait until every bucket has left."""
        while self._on_their_way:
            self._one_left(poll)

    def kill(self) -> None:
        """End the process: every group is gone, and its servers see their connections close."""
        stop_child(self._process, grace_s=0.0)
        self._pipe.close()

    def _one_left(self, poll: Callable[[], None]) -> None:
        self._answer("left", poll)
        self._on_their_way.pop(0)

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._pipe.send(message)
        except OSError as error:
            raise BroadcastError(f"the broadcaster is gone ({error})") from error

    def _answer(self, kind: str, poll: Callable[[], None]) -> Any:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                if self._pipe.poll(0.02):
                    answered, value = self._pipe.recv()
                    break
            except (EOFError, OSError) as error:
                raise BroadcastError("the broadcaster ended, see its log") from error
            poll()
            if time.monotonic() > deadline:
                raise BroadcastError(f"the broadcaster did not answer within {self._timeout_s:g} s")
        if answered != kind:
            raise BroadcastError(str(value))
        return value


def lock_pages(memory: torch.Tensor) -> None:
    """Let the GPU copy from ``memory``, which is shared with another process, without a copy in between. Where CUDA
    refuses, a line says so, and copies are slower."""
    try:
        answer = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        if answer == 0:
            return
        problem = f"cudaHostRegister: error {answer}"
        torch.zeros(1, device="cuda")  # CUDA keeps the error for the next launch to report: for this one
    except RuntimeError as error:
        problem = one_line(error)
    print(f"pages of {memory.numel():,} bytes are not locked ({problem}): copies to the GPU are slower", flush=True)


def main() -> int:
    """Serve until the learner's end of the pipe closes."""
    pipe, memory, slot_bytes = Connection(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    backend, timeout_s = sys.argv[4], float(sys.argv[5])
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    mapped = mmap.mmap(memory, SLOTS * slot_bytes)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    if backend == "nccl":
        lock_pages(whole)
    groups: dict[str, WeightGroup] = {}
    pipe.send(("ready", None))
    while True:
        try:
            command, name, *rest = pipe.recv()
        except EOFError:
            return 0
        try:
            if command == "open":
                store = open_store(timeout_s)
                pipe.send(("port", store.port))
                groups[name] = WeightGroup(store, name, 0, rest[0], backend, timeout_s)
            else:
                slot, size = rest
                group, start = groups[name], slot * slot_bytes
                group.broadcast(whole[start : start + size].to(group.device))
                pipe.send(("left", None))
        except GroupError as error:
            pipe.send(("failed", str(error)))
            return 1


if __name__ == "__main__":
    sys.exit(main())
