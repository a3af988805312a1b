"""Run a function on N local ranks: ``run_world(ranks, "module:function", arguments)``.

Every rank is a process of its own (gloo), started with the arguments in a pickle file and stopped by
pid when one fails or the deadline passes. The function gets the arguments on every rank; what it
returns on rank 0 is what ``run_world`` returns.
"""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist


class WorldFailed(AssertionError):
    """A rank failed; the message holds the end of its output."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_world(ranks: int, function: str, arguments: dict[str, Any], *, timeout_s: float = 150.0) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(__file__).resolve().parents[2]
        (Path(folder) / "arguments").write_bytes(pickle.dumps(arguments))
        port, processes, logs = free_port(), [], []
        for rank in range(ranks):
            paths = [str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")]
            env = dict(
                os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port), OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(paths),
            )  # fmt: skip
            log = open(Path(folder) / f"log.{rank}", "w+")  # noqa: SIM115
            command = [sys.executable, __file__, function, folder]
            processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
            logs.append(log)
        deadline = time.monotonic() + timeout_s
        try:
            while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
                if time.monotonic() > deadline:
                    raise WorldFailed(f"{function} on {ranks} ranks: no end after {timeout_s} s\n{_tails(logs)}")
                time.sleep(0.05)
            if any(p.poll() for p in processes):
                time.sleep(0.5)  # let the others print why they fail
                raise WorldFailed(f"{function} on {ranks} ranks failed\n{_tails(logs)}")
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
            for log in logs:
                log.close()
        return pickle.loads((Path(folder) / "result").read_bytes())


def _tails(logs: list[Any]) -> str:
    texts = []
    for rank, log in enumerate(logs):
        log.flush()
        log.seek(0)
        texts.append(f"--- rank {rank}\n{log.read()[-3000:]}")
    return "\n".join(texts)


def main() -> None:
    name, folder = sys.argv[1:]
    module, function = name.split(":")
    arguments = pickle.loads((Path(folder) / "arguments").read_bytes())
    result = getattr(importlib.import_module(module), function)(**arguments)
    if os.environ["RANK"] == "0":
        (Path(folder) / "result").write_bytes(pickle.dumps(result))
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves while another still talks to it makes that one fail
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of collectives may outlive their group


if __name__ == "__main__":
    main()
