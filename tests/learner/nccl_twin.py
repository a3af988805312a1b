"""NCCL's properties in a world of gloo: what a step must bear that runs on GPUs, seen on CPUs.

``inside`` runs a function of a test world between ranks whose DEVICE groups (those that would be NCCL's on GPUs: every
group that was not asked for as gloo's by name) behave as follows. Groups of gloo that were asked for are as ever.

    synchronize  torch.cuda.synchronize() waits for everything that was posted on the device's groups, receives included
    ahead        torch.cuda.synchronize() inside a schedule is refused: the host is to be ahead of its device
    lazy         a communicator is made by its first use, which blocks the host until its peers use it, too: a group's
                 for collectives and batched messages, a pair's, each direction by itself, for messages (NCCL connects
                 a pair when its first message is launched, batched or not)
    start        a communicator that is first used after the learner's start (``parallel.initialize``) is refused: from
                 then on stages come to it in the order of a schedule
    ordered      operations of one group run one after another, in the order in which the host posted them
    allocate     memory of the device that is allocated inside a schedule (a tensor that is received) waits for all that
                 was posted: torch may have none of that size at hand, and CUDA lets nothing behind an allocation run
                 beside what was before it
    device       a tensor of the host is refused by a group of the device

What waits for a stream or an event, and what reads a tensor of the device, waits for what its stream has waited for; in
a world of gloo the host itself has waited for that, in ``Work.wait``: nothing is left to add. A rank that waits longer
than ``bound_s`` raises ``Hang``, which names what it waits for; the world then shows where each rank stands.

Tensors are all on the CPU here, so those of the host are marked where they are made: by a factory without a device, by
``.cpu()``, from numpy. What is computed from one is not, so this finds the plain cases only.
"""

from __future__ import annotations

import functools
import importlib
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from vcpo_megatron.learner.megatron import parallel, platform, schedule

PROPERTIES = ("synchronize", "ahead", "lazy", "start", "ordered", "allocate", "device")
_MESSAGES = ("send", "recv")
_COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "_allgather_base",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "_reduce_scatter_base",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "from_numpy")

Start = Callable[[], Any]


class Hang(RuntimeError):
    """A rank waited too long."""


class DeviceBarrier(RuntimeError):
    """A host waits for its whole device inside a schedule."""


class LateCommunicator(RuntimeError):
    """A communicator is made after the start."""


class HostTensor(RuntimeError):
    """A tensor of the host was given to a group of the device."""


def inside(
    function: str, arguments: dict[str, Any], properties: Sequence[str], bound_s: float, key: str, before: str = ""
) -> Any:
    """``function`` ("module:name") of a test world, with these properties; ``key``: unlike all others of this world.
    ``before`` is called ahead of it."""
    if before:
        _named(before)()
    with Twin(properties, bound_s, key).installed():
        return _named(function)(**arguments)


def _named(function: str) -> Any:
    module, name = function.split(":")
    return getattr(importlib.import_module(module), name)


class _Work:
    """An operation that was posted; ``wait`` is bounded and may be called by several."""

    def __init__(self, what: str, bound_s: float) -> None:
        self.what = what
        self._bound_s = bound_s
        self._done = threading.Event()
        self._error: BaseException | None = None

    @torch.no_grad()  # threads have a mode of their own
    def run(self, starts: Sequence[Start]) -> None:
        self.finish([start() for start in starts])

    @torch.no_grad()
    def finish(self, works: Sequence[Any]) -> None:
        """Wait for what was started; in the end nobody has to any more."""
        try:
            for work in works:
                if work is not None:
                    work.wait(timedelta(seconds=10 * self._bound_s))
        except BaseException as error:  # the thread's boundary: who waits raises it
            self._error = error
        self._done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._done.wait(self._bound_s):
            raise Hang(f"rank {dist.get_rank()}: {self.what}: not done after {self._bound_s:g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()


class Twin:
    """What one rank keeps of its device's groups."""

    def __init__(self, properties: Sequence[str], bound_s: float, key: str) -> None:
        assert set(properties) <= set(PROPERTIES), properties
        self._has = {name: name in properties for name in PROPERTIES}
        self._bound_s = bound_s
        self._key = key
        self._of_gloo: set[str] = set()
        self._met: set[tuple[Any, ...]] = set()
        self._posted: list[_Work] = []
        self._streams: dict[str, queue.SimpleQueue[tuple[_Work, Sequence[Start]] | None]] = {}
        self._originals: list[tuple[Any, str, Any]] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Until the end of the block torch does as NCCL's would."""
        try:
            for name in _COLLECTIVES:
                if hasattr(ProcessGroup, name):
                    self._replace(ProcessGroup, name, self._collective)
            for name in _MESSAGES:
                self._replace(ProcessGroup, name, self._message)
            for module in (dist, distributed_c10d):
                self._replace(module, "new_group", self._new_group)
                self._replace(module, "batch_isend_irecv", self._batch)
            if self._has["synchronize"] or self._has["ahead"]:
                self._replace(torch.cuda, "synchronize", lambda original: lambda *a, **k: self._synchronize())
            if self._has["allocate"]:
                self._replace(torch, "empty", self._allocation)
            if self._has["device"]:
                self._replace(platform.HostCopy, "wait", lambda original: lambda copy: _host(original(copy)))
                self._replace(distributed_c10d, "_get_object_coll_device", _as_device)
                self._mark_host_tensors()
            yield
        finally:
            for owner, name, own in reversed(self._originals):
                if own is None:
                    delattr(owner, name)  # it is its parent's
                else:
                    setattr(owner, name, own)
            for stream in self._streams.values():
                stream.put(None)

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        self._originals.append((owner, name, vars(owner).get(name)))  # unbound, where it is a method
        setattr(owner, name, functools.wraps(original)(wrap(original)))

    # --- groups ---------------------------------------------------------------------------------

    def _new_group(self, original: Any) -> Any:
        def new_group(*args: Any, **kwargs: Any) -> Any:
            group = original(*args, **kwargs)
            asked = kwargs.get("backend", args[2] if len(args) > 2 else None)
            if asked == "gloo" and isinstance(group, ProcessGroup):
                self._of_gloo.add(group.group_name)
            return group

        return new_group

    def _is_device(self, group: ProcessGroup) -> bool:
        return group.size() > 1 and group.group_name not in self._of_gloo

    def _meet(self, group: ProcessGroup, kind: str, who: Sequence[int], need: Sequence[int]) -> None:
        """The communicator ``kind`` of ``group`` is made once: every rank of ``need`` must come here for it."""
        name = (group.group_name, kind, tuple(who))
        if name in self._met:
            return
        self._met.add(name)
        what = f"the communicator of {kind} {list(who)} in {_label(group)}, first used at {_site()}"
        if self._has["start"] and not _inside(parallel.initialize):
            raise LateCommunicator(f"rank {dist.get_rank()}: {what}, is not made at the start")
        if self._has["lazy"]:
            store, place = distributed_c10d._get_default_store(), f"twin {self._key}/{name}"
            store.set(f"{place}/{group.rank()}", "here")
            self._pending.append((place, need, what))

    _pending: list[tuple[str, Sequence[int], str]]

    def _connect(
        self, group: ProcessGroup, *, whole: bool, sends: Sequence[int] = (), receives: Sequence[int] = ()
    ) -> None:
        """First uses of one operation: all are announced before any is waited for."""
        self._pending = []
        if whole:
            self._meet(group, "group", range(group.size()), range(group.size()))
        for peer in sends:
            self._meet(group, "pair", (group.rank(), peer), (peer,))
        for peer in receives:
            self._meet(group, "pair", (peer, group.rank()), (peer,))
        store = distributed_c10d._get_default_store()
        for place, need, what in self._pending:
            try:
                store.wait([f"{place}/{rank}" for rank in need], timedelta(seconds=self._bound_s))
            except dist.DistError as error:
                missing = [rank for rank in need if not store.check([f"{place}/{rank}"])]
                raise Hang(
                    f"rank {dist.get_rank()}: {what}: its ranks {missing} have not come after {self._bound_s:g} s"
                ) from error

    # --- operations -----------------------------------------------------------------------------

    def _collective(self, original: Any) -> Any:
        def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if not self._is_device(group):
                return original(group, *args, **kwargs)
            self._check(original.__name__, (*args, *kwargs.values()))
            self._connect(group, whole=True)
            waited_for = any(getattr(value, "asyncOp", None) is False for value in (*args, *kwargs.values()))
            return self._post(
                group, original.__name__, [lambda: original(group, *args, **kwargs)], waited_for=waited_for
            )

        return call

    def _message(self, original: Any) -> Any:
        name = original.__name__

        def call(group: ProcessGroup, tensors: list[Any], peer: int, tag: int = 0) -> Any:
            if not self._is_device(group):
                return original(group, tensors, peer, tag)
            self._check(name, tensors)
            self._connect(group, whole=False, **{"sends" if name == "send" else "receives": [peer]})
            return self._post(group, f"{name} {peer}", [lambda: original(group, tensors, peer, tag)])

        return call

    def _batch(self, original: Any) -> Any:
        """Messages of one batch are one operation."""
        methods = {dist.isend: ProcessGroup.send, dist.irecv: ProcessGroup.recv}
        send, receive = ((m.__wrapped__ if hasattr(m, "__wrapped__") else m) for m in methods.values())

        def call(ops: list[Any]) -> Any:
            group = ops[0].group or dist.group.WORLD
            if not self._is_device(group):
                return original(ops)
            self._check("batch_isend_irecv", [op.tensor for op in ops])
            peers: dict[bool, list[int]] = {True: [], False: []}
            for op in ops:
                peers[op.op is dist.isend].append(op.group_peer)
            self._connect(group, whole=True, sends=peers[True], receives=peers[False])
            starts = [
                functools.partial(send if op.op is dist.isend else receive, group, [op.tensor], op.group_peer, op.tag)
                for op in ops
            ]
            return [self._post(group, f"batch: sends to {peers[True]}, receives from {peers[False]}", starts)]

        return call

    def _post(self, group: ProcessGroup, what: str, starts: Sequence[Start], *, waited_for: bool = False) -> Any:
        """``waited_for``: the caller waits for it at once."""
        self._posted = [work for work in self._posted if not work.is_completed()]
        work = _Work(f"{what} in {_label(group)}, posted at {_site()}", self._bound_s)
        self._posted.append(work)
        if self._has["ordered"]:
            name = group.group_name
            if name not in self._streams:
                self._streams[name] = queue.SimpleQueue()
                threading.Thread(
                    target=_stream, args=(self._streams[name],), name=f"stream {name}", daemon=True
                ).start()
            self._streams[name].put((work, starts))
        else:
            works = [start() for start in starts]
            threading.Thread(target=work.finish, args=(works,), daemon=True).start()
        if waited_for:
            work.wait()
        return work

    def _synchronize(self) -> None:
        """All that was posted, whoever waits for it."""
        if self._has["ahead"] and _inside(schedule.run_schedule):
            raise DeviceBarrier(f"rank {dist.get_rank()}: torch.cuda.synchronize() at {_site()} in a schedule")
        if self._has["synchronize"]:
            self._wait_for_all(f"torch.cuda.synchronize() at {_site()}")

    def _allocation(self, original: Any) -> Any:
        def empty(*args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            if isinstance(device, torch.device) and _inside(schedule.run_schedule):
                self._wait_for_all(f"memory of the device, allocated at {_site()},")
            return original(*args, **kwargs)

        return empty

    def _wait_for_all(self, who: str) -> None:
        for work in self._posted:
            try:
                work.wait()
            except Hang as error:
                raise Hang(f"{who} waits for this: {error}") from error
        self._posted.clear()

    # --- tensors --------------------------------------------------------------------------------

    def _check(self, operation: str, values: Sequence[Any]) -> None:
        if not self._has["device"]:
            return
        for value in values:
            if isinstance(value, (list, tuple)):
                self._check(operation, value)
            elif isinstance(value, torch.Tensor) and getattr(value, "on_host", False):
                raise HostTensor(
                    f"{operation} at {_site()} in a group of the device: a tensor {list(value.shape)} of the host"
                )

    def _mark_host_tensors(self) -> None:
        def factory(original: Any) -> Any:
            def make(*args: Any, **kwargs: Any) -> Any:
                made = original(*args, **kwargs)
                device = kwargs.get("device")
                if device is None or (isinstance(device, str) and device.startswith("cpu")):
                    made.on_host = True
                return made

            return make

        def cpu(original: Any) -> Any:
            return lambda self, *a, **k: self if getattr(self, "on_host", False) else _host(self.clone())

        def to(original: Any) -> Any:
            def move(self: Any, *args: Any, **kwargs: Any) -> Any:
                moved = original(self, *args, **kwargs)
                asked = kwargs.get("device", args[0] if args else None)
                if isinstance(asked, str) and asked.startswith("cpu"):
                    return (
                        moved if getattr(moved, "on_host", False) else _host(moved.clone() if moved is self else moved)
                    )
                if isinstance(asked, torch.device) and moved is self and getattr(self, "on_host", False):
                    return self.clone()
                return moved

            return move

        for name in _FACTORIES:
            self._replace(torch, name, factory)
        self._replace(torch.Tensor, "cpu", cpu)
        self._replace(torch.Tensor, "to", to)


def _as_device(original: Any) -> Any:
    """Objects travel in tensors where the group's backend has its own, which torch names by a text."""
    return lambda *args, **kwargs: torch.device(original(*args, **kwargs))


def _host(tensor: Any) -> Any:
    tensor.on_host = True
    return tensor


def _stream(posted: queue.SimpleQueue[tuple[_Work, Sequence[Start]] | None]) -> None:
    while (job := posted.get()) is not None:
        work, starts = job
        try:
            work.run(starts)
        except BaseException as error:  # as in ``_Work.finish``
            work._error = error
            work._done.set()
        del job, work, starts  # a group is not kept by its stream


def _label(group: ProcessGroup) -> str:
    return f"the group of ranks {dist.get_process_group_ranks(group)} ({group.group_desc or group.group_name})"


def _frames() -> Iterator[Any]:
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _site() -> str:
    """The innermost line of the project or of Megatron."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if "/megatron/" in file or "vcpo_megatron/" in file:
            return f"{'/'.join(file.split('/')[-2:])}:{frame.f_lineno}"
    return "?"


def _inside(function: Any) -> bool:
    return any(frame.f_code is function.__code__ for frame in _frames())
