"""Executed on every rank of a test world: what the twin of NCCL does by itself, and mends of the learner taken out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from vcpo_megatron.learner.megatron import platform

from .nccl_twin import DeviceBarrier, Hang, HostTensor, LateCommunicator, Twin
from .world import leave_layout

#: Seconds after which rank 0 finds that it waits for ever.
SHORT_S = 1.0


def shows(key: str) -> dict[str, dict[str, str]]:
    """Two ranks: what each property refuses, with it and without it; on a group of the device and on one of gloo."""
    platform.prepare()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    found: dict[str, dict[str, str]] = {}
    for number, (name, act) in enumerate(_ACTS.items()):
        found[name] = {}
        for kind, properties, backend in (("with", [name], None), ("without", [], None), ("gloo", [name], "gloo")):
            place = f"{key}{number}{kind}"
            if dist.get_rank() == 1 and name != "lazy":
                properties = []  # the other end does as gloo, and is never what rank 0 waits for
            with Twin(properties, SHORT_S, place).installed():
                found[name][kind] = act(dist.new_group(backend=backend), place)
            dist.barrier()
    leave_layout()
    return found


def _until(place: str, *, tell: bool) -> None:
    """Rank 1 goes on when rank 0 has come here."""
    store = distributed_c10d._get_default_store()
    store.set(place, "here") if tell else store.wait([place])


def _refusal(act: Callable[[], Any]) -> str:
    try:
        act()
    except (DeviceBarrier, Hang, HostTensor, LateCommunicator) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _finish(work: Any) -> None:
    """However slow the machine is."""
    for _ in range(60):
        if not _refusal(work.wait):
            return
    raise AssertionError(f"{work}: not done")


def _synchronize(group: dist.ProcessGroup, place: str) -> str:
    """A receive that is on its way holds up the device."""
    tensor, refusal = torch.zeros(1), ""
    if dist.get_rank() == 0:
        work = dist.irecv(tensor, 1, group=group)
        refusal = _refusal(torch.cuda.synchronize)
    _until(place, tell=dist.get_rank() == 0)
    if dist.get_rank() == 1:
        work = dist.isend(tensor, 0, group=group)
    _finish(work)
    return refusal


def _in_a_schedule(act: Callable[[], Any]) -> str:
    """Refusal of ``act`` in the place of Megatron's schedule."""
    from vcpo_megatron.learner.megatron import schedule

    original = schedule.get_forward_backward_func
    schedule.get_forward_backward_func = lambda: lambda **arguments: act()
    messages, schedule._messages = schedule._messages, lambda chunks, lengths: {}
    try:
        return _refusal(
            lambda: schedule.run_schedule([torch.nn.Identity()], [0], _ahead, lengths=[1], forward_only=True)
        )
    finally:
        schedule.get_forward_backward_func, schedule._messages = original, messages


def _ahead(group: dist.ProcessGroup, place: str) -> str:
    """A barrier of the device in a schedule; outside of one it is let be."""
    torch.cuda.synchronize()
    return _in_a_schedule(torch.cuda.synchronize)


def _allocate(group: dist.ProcessGroup, place: str) -> str:
    """Memory of the device is waited for in a schedule, behind a receive that is on its way; outside of one it is at
    hand."""

    def allocate() -> None:
        torch.empty(1, device=platform.device())

    tensor, refusal = torch.zeros(1), ""
    if dist.get_rank() == 0:
        work = dist.irecv(tensor, 1, group=group)
        allocate()
        refusal = _in_a_schedule(allocate)
    _until(place, tell=dist.get_rank() == 0)
    if dist.get_rank() == 1:
        work = dist.isend(tensor, 0, group=group)
    _finish(work)
    return refusal


def _lazy(group: dist.ProcessGroup, place: str) -> str:
    """A first send holds up its host."""
    tensor, refusal, sent = torch.zeros(1), "", []
    if dist.get_rank() == 0:
        refusal = _refusal(lambda: sent.append(dist.isend(tensor, 1, group=group)))
        if refusal:
            sent.append(dist.isend(tensor, 1, group=group))  # it has been announced by now
    _until(place, tell=dist.get_rank() == 0)
    if dist.get_rank() == 1:
        dist.recv(tensor, 0, group=group)
    for work in sent:
        _finish(work)
    return refusal


def _start(group: dist.ProcessGroup, place: str) -> str:
    """A sum of both ranks in a group that is new."""
    refusal = _refusal(lambda: dist.all_reduce(torch.zeros(1), group=group))
    if refusal:
        dist.all_reduce(torch.zeros(1), group=group)  # it is known by now
    return refusal


def _ordered(group: dist.ProcessGroup, place: str) -> str:
    """A sum behind a receive that is on its way is not done."""
    tensor, refusal = torch.zeros(1), ""
    if dist.get_rank() == 0:
        work = dist.irecv(tensor, 1, group=group)
    total = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    if dist.get_rank() == 0:
        refusal = _refusal(total.wait)
    _until(place, tell=dist.get_rank() == 0)
    if dist.get_rank() == 1:
        work = dist.isend(tensor, 0, group=group)
    _finish(work)
    return refusal


def _device(group: dist.ProcessGroup, place: str) -> str:
    here = platform.device()
    for tensor in (torch.zeros(2, device=here), torch.zeros(2).to(here)):
        dist.all_reduce(tensor, group=group)
    return _refusal(lambda: dist.all_reduce(torch.zeros(2, device=here).cpu(), group=group))


_ACTS: dict[str, Callable[[dist.ProcessGroup, str], str]] = {
    "synchronize": _synchronize,
    "ahead": _ahead,
    "lazy": _lazy,
    "start": _start,
    "ordered": _ordered,
    "allocate": _allocate,
    "device": _device,
}


# --- mends taken out: each changes this process for good -----------------------------------------


def connect_nothing() -> None:
    """Communicators are made by their first use in the step."""
    platform.prepare()
    from vcpo_megatron.learner.megatron import parallel

    parallel._connect = lambda of_rank: None


def exchange_on_the_device() -> None:
    """Hosts exchange their numbers on groups of the device."""
    platform.prepare()
    from vcpo_megatron.learner.megatron import parallel

    made = parallel._group_of
    parallel._group_of = lambda mine, timeout, *, backend=None: made(mine, timeout)


class _OnTheDevice:
    """What ``sum`` gives where the device sums up."""

    def __init__(self, work: dist.Work, total: torch.Tensor) -> None:
        self._work, self._total = work, total

    def wait(self) -> torch.Tensor:
        self._work.wait()
        return self._total


def norms_on_the_device() -> None:
    """Norms are summed by the device, while the backward goes on, in the group of all ranks: they are one replica."""
    platform.prepare()
    from vcpo_megatron.learner.megatron.host_exchange import HostExchange

    def summed(exchange: HostExchange, copy: platform.HostCopy, group: dist.ProcessGroup, what: str) -> Any:
        total = copy._numbers.clone()
        return _OnTheDevice(dist.all_reduce(total, async_op=True), total)

    HostExchange.sum = summed


def ask_for_shapes() -> None:
    """Megatron's own messages between stages."""
    platform.prepare()
    from vcpo_megatron.learner.megatron import schedule

    schedule._messages = lambda chunks, lengths: {}
