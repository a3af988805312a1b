"""The learner's own step on tensors without storage: one rank of any model and layout, in one process, without a GPU.

Parameters, gradients and activations have shapes and no numbers (torch's "meta" device); process groups are torch's
"fake" ones, where every message is there at once and changes nothing; other ranks are as this one. What only depends on
the plan runs as it would: which tensors there are, what is sent, and what the host asks of the device. The host's own
tables are real. A number of the device does not exist: ``platform.read`` and ``start_read`` answer with ones, and
``DeviceWatch`` answers, and counts, whoever asks another way.

A process that has rehearsed does nothing else afterwards.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..config.schema import RunConfig
from ..types import Batch, PolicyVersion, StepResult
from .megatron import platform
from .megatron.dispatch import Counting, ExpertCounts, Labels, PlannedDispatch

_ATEN = torch.ops.aten


@dataclass
class Rehearsal:
    """What a step asked of the device and of other ranks.

    reads        copies to the host; those that do not pass ``platform`` are blocking ones
    unplanned    of the blocking ones, those that do not pass it, by the line that asks
    waiting      copies to the device that wait for all that is queued there, by the line that asks
    operations   what the device was given to do, by name; views and allocations are left out
    parameters   of this rank
    result       of the step; its numbers mean nothing
    """

    reads: platform.DeviceReads = field(default_factory=platform.DeviceReads)
    unplanned: Counter[str] = field(default_factory=Counter)
    waiting: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    parameters: int = 0
    result: StepResult | None = None


class DeviceWatch(TorchDispatchMode):
    """Tensors without storage stand for those of a GPU: what needs their numbers is counted, and answered with ones."""

    def __init__(self, found: Rehearsal) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        of_device = any(isinstance(x, Tensor) and x.is_meta for x in args)
        if of_device and (answer := self._answer(func, args, kwargs)) is not None:
            self._found.reads.note_blocking()
            self._found.unplanned[platform.asked_by()] += 1
            return answer
        if self._waits(func, args, kwargs):
            self._found.waiting[platform.asked_by()] += 1
        elif of_device and not (func.is_view or "empty" in func.name()):
            self._found.operations[func.name()] += 1
        return func(*args, **kwargs)

    @staticmethod
    def _answer(func: Any, args: Any, kwargs: Any) -> Any:
        """What the host would have to wait for; None where it need not."""
        packet = func.overloadpacket
        if packet is _ATEN._local_scalar_dense:
            return 1.0 if args[0].dtype.is_floating_point else 1
        if packet is _ATEN._to_copy and torch.device(kwargs.get("device") or "meta").type == "cpu":
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if packet is _ATEN.copy_ and not args[0].is_meta and args[1].is_meta:
            return args[0].fill_(1)
        if packet is _ATEN.nonzero:
            return args[0].new_zeros(args[0].numel(), args[0].dim(), dtype=torch.int64)
        if packet is _ATEN.masked_select:
            return args[0].new_zeros(args[0].numel())
        if packet is _ATEN.index and any(x is not None and x.dtype is torch.bool for x in args[1]):
            mask = next(x for x in args[1] if x is not None and x.dtype is torch.bool)
            return args[0].new_zeros(mask.numel(), *args[0].shape[mask.dim() :])
        return None

    @staticmethod
    def _waits(func: Any, args: Any, kwargs: Any) -> bool:
        """A copy from the host's memory, unless it was made by ``platform.to_device``."""
        packet = func.overloadpacket
        if packet is _ATEN._to_copy and not args[0].is_meta:
            return torch.device(kwargs.get("device") or "cpu").type == "meta" and not _by_to_device()
        if packet is _ATEN.copy_ and args[0].is_meta and not args[1].is_meta:
            return args[1].dim() > 0
        if packet in (_ATEN.index, _ATEN.index_put_, _ATEN._index_put_impl_) and args[0].is_meta:
            return any(x is not None and not x.is_meta for x in args[1])
        return False


def _by_to_device() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not platform.to_device.__code__:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def fake_world(rank: int, ranks: int) -> Iterator[None]:
    """A world of ``ranks`` of which this process is ``rank``, and no other exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0")
    platform.prepare()
    from megatron.core.distributed import param_and_grad_buffer

    from .megatron import parallel

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    new_group = dist.new_group

    def fake_group(ranks: Any = None, *_: Any, **__: Any) -> Any:
        return new_group(ranks, backend="fake")

    def own_group(mine: tuple[int, ...], *_: Any, **__: Any) -> Any:
        return new_group(list(mine), backend="fake")

    def alike(everywhere: list[Any], own: Any, group: Any = None) -> None:
        everywhere[:] = [own] * len(everywhere)

    def at_once(operations: list[Any]) -> list[Any]:
        return [operation.op(operation.tensor, operation.peer) for operation in operations]

    def arrived(tensor: Tensor, *_: Any, **__: Any) -> Any:
        if not tensor.is_meta:
            tensor.fill_(1)
        return _Arrived()

    @contextlib.contextmanager
    def one_by_one(*_: Any, **__: Any) -> Iterator[_Arrived]:
        yield _Arrived()

    with contextlib.ExitStack() as patches:
        for name, stand_in in _everywhere(new_group=fake_group, batch_isend_irecv=at_once, irecv=arrived, recv=arrived):
            patches.enter_context(mock.patch(name, stand_in))
        patches.enter_context(mock.patch.object(dist, "all_gather_object", alike))
        patches.enter_context(mock.patch.object(parallel, "_group_of", own_group))
        patches.enter_context(mock.patch.object(param_and_grad_buffer, "_coalescing_manager", one_by_one))
        try:
            yield
        finally:
            parallel.destroy()


def _everywhere(**stand_ins: Callable[..., Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Under both names by which Megatron and the learner call them."""
    for name, stand_in in stand_ins.items():
        yield f"torch.distributed.{name}", stand_in
        yield f"torch.distributed.distributed_c10d.{name}", stand_in


class _Arrived:
    """The work of a message that is there."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _EvenRouting:
    """What the dispatchers of mixtures read: as many tokens for every expert, of every source and label."""

    def __init__(self) -> None:
        self._rows, self._experts, self._first = 0, 1, 0

    def patches(self) -> Iterator[Any]:
        count, count_gathered = PlannedDispatch._count, PlannedDispatch._count_gathered

        def counted(dispatch: PlannedDispatch, dispatcher: Any, routing_map: Tensor, asked: Labels | None) -> Counting:
            self._see(dispatcher, routing_map, 1)
            return count(dispatch, dispatcher, routing_map, asked)

        def gathered(dispatch: PlannedDispatch, dispatcher: Any, asked: Labels | None) -> Counting:
            self._see(dispatcher, dispatcher.routing_map, dispatcher.ep_size * dispatcher.tp_size)
            return count_gathered(dispatch, dispatcher, asked)

        yield mock.patch.object(PlannedDispatch, "_count", counted)
        yield mock.patch.object(PlannedDispatch, "_count_gathered", gathered)
        yield mock.patch.object(PlannedDispatch, "_start", self._start)

    def _see(self, dispatcher: Any, routing_map: Tensor, sources: int) -> None:
        self._rows = routing_map.shape[0] // sources * dispatcher.config.moe_router_topk
        self._experts, self._first = routing_map.shape[1], dispatcher.local_expert_indices[0]

    def _start(self, here: Tensor, asked: Labels | None, sent: Tensor) -> Counting:
        platform.start_read(torch.cat([here.reshape(-1), sent]), awaited=True)  # as the real one, which asks once
        rows = [self._rows // self._experts + (e < self._rows % self._experts) for e in range(self._experts)]
        experts, sources, labels = here.shape
        own = torch.tensor(rows[self._first : self._first + experts])[:, None, None].expand(experts, sources, 1)
        counts = own // labels + (torch.arange(labels) < own % labels).long()
        ranks = 1 if asked is None else dist.get_world_size(asked.group)
        return lambda: (ExpertCounts(counts.expand(ranks, *counts.shape), 0), torch.tensor(rows[: len(sent)]))


def rehearse(config: RunConfig, batch: Batch, *, rank: int, ranks: int) -> Rehearsal:
    """A step of ``rank`` of ``ranks`` on ``batch``; the model's weights are not read."""
    found = Rehearsal()
    with fake_world(rank, ranks), platform.without_storage() as device:
        from .megatron.parallel import initialize
        from .megatron.training import build_trainable
        from .step.batch_state import BatchState
        from .step.vcpo_step import VcpoStep

        parallel = initialize(config)
        with device:
            trainable = build_trainable(config, parallel, load=False)
        found.parameters = sum(p.numel() for chunk in trainable.chunks for p in chunk.parameters())
        step = VcpoStep(config, parallel, trainable)

        def agree(state: BatchState, _: Any) -> None:
            """Trajectories of other ranks were computed there."""
            state.owners.fill_(1)

        with contextlib.ExitStack() as stack:
            for patch in (mock.patch.object(BatchState, "agree", agree), *_EvenRouting().patches()):
                stack.enter_context(patch)
            stack.enter_context(platform.watched_reads(found.reads))
            stack.enter_context(DeviceWatch(found))
            found.result = step.run(batch, PolicyVersion(1, 1))
    return found
