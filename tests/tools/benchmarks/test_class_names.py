"""One name a thing in the shared code of the tools, too."""

from __future__ import annotations

import ast
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / "tools" / "benchmarks"


def test_no_public_class_stands_twice() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path.name)
    assert len(places) > 10 and {name: files for name, files in places.items() if len(files) > 1} == {}
