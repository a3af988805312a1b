"""A broadcast group between the sender of weights (rank 0) and rollout servers, outside torch's default group.

Built as SGLang builds its end (``init_custom_process_group``): a TCP store at rank 0, keys under the group's name
twice and the device's, so that either end may be ours.
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..conversion.dtypes import torch_dtype
from ..run.text import one_line

#: Plan of a bucket: [name, dtype as "float32", shape] of each tensor.
Entries = Sequence[tuple[str, str, Sequence[int]]]

#: Seconds for a connection to a store that listens.
CONNECT_S = 20.0


class GroupError(RuntimeError):
    """Peers did not come in time, or went away."""


def open_store(timeout_s: float, port: int = 0) -> Any:
    """Rank 0's store; ``store.port`` is where the others find it, any free one by default."""
    return dist.TCPStore("0.0.0.0", port, None, True, datetime.timedelta(seconds=timeout_s), wait_for_workers=False)


def find_store(address: str, port: int, timeout_s: float) -> Any:
    """The store of rank 0; GroupError when it is not found. It listens before anybody hears of its port, so a refused
    connection is final: torch alone would go on trying until the timeout."""
    try:
        with socket.create_connection((address, port), CONNECT_S):
            pass
        return dist.TCPStore(address, port, None, False, datetime.timedelta(seconds=timeout_s))
    except (OSError, dist.DistError, RuntimeError) as error:
        raise GroupError(f"no store at {address}:{port}: {one_line(error)}") from error


class WeightGroup:
    """One rank of the group ``name``. Making it waits for all ``world_size`` ranks."""

    def __init__(self, store: Any, name: str, rank: int, world_size: int, backend: str, timeout_s: float) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        keys = dist.PrefixStore(f"{self.device.type}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        timeout = datetime.timedelta(seconds=timeout_s)
        self._store = store  # rank 0's serves the others
        try:
            if backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group: Any = dist.ProcessGroupNCCL(keys, rank, world_size, options)
            else:
                self._group = dist.ProcessGroupGloo(keys, rank, world_size, timeout)
        except (dist.DistError, RuntimeError) as error:
            raise GroupError(f"weight group {name} of {world_size} did not come together: {one_line(error)}") from error

    def broadcast(self, tensor: torch.Tensor) -> None:
        """``tensor``, on the group's device, from rank 0 to all; GroupError when a peer goes away."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            self._group.broadcast([tensor], options).wait()
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
        except (dist.DistError, RuntimeError) as error:
            raise GroupError(f"a broadcast of weights failed: {one_line(error)}") from error


def flat_size(entries: Entries) -> int:
    """Bytes of a flattened bucket."""
    return sum(torch.Size(shape).numel() * torch_dtype(dtype).itemsize for _, dtype, shape in entries)


def unflatten(flat: torch.Tensor, entries: Entries) -> list[tuple[str, torch.Tensor]]:
    """Tensors of a flattened bucket (uint8), as views of it, one after the other without gaps."""
    found, at = [], 0
    for name, dtype, shape in entries:
        kind = torch_dtype(dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        found.append((name, flat[at : at + size].view(kind).reshape(tuple(shape))))
        at += size
    return found
