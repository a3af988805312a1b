"""Who may import whom, and where torch, megatron and transformers may not be needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "vcpo_megatron"

#: Package or top module -> what of ours it may import, itself aside. As in the design.
ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "config": set(),
    "algorithm": set(),
    "observability": {"types", "config"},
    "transport": {"types", "config"},
    "environments": {"types", "config"},
    "conversion": {"config"},
    "rollout": {"types", "config", "environments", "transport", "observability"},
    "learner": {"types", "config", "algorithm", "conversion", "transport", "observability"},
    "orchestrator": {"types", "config", "environments", "rollout", "transport", "observability"},
    "launch": {"config", "observability", "transport"},
    "planning": {"config", "launch", "orchestrator.staleness"},
}
#: The modules of the command line: they may import all of ours, but only inside functions.
COMMAND_LINE = ("cli", "cli_parts", "cli_train", "cli_convert")
UNBOUND = {"benchmarks", *COMMAND_LINE, "__main__", "__init__"}
#: Library -> who alone may import it.
RESERVED: dict[str, tuple[str, ...]] = {
    "megatron": ("learner",),
    "transformers": ("rollout.embedded", "conversion", "learner"),
    "mpi4py": ("launch",),
}
#: Modules that work where torch cannot be imported; a package stands for all of its modules.
TORCH_FREE = (
    "types",
    "config",
    "environments",
    "orchestrator",
    "launch",
    "planning",
    "observability",
    *COMMAND_LINE,
    "rollout.protocol",
    "rollout.client",
    "rollout.fleet",
    "rollout.agent_loop",
    "rollout.chat",
    "transport.messages",
    "transport.frames",
    "transport.control",
    "transport.child",
)


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
            if name.split(".")[0] != top and name != "" and not {name.split(".")[0], name} & ALLOWED[top]
        ]
    return found


def test_every_package_has_a_row() -> None:
    assert {name.split(".")[0] for name in FILES} <= ALLOWED.keys() | UNBOUND


@pytest.mark.parametrize("module", FILES)
def test_imports_follow_the_table(module: str) -> None:
    assert violations(module, FILES[module], FILES[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("config.models", "from ..types import Batch"),
        ("config.models", "def f():\n    from .. import types"),
        ("learner.step", "import vcpo_megatron.orchestrator.loop"),
        ("rollout.client", "from vcpo_megatron.learner import step"),
        ("planning.plan", "from ..orchestrator import store"),
        ("orchestrator.loop", "import megatron.core"),
        ("rollout.client", "from transformers import AutoTokenizer"),
        ("algorithm.ess", "from ..config.models import RunConfig"),
    ],
)
def test_a_forbidden_import_is_seen(module: str, source: str) -> None:
    assert len(violations(module, Path(f"{module.split('.')[-1]}.py"), source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("planning.plan", "from ..orchestrator import staleness"),
        ("learner.step", "from . import packing\nfrom ..types import Batch\nimport megatron.core"),
        ("rollout.embedded.engine", "import transformers"),
        ("cli", "def f():\n    from .learner import step"),
    ],
)
def test_an_allowed_import_is_not(module: str, source: str) -> None:
    assert violations(module, Path(f"{module.split('.')[-1]}.py"), source) == []


@pytest.mark.parametrize("module", COMMAND_LINE)
def test_the_command_line_imports_ours_only_when_needed(module: str) -> None:
    """But for what all commands share, which imports nothing of ours itself."""
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
    at_top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    found = set(of_ours(imports(module, FILES[module], ast.Module(at_top, []))))
    assert found <= (set() if module == "cli_parts" else {"cli_parts"})


BLOCKED = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "megatron", "transformers"}:
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
        if any(name == free or name.startswith(f"{free}.") for free in TORCH_FREE) and not name.endswith("__main__")
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
