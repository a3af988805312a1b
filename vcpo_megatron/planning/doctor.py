"""What is installed, what it enables and what is missing, without importing any of it here.

Versions come from package metadata, hardware from the operating system, and the file system of run
directories is tried in a scratch folder: checkpoints rely on fsync and atomic renames, a run
directory on a lock.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from ..config.checks.servers import TESTED_SGLANG, installed_sglang
from ..config.fused_kernels import InstalledKernels, engine_problem, find_kernels
from ..launch.devices import installed_gpus, visible_gpus
from ..launch.libraries import NoAnswer, loaded_libraries
from ..run.directory import write_atomically
from ..run.text import printable

Level = Literal["ok", "note", "missing", "wrong"]

#: Distribution -> (least version, what it is for). The package's own requirements say the same.
REQUIRED: dict[str, tuple[str, str]] = {
    "torch": ("2.11", "learner and embedded engine"),
    "megatron-core": ("0.16.1", "learner: layers, schedules, optimizer, checkpoints"),
    "transformers": ("5", "embedded engine"),
    "tokenizers": ("0.21", "prompts and answers"),
    "safetensors": ("0.4", "reading and writing Hugging Face checkpoints"),
    "numpy": ("1.26", "arrays"),
    "pydantic": ("2.7", "configuration"),
    "pyzmq": ("26", "control messages"),
    "msgpack": ("1.0", "control messages"),
    "psutil": ("5.9", "checkpoint save in megatron-core"),
    "tensorboard": ("2.16", "TensorBoard files"),
    "rich": ("13", "progress in the terminal"),
    "aiohttp": ("3.9", "rollout HTTP client and server"),
    "jinja2": ("3.1", "chat templates"),
}
#: Distribution -> (what it enables, how to get it).
OPTIONAL: dict[str, tuple[str, str]] = {
    "pyarrow": ("data sets in parquet", "pip install pyarrow"),
    "wandb": ("metrics in Weights & Biases", "pip install wandb"),
    "math-verify": ('the reward "math" of data sets', 'pip install "math-verify[antlr4_13_2]"'),
}
#: The versions that the tests run with; others within the range are expected to work.
TESTED_MEGATRON = "0.16"
LEAST_PYTHON = (3, 11)
_LEAST_MEMORY = 4 * 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report. "missing" and "wrong" make the doctor fail, "note" only tells."""

    level: Level
    name: str
    text: str


def examine(run_root: Path, rollout_python: Path | None = None) -> list[Finding]:
    """Everything there is to say about this machine; runs will be written below ``run_root``, SGLang servers started
    by the interpreter ``rollout_python``."""
    return [
        _python(),
        *(_required(name, *wanted) for name, wanted in REQUIRED.items()),
        *(_optional(name, *wanted) for name, wanted in OPTIONAL.items()),
        rollout_environment(rollout_python),
        *_gpus(),
        *_loaded(gpu=bool(visible_gpus())),
        *_kernels(find_kernels(), gpu=bool(visible_gpus())),
        *_layers(find_kernels(), gpu=bool(visible_gpus())),
        _cores(),
        _memory(),
        _file_system(run_root),
    ]


def render(findings: Iterable[Finding]) -> str:
    """The report as aligned text."""
    rows = list(findings)
    width = max((len(row.name) for row in rows), default=0)
    return "\n".join(f"{row.level:<8}{row.name:<{width}}  {printable(row.text)}" for row in rows)


def _release(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < LEAST_PYTHON:
        return Finding("missing", "python", f"{version}; at least {'.'.join(map(str, LEAST_PYTHON))} is needed")
    return Finding("ok", "python", version)


def _required(name: str, least: str, purpose: str) -> Finding:
    version = _installed(name)
    if version is None:
        return Finding("missing", name, f"not installed; {purpose}; pip install '{name}>={least}'")
    if _release(version) < _release(least):
        return Finding("missing", name, f"{version} is too old; {purpose}; pip install '{name}>={least}'")
    if name == "megatron-core" and not version.startswith(TESTED_MEGATRON):
        return Finding("note", name, f"{version}; tested with {TESTED_MEGATRON}, newer ones are expected to work")
    return Finding("ok", name, f"{version}  {purpose}")


def _optional(name: str, enables: str, remedy: str) -> Finding:
    version = _installed(name)
    if version is None:
        return Finding("note", name, f"not installed: {enables} ({remedy})")
    return Finding("ok", name, f"{version}  {enables.split(';')[0]}")


def rollout_environment(python: Path | None) -> Finding:
    """What the interpreter ``rollout.python`` (None: not given) has to serve with."""
    if python is None:
        return Finding(
            "note",
            "sglang",
            "no rollout.python in the configuration: the embedded engine serves "
            "(tools/make_rollout_env.sh makes an environment for SGLang servers)",
        )
    version = installed_sglang(python)
    if version is None:
        return Finding("missing", "sglang", f"not in the environment of {python}; tools/make_rollout_env.sh makes one")
    if version != TESTED_SGLANG:
        return Finding("note", "sglang", f"{version} beside {python}; tested with {TESTED_SGLANG}")
    return Finding("ok", "sglang", f"{version} beside {python}  rollout servers")


def _gpus() -> Iterator[Finding]:
    present, usable = installed_gpus(), visible_gpus()
    if not present:
        yield Finding("note", "gpu", "none found: everything runs on CPUs")
    elif not usable:
        yield Finding("note", "gpu", f"{len(present)} found, but the installed torch is built for CPUs only")
    else:
        yield Finding("ok", "gpu", f"{len(usable)} usable ({', '.join(usable)})")


def _loaded(*, gpu: bool) -> Iterator[Finding]:
    """What cannot be seen without an import, which another process makes: the NCCL that torch loads, and whether an
    installed TransformerEngine can be imported."""
    if not gpu:
        return
    try:
        own = loaded_libraries(Path(sys.executable), engine=find_kernels().transformer_engine)
    except NoAnswer as error:
        yield Finding("wrong", "nccl", str(error))
        return
    yield Finding("ok", "nccl", f"{own.nccl} with torch {own.torch}; rollout servers on GPUs need the same one")
    if own.engine is not None:
        yield Finding("wrong", "transformer engine", engine_problem(own.engine))


def _kernels(installed: InstalledKernels, *, gpu: bool) -> Iterator[Finding]:
    """The learner's fused kernels: whose are used, and why not where one is installed."""
    if installed.apex_problem:
        yield Finding("note", "apex", f"not used: {installed.apex_problem}")
    found = {"fused adam": installed.fused_adam, "fused weight gradients": "Apex" * installed.weight_gradients}
    for name, whose in found.items():
        if whose and gpu:
            yield Finding("ok", name, f"{whose}'s is used")
        elif whose:
            yield Finding("note", name, f"{whose}'s is installed and needs a GPU; torch's is used")
        elif gpu:
            remedy = "NVIDIA's apex, built from source" + (", or transformer-engine" if name == "fused adam" else "")
            yield Finding("note", name, f"not installed: torch's is used ({remedy})")


def _layers(installed: InstalledKernels, *, gpu: bool) -> Iterator[Finding]:
    """Which layers the learner can build, and how many trajectories a micro-batch they take."""
    whose = "TransformerEngine" if installed.transformer_engine and gpu else "torch"
    yield Finding("ok", "layers", f"Megatron's local ones, several trajectories a micro-batch, {whose}'s attention")
    if not installed.transformer_engine:
        if gpu:
            yield Finding("note", "transformer engine", "not installed: attention is torch's flash kernel")
    elif not gpu:
        yield Finding("note", "transformer engine", "installed and needs a GPU: not used")
    else:
        yield Finding(
            "note",
            "transformer engine",
            'attention, rope and Adam are its kernels; model.core_attention = "torch" leaves the first out. '
            'model.transformer_impl = "transformer_engine" takes its linear layers, too: one trajectory a micro-batch. '
            "None has passed on a GPU: run tests/gpu/run.py --only TransformerEngine here first",
        )


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    return Finding("ok" if cores > 1 else "note", "cores", f"{cores} usable")


def _memory() -> Finding:
    """Memory of the machine or of the control group, whichever is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text()))
        except (OSError, ValueError):  # no such controller, or "max"
            continue
    enough = total >= _LEAST_MEMORY
    return Finding("ok" if enough else "note", "memory", f"{total / 2**30:.1f} GiB" + ("" if enough else ": little"))


def _file_system(run_root: Path) -> Finding:
    """Try what a run directory needs: fsync, an atomic rename, an exclusive lock."""
    existing = next(path for path in (run_root, *run_root.absolute().parents) if path.is_dir())
    try:
        with tempfile.TemporaryDirectory(prefix=".vcpo-doctor-", dir=existing) as folder:
            write_atomically(Path(folder) / "probe", "probe\n")
            with open(Path(folder) / "lock", "w") as first, open(Path(folder) / "lock", "w") as second:
                fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
                try:
                    fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return Finding("ok", "run directory", f"{existing}: fsync, rename and locks work")
    except OSError as error:
        return Finding("missing", "run directory", f"{existing}: {error}; give another place with --run-dir")
    return Finding("missing", "run directory", f"{existing}: locks do not exclude each other; use another file system")
