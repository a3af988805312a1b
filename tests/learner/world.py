"""Run a function on N local ranks: ``run_world(ranks, "module:function", arguments)``.

Every rank is a process of its own (gloo) that gets the arguments in a pickle file, and is killed by pid when one fails
or the deadline passes. What the function returns on rank 0 is what ``run_world`` returns.

Imports are most of a small world's cost (about 6 s of a core a rank, measured on CPU, 2026-11-29), so ranks are forked
from one server process that has made them (``preload.py``) and has no threads. It ends with pytest.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from vcpo_megatron.launch.devices import visible_gpus

ROOT = Path(__file__).resolve().parents[2]
#: As it is called where the server starts, which is pytest's root folder.
PRELOADED = "tests.learner.preload"


class WorldFailed(AssertionError):
    """A rank failed; the message holds the end of its output."""


def run_world(
    ranks: int, function: str, arguments: dict[str, Any], *, timeout_s: float = 150.0, fresh: bool = False
) -> Any:
    """``fresh``: ranks import everything themselves, as they must where PYTHONPATH says what there is to import."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "arguments").write_bytes(pickle.dumps(arguments))
        context: Any = multiprocessing.get_context("spawn" if fresh or visible_gpus() else "forkserver")
        if context.get_start_method() == "forkserver":
            context.set_forkserver_preload([PRELOADED])
        # held open here: a port that was only chosen may be taken before rank 0 binds it
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes: list[BaseProcess] = []
        for rank in range(ranks):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
            }
            processes.append(context.Process(target=run_rank, args=(function, folder, {**os.environ, **environment})))
            processes[-1].start()
        deadline = time.monotonic() + timeout_s
        try:
            while any(p.is_alive() for p in processes) and not any(p.exitcode for p in processes):
                if time.monotonic() > deadline:
                    raise WorldFailed(f"{function} on {ranks} ranks: no end after {timeout_s} s\n{_tails(folder)}")
                time.sleep(0.05)
            if any(p.exitcode for p in processes):
                time.sleep(0.5)  # let the others print why they fail
                raise WorldFailed(f"{function} on {ranks} ranks failed\n{_tails(folder)}")
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return pickle.loads((Path(folder) / "result").read_bytes())


def _tails(folder: str) -> str:
    texts = [f"--- rank {log.suffix[1:]}\n{log.read_text()[-3000:]}" for log in sorted(Path(folder).glob("log.*"))]
    return "\n".join(texts)


def run_rank(name: str, folder: str, environment: dict[str, str]) -> None:
    """What a rank does: its output goes to a file, rank 0 writes the result."""
    os.environ.clear()
    os.environ.update(environment)
    log = os.open(Path(folder) / f"log.{environment['RANK']}", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    sys.path[:0] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), str(ROOT)]
    module, function = name.split(":")
    arguments = pickle.loads((Path(folder) / "arguments").read_bytes())
    result = getattr(importlib.import_module(module), function)(**arguments)
    if environment["RANK"] == "0":
        (Path(folder) / "result").write_bytes(pickle.dumps(result))
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves while another still talks to it makes that one fail


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
