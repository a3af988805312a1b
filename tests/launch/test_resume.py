"""What a resume may change; tests/cli/test_train.py has what it refuses."""

from __future__ import annotations

from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.launch.resume import CHANGEABLE_ON_RESUME


def test_every_changeable_key_exists() -> None:
    known = {f"{name}.{key}" for name, field in RunConfig.model_fields.items() for key in field.annotation.model_fields}
    assert CHANGEABLE_ON_RESUME <= known
