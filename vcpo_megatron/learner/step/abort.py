"""Aborting a step before its end: when, and how all ranks come to agree on it.

Rank 0 receives the request and writes it into the rendezvous store, which the first rank of every
replica looks into before each micro-batch. What it sees travels in one small reduction over its replica, so the ranks
of a replica stop before the same micro-batch, with no collective open between them. Replicas need not stop at the same
one: that one of them has stopped is part of what the step's last reduction agrees on, and then no rank takes the
optimizer's step. Parameters, optimizer, schedule and ESS state are as before the step.

With pipeline stages, micro-batches are in flight on the other stages whenever one stage is between two of them: such a
step is aborted between two passes over its batch only (forward passes that a method needs first, and the backward
pass).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ..batch.packing import Pack
from ..megatron.parallel import Parallel
from ..megatron.schedule import ForwardStep

#: Least seconds between two looks into the store.
LOOK_S = 0.2

Forward = Callable[[Pack, torch.nn.Module], ForwardStep]


class ReplicaAborted(Exception):
    """This rank's replica has aborted the step: raised at one point by all of its ranks."""


class AbortCheck:
    """``requested()`` is called on rank 0 during a step: whether that step is to be aborted. Without it no step is
    aborted, and the ranks do not talk about it.

    aborted  whether this rank's replica has aborted the step at hand
    """

    def __init__(self, parallel: Parallel, requested: Callable[[], bool] | None = None) -> None:
        self.aborted = False
        self._parallel = parallel
        self._requested = requested
        self._key = ""
        self._looked = 0.0
        self._seen = False

    def begin(self, step: str) -> None:
        """A step begins; ``step`` names it, alike on all ranks and unlike all others of this world."""
        self._key, self._seen, self.aborted = f"abort step {step}", False, False

    @contextmanager
    def caught(self) -> Iterator[None]:
        """A part of the step that ends where the replica aborts it."""
        try:
            yield
        except ReplicaAborted:
            self.aborted = True

    def look(self) -> None:
        """Between two passes, on all ranks of the replica: ReplicaAborted when the step is to be aborted."""
        if self._requested is None:
            return
        seen = torch.tensor([int(self._sees())])
        if self._parallel.replica_size > 1:
            dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=self._parallel.replica_group)
        if seen.item():
            raise ReplicaAborted

    def between_micro_batches(self, forward: Forward) -> Forward:
        """``forward``, with a look before each micro-batch where nothing is in flight then."""
        if self._requested is None or self._parallel.pipeline_size > 1:
            return forward

        def looking(pack: Pack, model: torch.nn.Module) -> ForwardStep:
            self.look()
            return forward(pack, model)

        return looking

    def _sees(self) -> bool:
        """This rank's own knowledge; only the replica's first rank looks, and rank 0 writes what the others read."""
        if self._seen or not self._parallel.is_first_of_replica or time.monotonic() - self._looked < LOOK_S:
            return self._seen
        self._looked = time.monotonic()
        store = _get_default_store()
        if self._parallel.rank == 0:
            assert self._requested is not None
            if self._requested():
                store.set(self._key, "requested")
                self._seen = True
        else:
            self._seen = bool(store.check([self._key]))
        return self._seen
