"""Environments by name: built-in ones, and a user's own as "package.module:factory".

A factory is called with (EnvironmentConfig, tokenizer_dir, seed), returns an ``Environment`` and
raises ``EnvironmentSetupError`` with everything that is wrong with its settings.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

from ..config.schema import EnvironmentConfig
from . import arithmetic, modular_sum
from .base import Environment, EnvironmentSetupError
from .chat import making
from .dataset.environment import NAME as DATASET
from .dataset.environment import Dataset
from .modules import load_attribute, user_code

Factory = Callable[[EnvironmentConfig, Path, int], Environment]

BUILT_IN: dict[str, Factory] = {
    arithmetic.NAME: arithmetic.Arithmetic,
    modular_sum.NAME: modular_sum.ModularSum,
    DATASET: Dataset,
}

#: What ``Environment`` asks for.
_MEMBERS = ("name", "fingerprint", "sampling", "max_prompt_tokens", "train_example", "heldout", "episode", "decode")


def _factory(config: EnvironmentConfig) -> Factory:
    name = config.name
    if ":" not in name:
        if name not in BUILT_IN:
            raise EnvironmentSetupError(
                f"environment.name = {name!r}: unknown; known are {', '.join(sorted(BUILT_IN))}, "
                "and your own as 'package.module:factory'"
            )
        return BUILT_IN[name]
    factory: Factory = load_attribute(name, config.modules, "environment.name")
    if not callable(factory):
        attribute = name.partition(":")[2]
        raise EnvironmentSetupError(f"environment.name = {name!r}: {attribute} is not callable; name a factory")
    return factory


def make_environment(
    config: EnvironmentConfig, tokenizer_dir: Path, seed: int, *, warn: Callable[[str], None] = lambda line: None
) -> Environment:
    """The environment of a run; EnvironmentSetupError lists all that is wrong.

    ``tokenizer_dir`` is the model's folder (``tokenizer.json``); ``seed`` settles order and prompts. ``warn`` is told
    what it can be made with, but hardly meant. Chat templates print ``config.date`` as today.
    """
    factory, arguments = _factory(config), (config, tokenizer_dir, seed)
    wrong = f"environment.name = {config.name!r}: "
    try:
        inspect.signature(factory).bind(*arguments)
    except (TypeError, ValueError) as error:  # ValueError: of a built-in function, which cannot be looked at
        raise EnvironmentSetupError(
            f"{wrong}it cannot be called with (config, tokenizer_dir, seed): {error}; name a factory that can"
        ) from error
    with making(config.date) as templates, user_code(f"{wrong}making it"):
        environment = factory(*arguments)
        missing = sorted(name for name in _MEMBERS if not hasattr(environment, name))
    if missing:
        raise EnvironmentSetupError(
            f"{wrong}it made a {type(environment).__name__}, which is no environment: it has no {', '.join(missing)}"
        )
    if isinstance(environment.sampling, Mapping):  # what else it is will be refused, with the other members
        for endless in filter(None, (template.endless(environment.sampling) for template in templates)):
            warn(endless)
    return environment
