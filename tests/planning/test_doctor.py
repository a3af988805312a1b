"""What the doctor says of a machine."""

from __future__ import annotations

import ast
import re
from importlib import metadata
from pathlib import Path

import pytest

from tests.messages import assert_names
from vcpo_megatron.config.fused_kernels import InstalledKernels
from vcpo_megatron.planning import doctor
from vcpo_megatron.planning.doctor import Finding, examine, render

ROOT = Path(__file__).parents[2]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Distribution -> version, in place of what is installed."""
    installed = {name: least for name, (least, _) in doctor.REQUIRED.items()}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    return installed


def finding(findings: list[Finding], name: str) -> Finding:
    return next(row for row in findings if row.name == name)


def test_its_requirements_are_those_of_the_package() -> None:
    calls = [node for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if isinstance(node, ast.keyword)]
    (listed,) = (ast.literal_eval(node.value) for node in calls if node.arg == "install_requires")
    assert listed == [f"{name}>={least}" for name, (least, _) in doctor.REQUIRED.items()]


def test_a_machine_with_the_least_versions(versions: dict[str, str], tmp_path: Path) -> None:
    findings = examine(tmp_path)
    assert [row for row in findings if row.level == "missing"] == []
    assert finding(findings, "sglang").level == "note" and "embedded engine" in finding(findings, "sglang").text


def test_a_rollout_environment_is_looked_at(versions: dict[str, str], tmp_path: Path) -> None:
    site = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    python = tmp_path / "env" / "bin" / "python"
    site.mkdir(parents=True)
    assert finding(examine(tmp_path, python), "sglang").level == "missing"
    (site / "sglang-0.5.23.dist-info").mkdir()
    assert finding(examine(tmp_path, python), "sglang") == Finding(
        "ok", "sglang", f"0.5.23 beside {python}  rollout servers"
    )
    (site / "sglang-0.5.23.dist-info").rename(site / "sglang-0.6.0.dist-info")
    assert finding(examine(tmp_path, python), "sglang").text == f"0.6.0 beside {python}; tested with 0.5.23"


def test_missing_and_old_packages_name_the_remedy(versions: dict[str, str], tmp_path: Path) -> None:
    del versions["psutil"]
    versions["torch"] = "2.5.9+cpu"
    findings = examine(tmp_path)
    assert finding(findings, "psutil").level == "missing"
    assert "pip install 'psutil>=5.9'" in finding(findings, "psutil").text
    assert finding(findings, "torch").level == "missing" and "2.5.9+cpu is too old" in finding(findings, "torch").text


@pytest.mark.parametrize(("version", "level"), [("2.6", "ok"), ("2.13.0+cpu", "ok"), ("10", "ok"), ("2", "missing")])
def test_versions_compare_by_number(versions: dict[str, str], tmp_path: Path, version: str, level: str) -> None:
    versions["torch"] = version
    assert finding(examine(tmp_path), "torch").level == level


def test_a_newer_megatron_is_noted(versions: dict[str, str], tmp_path: Path) -> None:
    versions["megatron-core"] = "0.19.2"
    assert finding(examine(tmp_path), "megatron-core").level == "note"


def test_the_file_system_is_tried_where_runs_will_be(tmp_path: Path) -> None:
    row = finding(examine(tmp_path / "not" / "yet"), "run directory")
    assert row == Finding("ok", "run directory", f"{tmp_path}: fsync, rename and locks work")
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", lambda file, operation: None)
    row = finding(examine(tmp_path), "run directory")
    assert row.level == "missing" and "another file system" in row.text


def test_the_report_is_aligned() -> None:
    text = render([Finding("ok", "a", "one"), Finding("missing", "long name", "two")])
    assert text == "ok      a          one\nmissing long name  two"
    assert re.match(r"\S+\s+python +3\.", render(examine(Path.cwd())))


def kernels(installed: InstalledKernels, *, gpu: bool) -> dict[str, Finding]:
    return {row.name: row for row in doctor._kernels(installed, gpu=gpu)}


def test_fused_kernels_and_the_other_apex() -> None:
    nvidia = InstalledKernels(transformer_engine=True, apex="usable", weight_gradients=True)
    assert kernels(nvidia, gpu=True) == {
        "fused adam": Finding("ok", "fused adam", "TransformerEngine's is used"),
        "fused weight gradients": Finding("ok", "fused weight gradients", "Apex's is used"),
    }
    assert_names(kernels(nvidia, gpu=False)["fused adam"].text, "TransformerEngine's", "needs a GPU", "torch's is used")
    other = kernels(InstalledKernels(apex="another package"), gpu=True)
    assert "not NVIDIA's but another project" in other["apex"].text and other["apex"].level == "note"
    assert_names(other["fused adam"].text, "not installed", "torch's is used", "NVIDIA's apex")
    assert kernels(InstalledKernels(), gpu=False) == {}


def test_the_layers_are_named(versions: dict[str, str], tmp_path: Path) -> None:
    assert finding(examine(tmp_path), "layers").text.startswith("Megatron's local ones, several trajectories")


def test_transformer_engines_layers_wait_for_a_check_on_the_gpu() -> None:
    def told(engine: bool, gpu: bool) -> list[str]:
        found = doctor._layers(InstalledKernels(transformer_engine=engine), gpu=gpu)
        return [row.text for row in found if row.name == "transformer engine"]

    assert told(False, False) == []
    (text,) = told(False, True)
    assert_names(text, "not installed", "its layers and attention cannot be chosen")
    (text,) = told(True, False)
    assert_names(text, "installed and needs a GPU", "its layers cannot be chosen")
    (text,) = told(True, True)
    assert 'core_attention = "transformer_engine": several trajectories a micro-batch' in text
    assert_names(text, 'transformer_impl = "transformer_engine": one', "Neither has passed on a GPU")
