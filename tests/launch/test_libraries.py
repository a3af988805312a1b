"""What interpreters load, asked of environments that are made of a script and a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.messages import assert_names
from vcpo_megatron.config.fused_kernels import InstalledKernels
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.launch import libraries
from vcpo_megatron.launch.libraries import Libraries, NoAnswer, library_problems, loaded_libraries

TORCH = """
class version:
    cuda = {cuda!r}
class cuda:
    class nccl:
        version = staticmethod(lambda: {nccl!r})
__version__ = {torch!r}
print("noise of an import")
"""


def environment(root: Path, torch: str, nccl: tuple[int, ...] | None, engine: str | None = None) -> Path:
    """An interpreter whose ``import torch`` gives a version and an NCCL (None: built for CPUs), and whose import of
    TransformerEngine runs ``engine``."""
    site, python = root / "site", root / "bin" / "python"
    (site / "torch").mkdir(parents=True)
    text = TORCH.format(torch=torch, nccl=nccl, cuda="13.0" if nccl else None)
    (site / "torch" / "__init__.py").write_text(text)
    if engine is not None:
        (site / "transformer_engine").mkdir()
        (site / "transformer_engine" / "__init__.py").touch()
        (site / "transformer_engine" / "pytorch.py").write_text(engine)
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    return python


@pytest.fixture
def learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(libraries, "find_kernels", InstalledKernels)
    return environment(tmp_path / "learner", "2.13.0+cu130", (2, 29, 7))


def config(**rollout: Any) -> RunConfig:
    base = {"model": {"path": "/m"}, "train": {"steps": 1}, "environment": {"name": "e"}, "rollout": rollout}
    return RunConfig.model_validate(base)


def test_two_environments_of_unlike_nccls_are_refused_by_both_versions(learner: Path, tmp_path: Path) -> None:
    server = environment(tmp_path / "server", "2.14.1+cu130", (2, 30, 7))
    (line,) = library_problems(config(engine="sglang", python=server), ["0"], learner)
    theirs, ours = ("NCCL 2.30.7", "2.14.1+cu130"), ("NCCL 2.29.7", "2.13.0+cu130")
    remedies = ("tools/make_gpu_env.sh", "tools/make_rollout_env.sh", 'rollout.sync = "disk"')
    assert_names(line, f"rollout.python = {server}", *theirs, learner, *ours, *remedies)


def test_two_environments_of_one_nccl_may_have_unlike_torches(learner: Path, tmp_path: Path) -> None:
    server = environment(tmp_path / "server", "2.14.1+cu130", (2, 29, 7))
    assert list(library_problems(config(engine="sglang", python=server), ["0"], learner)) == []


def test_a_rollout_environment_without_cuda_is_refused_on_gpus(learner: Path, tmp_path: Path) -> None:
    server = environment(tmp_path / "server", "2.13.0+cpu", None)
    (line,) = library_problems(config(engine="sglang", python=server), ["0"], learner)
    assert f"rollout.python = {server}: has no NCCL (torch 2.13.0+cpu)" in line


@pytest.mark.parametrize(
    ("gpus", "rollout"),
    [
        ((), {"engine": "sglang", "python": "/nowhere/python"}),
        (("0",), {}),
        (("0",), {"engine": "sglang", "python": "/nowhere/python", "sync": "disk"}),
        (("0",), {"engine": "sglang", "python": "/nowhere/python", "sync": "tensor"}),
        (("0",), {"engine": "sglang", "addresses": ("http://a:1",)}),
    ],
)
def test_nobody_is_asked_where_no_broadcast_of_started_servers_needs_nccl(
    learner: Path, gpus: tuple[str, ...], rollout: dict[str, Any]
) -> None:
    assert list(library_problems(config(**rollout), gpus, Path("/nowhere/own"))) == []


def test_a_broken_transformer_engine_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "find_kernels", lambda: InstalledKernels(transformer_engine=True))
    broken = environment(tmp_path / "own", "2.14.1", (2, 30, 7), "raise OSError('te.so: undefined symbol: x')")
    (line,) = library_problems(config(), ["0"], broken)
    assert_names(line, "transformer-engine", "OSError: te.so: undefined symbol: x", "tools/make_gpu_env.sh")
    whole = environment(tmp_path / "whole", "2.14.1", (2, 30, 7), "")
    assert loaded_libraries(whole, engine=True) == Libraries("2.14.1", "2.30.7")
    assert list(library_problems(config(), ["0"], whole)) == []
    assert list(library_problems(config(), [], broken)) == []


def test_who_does_not_answer_is_named(tmp_path: Path, learner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "nowhere" / "python"
    (line,) = library_problems(config(engine="sglang", python=missing), ["0"], learner)
    assert_names(line, missing, "No such file or directory")
    broken, slow = (environment(tmp_path / name, "2.14.1", None) for name in ("broken", "slow"))
    (tmp_path / "broken" / "site" / "torch" / "__init__.py").write_text(
        "raise ImportError('libcudart.so.13: not found')"
    )
    with pytest.raises(NoAnswer, match=r"cannot import torch: ImportError: libcudart\.so\.13: not found"):
        loaded_libraries(broken)
    (tmp_path / "slow" / "site" / "torch" / "__init__.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.setattr(libraries, "_ANSWER_S", 0.5)
    with pytest.raises(NoAnswer, match=r"did not import torch within 0\.5 s"):
        loaded_libraries(slow)


def test_an_interpreter_is_asked_once(tmp_path: Path, learner: Path) -> None:
    """By the doctor, then for the run's problems; also where it does not answer, which may take two minutes."""
    server = environment(tmp_path / "server", "2.14.1+cu130", (2, 30, 7))
    (tmp_path / "server" / "site" / "torch" / "__init__.py").write_text("raise ImportError('no')")
    for python in (learner, server):
        python.write_text(f'{python.read_text().splitlines()[0]}\necho asked >> "{python}.log"\n{python.read_text()}')
    wanted = config(engine="sglang", python=server)
    assert loaded_libraries(learner).nccl == "2.29.7"
    first, again = (list(library_problems(wanted, ["0"], learner)) for _ in range(2))
    assert first == again and "cannot import torch" in first[0]
    assert [Path(f"{python}.log").read_text() for python in (learner, server)] == ["asked\n"] * 2
