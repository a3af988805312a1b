"""``train.start_from``: which checkpoint a new run takes its weights from, and whether they fit its model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...models.identity import differences, shape_facts
from ...models.shape import ModelShape
from ...run.directory import MANIFEST, Manifest, RunDirectory, damage, read_manifest
from ...run.errors import ConfigError
from ..load import written
from ..schema import RunConfig

#: What a manifest's facts of a model hold beside its shape (and "weights FILE").
_HELD = ("padded vocabulary", "dtype", "parallel.expert > 1")
#: Keys that decide how an optimizer's state is stored.
_OPTIMIZER_KEYS = ("model.dtype", "optimizer.distributed")


def start_checkpoint(path: Path) -> Path:
    """The complete checkpoint that ``path`` names: itself, or the newest of a run directory; ConfigError."""
    named = f"train.start_from = {path}"
    if not path.is_dir():
        what = "is a file" if path.exists() else "no such folder"
        raise ConfigError([f"{named}: {what}; give RUN_DIR, or RUN_DIR/checkpoints/step_N"])
    if (path / MANIFEST).exists():
        if (found := damage(path)) is not None:
            raise ConfigError([f"{named}: is damaged ({found}); put its files back, or name another checkpoint"])
        return path
    directory = RunDirectory(path)
    if not directory.checkpoints.is_dir():
        raise ConfigError(
            [
                f"{named}: neither a run directory (no checkpoints/) nor a complete checkpoint (no {MANIFEST}); give "
                "RUN_DIR, or RUN_DIR/checkpoints/step_N"
            ]
        )
    if (loss := directory.loss()) is not None:
        raise ConfigError([f"{named}: {loss}; put its files back, or name one of its checkpoints"])
    steps = directory.complete_steps()
    if not steps:
        raise ConfigError([f"{named}: the run has no complete checkpoint; name a run that has one"])
    return directory.checkpoint(steps[-1])


def start_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """What keeps a run from starting from the weights that it names."""
    path = config.train.start_from
    if path is None:
        return
    try:
        checkpoint = start_checkpoint(path)
        manifest = read_manifest(checkpoint)
    except ConfigError as error:
        yield from error.problems
        return
    except (OSError, ValueError) as error:
        yield f"train.start_from = {path}: {MANIFEST} cannot be read: {error}; name another checkpoint"
        return
    yield from (f"train.start_from = {path}: {problem}" for problem in start_differences(manifest, config, shape))


def start_differences(manifest: Manifest, config: RunConfig, shape: ModelShape) -> list[str]:
    """Why a run of ``config`` and a model of ``shape`` cannot start from the checkpoint of ``manifest``."""
    facts = dict(manifest.learner.get("model", {}))
    saved = {key: fact for key, fact in facts.items() if key not in _HELD and not key.startswith("weights ")}
    found = differences(saved, shape_facts(shape))
    padded = {"padded vocabulary (model.vocab_multiple)": facts.get("padded vocabulary")}
    found += differences(padded, dict.fromkeys(padded, shape.padded_vocabulary(config.model.vocab_multiple)))
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    lines = [f"its model is not that of {config.model.path}: {'; '.join(found[:3])}{more}"] if found else []
    if not config.train.start_optimizer:
        return lines
    apart, values = "parallel.expert > 1", written(config)
    stored = {key: manifest.config.get(key) for key in _OPTIMIZER_KEYS} | {apart: facts.get(apart)}
    now = {key: values[key] for key in _OPTIMIZER_KEYS} | {apart: config.parallel.expert > 1}
    if held := differences(stored, now):
        lines.append(
            f"its optimizer is stored in another form: {'; '.join(held)}; take the weights alone, with start_optimizer "
            "= false"
        )
    return lines
