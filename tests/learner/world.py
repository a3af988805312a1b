"""Run a function on N local ranks: ``run_world(ranks, "module:function", arguments)``.

Every rank is a process of its own (gloo). What the function returns on rank 0 is what ``run_world`` returns. A world of
each size stays up between calls, as the groups of torch.distributed of its ranks do; it takes one job after another,
and is killed by pid when a rank fails or the deadline of a job passes, after each has shown where it stands: the next
call starts another. A function that changes its process for good gets a world of its own (``alone``).

Imports are most of a small world's cost (about 6 s of a core a rank, measured on CPU, 2026-11-29), so ranks are forked
from one server process that has made them (``preload.py``) and has no threads. It ends with pytest, and so does a rank
whose caller is gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from vcpo_megatron.launch.devices import visible_gpus

ROOT = Path(__file__).resolve().parents[2]
#: As it is called where the server starts, which is pytest's root folder.
PRELOADED = "tests.learner.preload"
#: How long ranks that were asked to end may take.
GRACE_S = 20.0


class WorldFailed(AssertionError):
    """A rank failed; the message holds the end of its output."""


class World:
    """``ranks`` processes that wait for jobs. ``fresh``: ranks import everything themselves, as they must where
    PYTHONPATH says what there is to import."""

    def __init__(self, ranks: int, *, fresh: bool = False) -> None:
        self.ranks = ranks
        self._folder = tempfile.mkdtemp(prefix="world")
        context: Any = multiprocessing.get_context("spawn" if fresh or visible_gpus() else "forkserver")
        if context.get_start_method() == "forkserver":
            context.set_forkserver_preload([PRELOADED])
        # held open here: a port that was only chosen may be taken before rank 0 binds it
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        for rank in range(ranks):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
            }
            mine, theirs = context.Pipe()
            arguments = (theirs, self._folder, {**os.environ, **environment})
            process = context.Process(target=run_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that it is closed when the rank ends
            self._processes.append(process)
            self._pipes.append(mine)

    def run(self, function: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        """What ``function`` returns on rank 0, once it has returned on every rank."""
        deadline = time.monotonic() + timeout_s
        job = pickle.dumps((function, arguments))
        waiting = dict(zip(self._pipes, range(self.ranks), strict=True))
        result = None
        try:
            for pipe in self._pipes:
                pipe.send_bytes(job)
            while waiting:
                ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
                if not ready:
                    self._show_where_they_stand()
                    raise WorldFailed(f"{function} on {self.ranks} ranks: no end after {timeout_s} s\n{self._tails()}")
                for pipe in ready:
                    rank = waiting.pop(pipe)  # type: ignore[arg-type]
                    succeeded, found = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                    if not succeeded:
                        raise EOFError
                    result = found if rank == 0 else result
        except (EOFError, OSError) as error:
            self._show_where_they_stand()
            raise WorldFailed(f"{function} on {self.ranks} ranks failed\n{self._tails()}") from error
        return result

    def close(self, *, at_once: bool = False) -> None:
        """End the ranks: those that do not end by themselves, and all of them ``at_once``, are killed by pid."""
        for pipe in self._pipes:
            pipe.close()  # what tells an idle rank to end
        deadline = time.monotonic() + GRACE_S
        for process in self._processes:
            if not at_once:
                process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _show_where_they_stand(self) -> None:
        """Every rank that is alive prints its threads; one that fails, why."""
        time.sleep(0.5)
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)

    def _tails(self) -> str:
        logs = sorted(Path(self._folder).glob("log.*"))
        return "\n".join(f"--- rank {log.suffix[1:]}\n{log.read_text()[-3000:]}" for log in logs)


_standing: dict[int, World] = {}


def run_world(
    ranks: int,
    function: str,
    arguments: dict[str, Any],
    *,
    timeout_s: float = 150.0,
    alone: bool = False,
    fresh: bool = False,
) -> Any:
    """``alone``: in a world of its own, which ends with it; ``fresh``: such a one whose ranks import everything."""
    kept = not (alone or fresh)
    world = _standing.pop(ranks, None) if kept else None
    world = world or World(ranks, fresh=fresh)
    try:
        result = world.run(function, arguments, timeout_s)
    except BaseException:
        world.close(at_once=True)
        raise
    if kept:
        _standing[ranks] = world
    else:
        world.close()
    return result


def close_worlds() -> None:
    """End all that stay up."""
    while _standing:
        _standing.popitem()[1].close()


def run_rank(jobs: Connection, folder: str, environment: dict[str, str]) -> None:
    """What a rank does: its output goes to a file, and job after job is answered until the caller closes its end."""
    os.environ.clear()
    os.environ.update(environment)
    log = os.open(Path(folder) / f"log.{environment['RANK']}", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    faulthandler.register(signal.SIGUSR1)
    sys.path[:0] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), str(ROOT)]
    while True:
        try:
            job = jobs.recv_bytes()
        except EOFError:
            break
        name, arguments = pickle.loads(job)
        module, function = name.split(":")
        try:
            result = getattr(importlib.import_module(module), function)(**arguments)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            jobs.send_bytes(pickle.dumps((False, None)))
            raise
        jobs.send_bytes(pickle.dumps((True, result if environment["RANK"] == "0" else None)))
        del arguments, result
    if dist.is_initialized():
        dist.destroy_process_group()


def leave_layout() -> None:
    """Destroy every group of the layout but stay in the world, so that another one can be built; on all ranks alike.

    A gloo group owns threads that never sleep for long: groups that are merely forgotten slow the whole machine down.
    """
    from megatron.core import parallel_state as mpu

    mpu.destroy_model_parallel()
    gc.collect()  # models and optimizers that are gone hold groups in cycles
    if dist.is_initialized():
        dist.barrier()  # a group goes when no rank talks over it any more
        for group in [group for group in distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
            dist.destroy_process_group(group)
