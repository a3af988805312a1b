"""The raw-transfer baseline: bytes moved and nothing else, which a weight update is measured against."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch

from vcpo_megatron.weight_sync.distributed.broadcaster import Broadcaster
from vcpo_megatron.weight_sync.wire import WeightGroup, find_store

PATIENCE_S = 600.0


class RawBroadcast:
    """The same buckets from the same kind of process to one receiver, without gather, names, HTTP or model."""

    def __init__(self, sizes: list[int], folder: Path) -> None:
        self._sizes = sizes
        self._sender = Broadcaster(max(sizes), "gloo", PATIENCE_S, folder / "raw.log")
        port = self._sender.open("raw", 2, lambda: None)
        self._group = WeightGroup(find_store("127.0.0.1", port, PATIENCE_S), "raw", 1, 2, "gloo", PATIENCE_S)
        self._memory = torch.zeros(max(sizes), dtype=torch.uint8)

    def run(self) -> float:
        def receive() -> None:
            for size in self._sizes:
                self._group.broadcast(self._memory[:size])

        started = time.perf_counter()
        thread = threading.Thread(target=receive)
        thread.start()
        for number, size in enumerate(self._sizes):
            self._sender.slot(number, lambda: None)
            self._sender.broadcast("raw", number, size)
        self._sender.finish(lambda: None)
        thread.join()
        return time.perf_counter() - started

    def close(self) -> None:
        self._sender.kill()


def raw_disk(total: int, folder: Path) -> float:
    """Seconds to write so many bytes, fsync them, and read them back."""
    path, piece = folder / "raw", bytes(1 << 22)
    started = time.perf_counter()
    with open(path, "wb") as file:
        for _ in range(0, total, len(piece)):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    with open(path, "rb") as file:
        while file.read(len(piece)):
            pass
    path.unlink()
    return time.perf_counter() - started
