"""What an interpreter really loads: its NCCL, and whether its TransformerEngine can be imported.

Package metadata does not say it: another NCCL may be put beside torch, or found first by the loader, and a source build
of TransformerEngine may not fit the torch that it meets. So the interpreter is asked, which imports torch there, and
takes seconds: only where GPUs are used, and once a process, whoever wants to know. This process never imports torch.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..config.fused_kernels import engine_problem, find_kernels
from ..config.schema import RunConfig
from ..config.weight_transport import weight_transport
from ..run.text import one_line

#: Seconds for the answer: torch is read from a disk that may be far away.
_ANSWER_S = 120.0
#: Run by the interpreter that is asked; its last line is the answer. The NCCL that is loaded is asked itself: torch
#: tells the one that it was built with.
_QUESTION = """
import ctypes, json, os, sys
import torch
answer = {"torch": torch.__version__, "nccl": None, "engine": None}
if torch.version.cuda is not None:
    answer["nccl"] = ".".join(map(str, torch.cuda.nccl.version()[:3]))
    try:
        found = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(found))
        answer["nccl"] = f"{found.value // 10000}.{found.value // 100 % 100}.{found.value % 100}"
    except OSError:  # it is part of torch
        pass
if "engine" in sys.argv[1:]:
    try:
        import transformer_engine.pytorch
    except Exception as error:
        answer["engine"] = f"{type(error).__name__}: {error}"
print()
print(json.dumps(answer))
"""


@dataclass(frozen=True, slots=True)
class Libraries:
    """``nccl``: as "2.29.7", None where torch was built without CUDA. ``engine``: why TransformerEngine cannot be
    imported, None where it can, or was not asked for."""

    torch: str
    nccl: str | None
    engine: str | None = None


class NoAnswer(RuntimeError):
    """The interpreter does not say what it loads; one line for the user."""


def loaded_libraries(python: Path, *, engine: bool = False) -> Libraries:
    """What ``python`` loads; ``engine``: TransformerEngine is tried, too. NoAnswer within 120 s otherwise."""
    answer = _answer(python, engine)
    if isinstance(answer, str):
        raise NoAnswer(answer)
    return answer


@functools.cache
def _answer(python: Path, engine: bool) -> Libraries | str:
    """What ``python`` says, or why it says nothing: asked once, since no environment changes under a command."""
    command = [str(python), "-c", _QUESTION, *(["engine"] if engine else [])]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_ANSWER_S, stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired:
        return f"{python} did not import torch within {_ANSWER_S:g} s"
    except OSError as error:
        return f"{python} cannot be run: {error.strerror or error}"
    lines = done.stdout.decode(errors="replace").splitlines()
    if done.returncode != 0 or not lines:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return f"{python} cannot import torch: {one_line(said[-1] if said else done.returncode)}"
    answer = json.loads(lines[-1])
    return Libraries(answer["torch"], answer["nccl"], None if answer["engine"] is None else one_line(answer["engine"]))


def library_problems(config: RunConfig, gpus: Sequence[str], own: Path = Path(sys.executable)) -> Iterator[str]:
    """Why learner ranks on ``gpus`` under ``own``, and the servers that the run starts, cannot use the libraries that
    they would load, a line each. Nothing is asked where there are no GPUs, and nothing of joined servers: they are
    tried with one byte (weight_sync/distributed/orchestrator.py)."""
    if not gpus:
        return
    with_engine, python = find_kernels().transformer_engine, config.rollout.python
    broadcasts = weight_transport(config.rollout, learner_on_gpus=True).backend == "nccl" and python is not None
    if not (with_engine or broadcasts):
        return
    with ThreadPoolExecutor(2) as pool:
        mine = pool.submit(loaded_libraries, own, engine=with_engine)
        theirs = pool.submit(loaded_libraries, python) if broadcasts and python is not None else None
    try:
        learner = mine.result()
        server = None if theirs is None else theirs.result()
    except NoAnswer as error:
        yield str(error)
        return
    if learner.engine is not None:
        yield engine_problem(learner.engine)
    if server is not None and (found := nccl_difference(own, learner, python, server)) is not None:
        yield found


def nccl_difference(own: Path, learner: Libraries, python: Path | None, server: Libraries) -> str | None:
    """Why NCCL would refuse a group of the two, one line; None where it would not."""
    if learner.nccl == server.nccl and learner.nccl is not None:
        return None

    def named(libraries: Libraries) -> str:
        nccl = f"NCCL {libraries.nccl}" if libraries.nccl else "no NCCL"
        return f"{nccl} (torch {libraries.torch})"

    return (
        f"rollout.python = {python}: has {named(server)}, the learner's {own} has {named(learner)}, and NCCL refuses a "
        "group of unlike versions; make both environments with tools/make_gpu_env.sh and tools/make_rollout_env.sh, "
        'which pin the same one, or set rollout.sync = "disk"'
    )
