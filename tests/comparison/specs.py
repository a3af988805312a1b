"""A spec of two methods, and how one is written into a folder."""

from __future__ import annotations

from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "modular_sum_cpu" / "run.toml"

SPEC = """
run = "{example}"
steps = 40
eval_every = 10
lags = [16]
rates = [1e-3]
seeds = [0, 1]

[set]
optimizer.schedule = "constant"

[[methods]]
name = "vcpo"

[[methods]]
name = "synchronous"
lags = [0]
set.algorithm.method = "grpo"
"""


def written_spec(folder: Path, *changes: tuple[str, str]) -> Path:
    """SPEC with each (text, text in its place) in ``folder``."""
    text = SPEC.format(example=EXAMPLE)
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path = folder / "spec.toml"
    path.write_text(text)
    return path
