"""Writing a checkpoint while training goes on: Megatron's asynchronous save, its files written by a thread.

Megatron plans the save and stages the tensors (collective, short), leaves the writing to its caller as an
``AsyncRequest``, and finalizes it (collective, short) when every rank has written. Megatron's own callers fork a
process to write, and start a manager process for its answer. Here a thread writes: nothing is forked from a process
with communication threads, and nothing can outlive a rank that is killed. Its time is spent in file writes, and in
checksums of what was written, which both leave Python free. The price is one copy of parameters and optimizer state in
host memory while it writes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from ...run.integrity import crc_of_file

#: One file: (path, key in the metadata, (byte items, tensor items)), as Megatron's writer has it.
Bucket = tuple[Any, str, tuple[list[Any], list[tuple[Any, torch.Tensor]]]]


def write_by_threads() -> None:
    """Let Megatron's writers answer through memory. Its default is a queue of a manager process, which outlives a
    rank that is killed. Call it before the first save."""
    filesystem_async._results_queue = queue.Queue()


class BackgroundSave:
    """One request being written. Made, asked and finished by every rank alike. ``live``: addresses of the memory on the
    host that training goes on to change."""

    def __init__(self, request: AsyncRequest, live: frozenset[int]) -> None:
        self._finalize = list(request.finalize_fns)
        self._thread: threading.Thread | None = None
        #: CRC-32 of every file that this rank has written, by name; whole when ``written``.
        self.checksums: dict[str, int] = {}
        if request.async_fn is None:
            return  # this rank holds nothing that another one does not write
        _, _, results = request.async_fn_args
        transforms = request.async_fn.args[0]
        buckets = [_owned(bucket, live) for bucket in request.preload_fn()]
        self._thread = threading.Thread(
            target=_write, args=(transforms, buckets, results, self.checksums), name="checkpoint", daemon=True
        )
        self._thread.start()

    @property
    def written(self) -> bool:
        """Whether this rank's part is on disk, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Collective, when every rank has written: metadata. Raises on every rank when one could not write."""
        if self._thread is not None:
            self._thread.join()
        for finalize in self._finalize:
            finalize()


def host_storages(state: dict[str, Any]) -> frozenset[int]:
    """Addresses of all memory on the host that tensors of a sharded state lie in."""
    values = (getattr(value, "data", value) for value in nested_values(state))
    tensors = (value for value in values if isinstance(value, torch.Tensor) and value.device.type == "cpu")
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)


def _owned(bucket: Bucket, live: frozenset[int]) -> Bucket:
    """The bucket with tensors that the next step cannot change, each copied once: Megatron's staging copies those of a
    GPU, and of the host those that are parts of larger ones."""
    path, key, (byte_items, tensor_items) = bucket
    owned = [
        (item, tensor.clone() if tensor.untyped_storage().data_ptr() in live else tensor)
        for item, tensor in tensor_items
    ]
    return path, key, (byte_items, owned)


def _write(
    transforms: list[Any], buckets: Sequence[Bucket], results: queue.Queue[Any], checksums: dict[str, int]
) -> None:
    """What Megatron's writer processes do, one file after the other; the answer is theirs, too. Each file is then read
    back, from memory as a rule, for its checksum."""
    written: dict[int, Any] = {}
    for index, bucket in enumerate(buckets):
        answer: queue.Queue[Any] = queue.Queue()
        count: queue.Queue[Any] = queue.Queue()
        count.put(index)
        FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, answer, count, True)
        _, outcome = answer.get()
        if not isinstance(outcome, Exception):
            try:
                checksums[Path(bucket[0]).name] = crc_of_file(Path(bucket[0]))
            except OSError as error:
                outcome = error
        if isinstance(outcome, Exception):
            results.put(outcome)
            return
        written[index] = outcome
    results.put(written)
