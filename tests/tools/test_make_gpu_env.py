"""The environments for GPUs: the order of their commands, and pins that fit together."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vcpo_megatron.config.checks.servers import TESTED_NCCL, TESTED_SGLANG
from vcpo_megatron.planning.doctor import TESTED_MEGATRON

ROOT = Path(__file__).parents[2]


def printed(script: str, *arguments: str) -> list[str]:
    command = [ROOT / "tools" / script, "--print", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    subprocess.run(["bash", "-n", "-c", done.stdout], timeout=20, check=True)  # what is printed can be run
    return done.stdout.splitlines()


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and line[0] != "#"]
    return dict(line.split("==") for line in lines)


def setup_argument(name: str) -> object:
    calls = [node for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if isinstance(node, ast.keyword)]
    return next(ast.literal_eval(node.value) for node in calls if node.arg == name)


def test_transformer_engine_is_built_against_the_torch_that_is_there(tmp_path: Path) -> None:
    venv, torch, toolkit, engine, package, *checks = printed("make_gpu_env.sh", str(tmp_path / "e"))
    assert venv.split()[1:] == ["-m", "venv", str(tmp_path / "e")]
    assert torch.split()[-3:] == ["-c", str(ROOT / "constraints-gpu.txt"), "torch"]
    assert "cuda-toolkit" in toolkit and "nvcc" in toolkit
    assert "--no-build-isolation" in engine and engine.rstrip().endswith(r"transformer-engine\[core_cu13\,pytorch\]")
    assert f"CUDA_HOME={tmp_path}/e/lib/python3." in engine and "/nvidia/cudnn/include" in engine
    assert package.split()[-2:] == ["-e", str(ROOT)]
    assert all("-c " + str(ROOT / "constraints-gpu.txt") in line for line in (torch, toolkit, engine, package))
    assert "transformer_engine.pytorch" in checks[0] and checks[-1].split()[-1] == "doctor"
    assert list(tmp_path.iterdir()) == []


def test_the_learner_s_environment_without_transformer_engine(tmp_path: Path) -> None:
    lines = printed("make_gpu_env.sh", "--without-transformer-engine", str(tmp_path / "e"))
    assert len(lines) == 5 and not any("transformer" in line for line in lines)


def test_both_forms_of_the_rollout_environment(tmp_path: Path) -> None:
    _, install, check = printed("make_rollout_env.sh", str(tmp_path / "r"))
    assert install.split()[-3:] == ["-c", str(ROOT / "constraints-rollout.txt"), "sglang"]
    assert "sglang.__version__" in check
    cpu = printed("make_rollout_env.sh", "--cpu", str(tmp_path / "r"))
    assert "torch==2.13.0" in cpu[1] and "--no-deps" in cpu[2] and cpu[3].startswith("cp -r ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [(), ("--print",), ("--cpu", "x"), ("a", "b"), ("--help",)])
def test_bad_usage(arguments: tuple[str, ...]) -> None:
    script = ROOT / "tools" / "make_gpu_env.sh"
    done = subprocess.run([script, *arguments], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and "make_gpu_env.sh --print" in done.stderr


def test_the_pins_fit_together() -> None:
    learner, servers, cpus = pins("constraints-gpu.txt"), pins("constraints-rollout.txt"), pins("constraints.txt")
    assert learner["nvidia-nccl-cu13"] == servers["nvidia-nccl-cu13"] == TESTED_NCCL
    assert servers["sglang"] == TESTED_SGLANG
    assert learner["megatron-core"] == cpus["megatron-core"] and learner["megatron-core"].startswith(TESTED_MEGATRON)
    assert learner["transformers"] == cpus["transformers"]
    parts = {name: version for name, version in learner.items() if name.startswith("transformer-engine")}
    assert len(parts) == 3 and len(set(parts.values())) == 1  # it refuses to be imported otherwise


def test_the_pins_are_within_what_the_package_and_megatron_ask_for() -> None:
    learner = pins("constraints-gpu.txt")
    required = [Requirement(line) for line in setup_argument("install_requires")]  # type: ignore[attr-defined]
    required += [Requirement(line) for line in setup_argument("extras_require")["gpu"]]  # type: ignore[index]
    of_megatron = map(Requirement, metadata.requires("megatron-core") or ())
    required += [found for found in of_megatron if found.name == "transformer-engine"]
    assert {"torch", "megatron-core", "transformer-engine"} <= {found.name for found in required}
    for requirement in required:
        if requirement.name in learner:
            assert requirement.specifier.contains(learner[requirement.name]), requirement


#: Seconds for one question to the package index; all of SGLang's requirements took ten minutes on two busy cores.
INDEX_S = 300.0


def would_install(name: str, *arguments: str) -> dict[str, list[str]]:
    """ "NAME==VERSION" of what pip would install under the constraints ``name`` -> what it requires; nothing is
    installed. Skips where the package index does not answer that, or not in time."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    command += ["--disable-pip-version-check", "-c", str(ROOT / name), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INDEX_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip did not resolve {' '.join(arguments[:2])} of {name} within {INDEX_S:g} s")
    if done.returncode != 0 and "ResolutionImpossible" not in done.stderr:
        pytest.skip(f"pip cannot resolve {name} here: {done.stderr.strip().splitlines()[-1][:200]}")
    assert done.returncode == 0, done.stderr[-2000:]
    found = [item["metadata"] for item in json.loads(done.stdout)["install"]]
    return {
        f"{item['name'].lower().replace('_', '-')}=={item['version']}": item.get("requires_dist", []) for item in found
    }


def asked_for(requirements: list[str], name: str) -> str:
    """The one version of ``name`` that ``requirements`` pin."""
    (version,) = {next(iter(r.specifier)).version for r in map(Requirement, requirements) if r.name == name}
    return version


@pytest.mark.by_hand
@pytest.mark.timeout(700)
def test_the_torch_that_sglang_asks_for_is_the_learner_s_and_brings_the_pinned_nccl() -> None:
    servers, learner = pins("constraints-rollout.txt"), pins("constraints-gpu.txt")
    (sglang,) = would_install("constraints-rollout.txt", "--no-deps", "sglang").values()
    assert asked_for(sglang, "torch") == servers["torch"] == learner["torch"]
    (torch,) = would_install("constraints-gpu.txt", "--no-deps", "torch").values()
    assert asked_for(torch, "nvidia-nccl-cu13") == servers["nvidia-nccl-cu13"]


@pytest.mark.by_hand
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("name", "requirements"),
    [
        ("constraints-gpu.txt", ["transformer-engine[core_cu13]", *setup_argument("install_requires")]),  # type: ignore[misc]
        ("constraints-rollout.txt", ["sglang"]),
    ],
)
def test_pip_resolves_the_pins(name: str, requirements: list[str]) -> None:
    """Without CUDA. TransformerEngine's torch part is left out: its metadata is made by its build."""
    found = dict(distribution.split("==", 1) for distribution in would_install(name, *requirements))
    for distribution, version in pins(name).items():
        assert distribution == "transformer-engine-torch" or found[distribution].startswith(version), distribution
