"""The rollout environment's script, and the module that makes SGLang importable without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.messages import assert_names

TOOLS = Path(__file__).parents[2] / "tools"


def test_bad_usage_shows_both_forms() -> None:
    for arguments in ([], ["--gpu", "x"], ["a", "b"]):
        done = subprocess.run([TOOLS / "make_rollout_env.sh", *arguments], capture_output=True, text=True, timeout=20)
        assert done.returncode == 2 and "make_rollout_env.sh --cpu FOLDER" in done.stderr


def test_what_the_cpu_form_copies_is_there() -> None:
    script = (TOOLS / "make_rollout_env.sh").read_text()
    for name in ("sgl_kernel", "vcpo_sglang_cpu.py", "vcpo_sglang_cpu.pth", "requirements.txt"):
        assert f"sglang_cpu/{name}" in script and (TOOLS / "sglang_cpu" / name).exists()
    assert (TOOLS / "sglang_cpu" / "vcpo_sglang_cpu.pth").read_text() == "import vcpo_sglang_cpu\n"


STUBS = """
import sys
import types

def install_platform_stubs():
    if sys.platform != "nowhere":
        raise AssertionError("only the branch on triton is run")
    if "triton" not in sys.modules:
        sys.modules["triton"] = types.ModuleType("triton")
"""
PROGRAM = """
import sys
import vcpo_sglang_cpu
import sglang.srt.mem_cache.pool_host.common as common
import triton, sgl_kernel, os
print(common._cuda_host_register(b""), os.environ["SGLANG_USE_CPU_ENGINE"])
try:
    sgl_kernel.some_kernel(1)
except NotImplementedError as error:
    print(error)
"""


def test_imports_that_need_a_gpu_are_met_on_their_way(tmp_path: Path) -> None:
    """A package of SGLang's shape, whose parts fail as the real ones do without a GPU."""
    inner = tmp_path / "sglang" / "srt" / "mem_cache" / "pool_host"
    inner.mkdir(parents=True)
    for folder in (inner, *list(inner.parents)[:3]):
        (folder / "__init__.py").touch()
    (tmp_path / "sglang" / "__init__.py").write_text("import triton\n")
    (tmp_path / "sglang" / "_platform_stubs.py").write_text(STUBS)
    (inner / "common.py").write_text("def _cuda_host_register(buffer):\n    raise RuntimeError('no CUDA')\n")
    path = os.pathsep.join([str(tmp_path), str(TOOLS / "sglang_cpu")])
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("SGLANG_USE_CPU_ENGINE", None)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    found, refused = done.stdout.splitlines()
    assert found == "None 1"
    assert_names(refused, "sgl_kernel.some_kernel", "the CPU shim")
