"""The script itself: on GPUs where there are any, and its CPU form whole."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vcpo_megatron.launch.devices import visible_gpus

from .checklist import NEEDS_A_GPU, TOTAL_S, Outcome
from .run import CHECKS, main, row

SCRIPT = Path(__file__).with_name("run.py")
#: Seconds that the ranks' start takes at most where budgets are used up.
START_S = 25


def run(out: Path, *arguments: str, timeout_s: float) -> tuple[int, dict[str, dict[str, str]], str]:
    """Exit code, checks by name, and what was printed."""
    command = [sys.executable, str(SCRIPT), "--out", str(out), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)
    assert out.is_file(), done.stderr
    written = json.loads(out.read_text())
    assert written["date"] and written["devices"] and written["versions"]["torch"] != "none"
    return done.returncode, {check["name"]: check for check in written["checks"]}, done.stdout


@pytest.mark.gpu
@pytest.mark.timeout(960)
@pytest.mark.skipif(not visible_gpus(), reason="no GPU")
def test_on_gpus(tmp_path: Path) -> None:
    code, checks, _ = run(tmp_path / "out.json", timeout_s=930)
    assert code == 0, [check for check in checks.values() if check["state"] == "failed"]


@pytest.mark.by_hand
@pytest.mark.timeout(1900)
def test_its_cpu_form(tmp_path: Path) -> None:
    """Everything but kernels passes, layouts of two ranks included; those say what they need."""
    code, checks, printed = run(tmp_path / "out.json", "--device", "cpu", "--seconds", "1800", timeout_s=1850)
    assert code == 0, [check for check in checks.values() if check["state"] == "failed"]
    assert [name for name in checks] == [check.name for check in CHECKS]
    skipped = {name: check["text"] for name, check in checks.items() if check["state"] == "skipped"}
    assert skipped.keys() == {
        "no read inside the backward",
        "fused adam",
        "fused weight gradients",
        "layers of TransformerEngine",
        "mismatch with SGLang",
    }
    assert skipped["no read inside the backward"] == skipped["layers of TransformerEngine"] == NEEDS_A_GPU
    assert all(check["state"] == "passed" for name, check in checks.items() if name not in skipped)
    assert all(f"  {name}: " in printed for name in checks)
    fits = checks["mismatch with the embedded engine"]["figures"]
    assert fits["float32, its head"]["ess/ratio"] == pytest.approx(1, abs=1e-3)  # type: ignore[index]


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if visible_gpus():
        pytest.skip("there is a GPU")
    assert main([]) == 2 and capsys.readouterr().err.startswith("no GPU: ")


def test_a_name_that_no_check_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "warp drive"]) == 2 and "warp drive" in capsys.readouterr().err


def test_every_check_is_there_and_all_fit_into_the_time() -> None:
    """One GPU: ten minutes. The last check has what the others leave."""
    for check in CHECKS:
        module, name = check.function.split(":")
        assert callable(getattr(importlib.import_module(module), name)), check.name
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    single = sum(check.seconds for check in CHECKS[:-1] if check.ranks == 1)
    assert single + START_S <= TOTAL_S[1] == 600
    assert sum(check.seconds for check in CHECKS[:-1]) + 2 * START_S <= TOTAL_S[2]


def test_a_line_of_the_table() -> None:
    outcome = Outcome("what fits", "passed", "65,000 tokens", 12.34, peak_bytes=3 << 30)
    assert row(outcome) == "passed      12.3   3.00  what fits: 65,000 tokens"
    assert row(Outcome("a", "skipped", "needs a GPU")) == "skipped      0.0      -  a: needs a GPU"


def test_the_page_names_every_check() -> None:
    """docs/gpu.md has a table of them."""
    page = Path(__file__).parents[2] / "docs" / "gpu.md"
    section = page.read_text().split("\n## The checks\n")[1].split("\n## ")[0]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines() if line.startswith("| ")]
    named = [name for cell in rows[1:] for name in cell.split("; ")]
    shown = [name if name in {check.name for check in CHECKS} else f"layout {name}" for name in named]
    assert shown == [check.name for check in CHECKS]
