"""Weights that arrive by broadcast: the groups that this server is in, and one bucket at a time from them.

Joining and receiving block, so each has a thread of its own; it ends with its peer's connection, or with the group's
timeout. Nothing waits for such a thread when the server ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ...weight_sync.wire import GroupError, WeightGroup, find_store, flat_size, unflatten
from .errors import RequestError
from .weights import NamedTensors

_T = TypeVar("_T")

#: Seconds for all members of a group to come together, and for one bucket, when the sender hangs but lives.
TIMEOUT_S = 600.0


class WeightGroups:
    """By name. Used from the event loop's thread."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._groups: dict[str, WeightGroup] = {}
        self._memory: list[torch.Tensor] = []

    async def join(self, body: dict[str, Any]) -> None:
        """Serves /init_weights_update_group; RequestError when the name is taken or the others do not come."""
        name, address = _text(body, "group_name", "weight_update_group"), _text(body, "master_address")
        port, rank, world = (_integer(body, key) for key in ("master_port", "rank_offset", "world_size"))
        if body.get("backend", "nccl") != "gloo":
            raise RequestError(f"backend = {body.get('backend', 'nccl')!r}: the embedded engine takes gloo")
        if name in self._groups:
            raise RequestError(f"group {name} exists already: destroy it first, or use another name")
        if not 0 < rank < world:
            raise RequestError(f"rank_offset = {rank}: expected 1 to {world - 1}; the sender is rank 0")

        def make() -> WeightGroup:
            store = find_store(address, port, self._timeout_s)
            return WeightGroup(store, name, rank, world, "gloo", self._timeout_s)

        self._groups[name] = await _in_thread(make)

    def leave(self, body: dict[str, Any]) -> None:
        """Serves /destroy_weights_update_group."""
        name = _text(body, "group_name", "weight_update_group")
        if self._groups.pop(name, None) is None:
            raise RequestError(f"group {name} does not exist")

    def keep(self, memory: list[torch.Tensor]) -> None:
        """Receive the next update into ``memory``, that of one which was loaded: fresh pages cost as much as receiving.
        What a request that was given up may still write to must not come back here."""
        self._memory = list(memory)

    def _flat(self, size: int) -> torch.Tensor:
        for number, flat in enumerate(self._memory):
            if flat.numel() == size:
                return self._memory.pop(number)
        return torch.empty(size, dtype=torch.uint8)

    async def receive(self, body: dict[str, Any]) -> tuple[NamedTensors, list[torch.Tensor]]:
        """Tensors of one bucket, and the memory that they are views of; RequestError, before anything is received, when
        the request is malformed."""
        name = _text(body, "group_name", "weight_update_group")
        if name not in self._groups:
            raise RequestError(f"group {name} does not exist: send /init_weights_update_group first")
        entries = _entries(body)
        group, load_format = self._groups[name], body.get("load_format")
        if load_format == "flattened_bucket":
            flat = self._flat(flat_size(entries))
            await _in_thread(lambda: group.broadcast(flat))
            return unflatten(flat, entries), [flat]
        if load_format is not None:
            raise RequestError(f"load_format = {load_format!r}: the embedded engine takes null or flattened_bucket")
        tensors = [unflatten(torch.empty(flat_size([entry]), dtype=torch.uint8), [entry])[0] for entry in entries]
        for _, tensor in tensors:
            await _in_thread(lambda tensor=tensor: group.broadcast(tensor))  # type: ignore[misc]
        return tensors, []


def _entries(body: dict[str, Any]) -> list[tuple[str, str, list[int]]]:
    names, dtypes, shapes = (body.get(key) for key in ("names", "dtypes", "shapes"))
    if not (isinstance(names, list) and isinstance(dtypes, list) and isinstance(shapes, list)):
        raise RequestError("names, dtypes and shapes: expected three lists")
    if not names or not len(names) == len(dtypes) == len(shapes):
        raise RequestError("names, dtypes and shapes: expected three lists of one length, at least 1")
    entries = [(str(name), str(dtype), shape) for name, dtype, shape in zip(names, dtypes, shapes, strict=True)]
    for name, _, shape in entries:
        if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise RequestError(f"shape of {name!r} = {shape!r}: expected a list of sizes")
    try:
        flat_size(entries)
    except ValueError as error:
        raise RequestError(f"dtypes: {error}") from error
    return entries


def _text(body: dict[str, Any], key: str, default: str | None = None) -> str:
    value = body.get(key, default)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{key} = {value!r}: expected a text")
    return value


def _integer(body: dict[str, Any], key: str) -> int:
    value = body.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{key} = {value!r}: expected an integer")
    return value


async def _in_thread(work: Callable[[], _T]) -> _T:
    """Result of ``work``, run in a thread that nothing waits for; its GroupError as RequestError."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(set_it: Callable[[], None]) -> None:
        if not done.cancelled():
            set_it()

    def run() -> None:
        try:
            result = work()
        except GroupError as error:
            refusal = RequestError(str(error))
            loop.call_soon_threadsafe(settle, lambda: done.set_exception(refusal))
        else:
            loop.call_soon_threadsafe(settle, lambda: done.set_result(result))

    threading.Thread(target=run, name="weights", daemon=True).start()
    return await done
