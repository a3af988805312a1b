"""Records of runs, made without a run."""

from __future__ import annotations

from typing import Any

from vcpo_megatron.comparison.results import RunRecord


def record(method: str = "vcpo", **values: Any) -> RunRecord:
    """A run of four steps, evaluated every second one, with two process seconds a step."""
    usual: dict[str, Any] = {
        **{"comparison": "spec", "lag": 16, "rate": 1e-3, "seed": 0, "steps": 4, "status": "done"},
        **{"evaluated": (0, 2, 4), "accuracy": (0.3, 0.6, 0.9), "step": (0, 1, 2, 3)},
        **{"process_seconds": (10.0, 12.0, 14.0, 16.0), "series": {"ess/ratio": (1.0, 0.8, None, 0.6)}},
    }
    values = usual | values
    digest = f"{method}-{values['lag']}-{values['rate']}-{values['seed']}-{values['steps']}"
    return RunRecord(**{"method": method, "digest": digest, **values})
