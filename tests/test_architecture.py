"""Who may import whom, and where torch, megatron and transformers may not be needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "vcpo_megatron"

#: Package -> what of ours it may import, itself aside: packages, or single modules and folders. As in the design.
ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "run": set(),
    "algorithm": set(),
    "models": {"run"},
    "config": {"models", "run"},
    "observability": {"types", "run", "config", "models"},
    "transport": {"types", "run", "config", "models"},
    "environments": {"types", "run", "config", "transport", "models.tokenizer"},
    "conversion": {"models", "run", "config"},
    "rollout": {"types", "run", "config", "models", "environments", "transport", "observability", "weight_sync.wire"},
    "weight_sync": {"types", "run", "config", "models", "conversion", "transport", "rollout.client"},
    "learner": {
        *("types", "run", "config", "models", "algorithm", "conversion", "transport", "weight_sync", "observability"),
    },
    "orchestrator": {
        *("types", "run", "config", "models", "environments", "rollout", "transport", "weight_sync", "observability"),
    },
    "launch": {"config", "run", "transport", "observability"},
    "planning": {
        *("config", "models", "run", "launch", "environments", "rollout.client", "orchestrator.modes.staleness"),
        "orchestrator.modes.environment_check",
    },
    "report": {"types", "run", "config", "models", "observability", "orchestrator.store"},
    "comparison": {
        *("types", "run", "config", "models", "observability", "orchestrator.store", "report.charts"),
        "report.collapse",
    },
}
#: Folders of a package, lowest first: a module imports from its own folder and from those before it. What is not named
#: lies above all of them.
FLOORS: dict[str, tuple[str, ...]] = {
    "rollout": ("client", "fleet"),
    "learner": ("batch", "megatron", "moe", "gradients", "step", "weights", "checkpoint"),
    "orchestrator": ("store", "peers", "modes"),
}
#: The command line may import all of ours, but only inside functions.
UNBOUND = {"cli", "__main__", "__init__"}
#: Library -> who alone may import it.
RESERVED: dict[str, tuple[str, ...]] = {
    "megatron": ("learner",),
    "transformers": ("rollout.embedded", "conversion", "learner"),
    "mpi4py": ("launch",),
}
#: Modules that work where torch cannot be imported; a package stands for all of its modules, but for ``NEEDS_TORCH``.
TORCH_FREE = (
    *("types", "run", "models", "config", "environments", "orchestrator", "launch", "planning", "observability"),
    *("report", "comparison", "transport", "cli", "rollout.client", "rollout.fleet", "rollout.agent_loop"),
    "weight_sync",
)
#: What of these holds tensors; with a star any folder of the package.
NEEDS_TORCH = (
    *("weight_sync.learner", "weight_sync.*.learner", "weight_sync.distributed.broadcaster", "weight_sync.wire"),
    "weight_sync.expected_checksums",
)
#: A folder with more modules than this is hard to find one's way in.
MOST_MODULES = 16


def module_files() -> dict[str, Path]:
    """Dotted name below the package -> file; a package's own file under its name."""
    files = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return files


FILES = module_files()


def imports(module: str, path: Path, tree: ast.AST) -> Iterator[str]:
    """Absolute dotted names that ``tree`` imports. ``from a import b`` gives a.b when that is a module of ours."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    if module == "__init__":
        package = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package[: len(package) - node.level + 1]
                base = ".".join([PACKAGE, *above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full.removeprefix(f"{PACKAGE}.") in FILES else base


def of_ours(names: Iterator[str]) -> Iterator[str]:
    for name in names:
        if name == PACKAGE or name.startswith(f"{PACKAGE}."):
            yield name.removeprefix(PACKAGE).removeprefix(".")


def violations(module: str, path: Path, source: str) -> list[str]:
    """Imports in ``source`` that the table does not allow to ``module``."""
    top = module.split(".")[0]
    names = list(imports(module, path, ast.parse(source)))
    found = [
        f"{module} imports {name}, which only {', '.join(owners)} may"
        for name in names
        if (owners := RESERVED.get(name.split(".")[0]))
        and not any(module == owner or module.startswith(f"{owner}.") for owner in owners)
        and name.split(".")[0] != PACKAGE
    ]
    if top not in UNBOUND:
        found += [
            f"{module} imports {PACKAGE}.{name}"
            for name in of_ours(iter(names))
            if name.split(".")[0] != top and name != "" and not set(_with_parents(name)) & ALLOWED[top]
        ]
        found += [
            f"{module} imports {PACKAGE}.{name}, from a floor above its own"
            for name in of_ours(iter(names))
            if name.split(".")[0] == top and _floor(name) > _floor(module)
        ]
    return found


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _floor(module: str) -> int:
    """Of a module in its package; the top one where its folder has no floor of its own."""
    top, folder, *_ = *module.split("."), ""
    floors = FLOORS.get(top, ())
    return floors.index(folder) if folder in floors else len(floors)


def test_every_package_has_a_row() -> None:
    assert {name.split(".")[0] for name in FILES} <= ALLOWED.keys() | UNBOUND


@pytest.mark.parametrize("module", FILES)
def test_imports_follow_the_table(module: str) -> None:
    assert violations(module, FILES[module], FILES[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("config.schema", "from ..types import Batch"),
        ("config.schema", "def f():\n    from .. import types"),
        ("learner.step.plan", "import vcpo_megatron.orchestrator.controller"),
        ("rollout.client.http", "from vcpo_megatron.learner.step import plan"),
        ("planning.plan", "from ..orchestrator.store import store"),
        ("orchestrator.controller", "import megatron.core"),
        ("rollout.client.http", "from transformers import AutoTokenizer"),
        ("algorithm.ess", "from ..config.schema import RunConfig"),
        ("rollout.agent_loop", "from ..weight_sync import plan"),
        ("learner.batch.packing", "from ..step import plan"),
        ("orchestrator.peers.servers", "from ..modes.staleness import StalenessBound"),
        ("orchestrator.store.store", "from .. import controller"),
    ],
)
def test_a_forbidden_import_is_seen(module: str, source: str) -> None:
    assert len(violations(module, Path(f"{module.split('.')[-1]}.py"), source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("planning.plan", "from ..orchestrator.modes import staleness"),
        ("learner.step.plan", "from ..batch import packing\nfrom ...types import Batch\nimport megatron.core"),
        ("learner.worker", "from .step.vcpo_step import VcpoStep"),
        ("rollout.embedded.engine", "import transformers"),
        ("rollout.embedded.weight_groups", "from ...weight_sync import wire"),
        ("cli.main", "def f():\n    from ..learner.step import plan"),
    ],
)
def test_an_allowed_import_is_not(module: str, source: str) -> None:
    assert violations(module, Path(f"{module.split('.')[-1]}.py"), source) == []


def test_no_folder_is_crowded() -> None:
    folders = Counter(path.parent for path in FILES.values() if path.name != "__init__.py")
    assert {str(folder.relative_to(ROOT)): n for folder, n in folders.items() if n > MOST_MODULES} == {}


def test_no_public_class_stands_twice() -> None:
    places: dict[str, list[str]] = {}
    for module, path in FILES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


@pytest.mark.parametrize("module", [name for name in FILES if name.startswith("cli.")])
def test_the_command_line_imports_ours_only_when_needed(module: str) -> None:
    """But for what all commands share, which imports nothing of ours itself."""
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
    at_top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    found = set(of_ours(imports(module, FILES[module], ast.Module(at_top, []))))
    assert found <= (set() if module == "cli.common" else {"cli.common"})


BLOCKED = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "megatron", "transformers", "tensorflow", "pyarrow"}:
            raise ImportError(f"{name} is blocked in this test")

sys.meta_path.insert(0, Blocked())
failed = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{name}: {error}")
print("\\n".join(failed))
"""


def test_torch_is_not_needed_where_it_must_not_be() -> None:
    modules = [
        f"{PACKAGE}.{name}"
        for name in FILES
        if set(_with_parents(name)) & set(TORCH_FREE)
        and not name.endswith("__main__")
        and not any(fnmatch(name, pattern) for pattern in NEEDS_TORCH)
    ]
    assert len(modules) > 10
    result = subprocess.run(
        [sys.executable, "-c", BLOCKED, *modules], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stdout + result.stderr
    seen = subprocess.run(
        [sys.executable, "-c", BLOCKED, "torch"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert "torch is blocked" in seen.stdout
