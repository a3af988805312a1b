"""Environments by name: built-in ones, and a user's own as "package.module:factory".

A factory is called with (EnvironmentConfig, tokenizer_dir, seed), returns an ``Environment`` and
raises ``EnvironmentSetupError`` with everything that is wrong with its settings.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path

from ..config.schema import EnvironmentConfig
from . import arithmetic, modular_sum
from .base import Environment, EnvironmentSetupError
from .chat import making

Factory = Callable[[EnvironmentConfig, Path, int], Environment]

BUILT_IN: dict[str, Factory] = {
    arithmetic.NAME: arithmetic.Arithmetic,
    modular_sum.NAME: modular_sum.ModularSum,
}

#: What ``Environment`` asks for.
_MEMBERS = ("name", "fingerprint", "sampling", "max_prompt_tokens", "train_example", "heldout", "episode", "decode")


def _factory(name: str) -> Factory:
    if ":" not in name:
        if name not in BUILT_IN:
            raise EnvironmentSetupError(
                f"environment.name = {name!r}: unknown; known are {', '.join(sorted(BUILT_IN))}, "
                "and your own as 'package.module:factory'"
            )
        return BUILT_IN[name]
    module_name, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise EnvironmentSetupError(
            f"environment.name = {name!r}: {error}; give 'package.module:factory' that Python can import (installed, "
            "or PYTHONPATH=FOLDER: neither the working directory nor the configuration's folder is searched)"
        ) from error
    if not callable(factory):
        raise EnvironmentSetupError(f"environment.name = {name!r}: {attribute} is not callable; name a factory")
    return factory


def make_environment(
    config: EnvironmentConfig, tokenizer_dir: Path, seed: int, *, warn: Callable[[str], None] = lambda line: None
) -> Environment:
    """The environment of a run; EnvironmentSetupError lists all that is wrong.

    ``tokenizer_dir`` is the model's folder (``tokenizer.json``); ``seed`` settles order and prompts. ``warn`` is told
    what it can be made with, but hardly meant. Chat templates print ``config.date`` as today.
    """
    factory, arguments = _factory(config.name), (config, tokenizer_dir, seed)
    wrong = f"environment.name = {config.name!r}: "
    try:
        inspect.signature(factory).bind(*arguments)
    except (TypeError, ValueError) as error:  # ValueError: of a built-in function, which cannot be looked at
        raise EnvironmentSetupError(
            f"{wrong}it cannot be called with (config, tokenizer_dir, seed): {error}; name a factory that can"
        ) from error
    with making(config.date) as templates:
        environment = factory(*arguments)
    if missing := sorted(name for name in _MEMBERS if not hasattr(environment, name)):
        raise EnvironmentSetupError(
            f"{wrong}it made a {type(environment).__name__}, which is no environment: it has no {', '.join(missing)}"
        )
    for endless in filter(None, (template.endless(environment.sampling) for template in templates)):
        warn(endless)
    return environment


def validate_environment(
    config: EnvironmentConfig,
    tokenizer_dir: Path,
    seed: int,
    context_length: int,
    *,
    warn: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """All problems found before a start, one line each; [] when the environment can be made and fits.

    ``context_length`` is the longest sequence of the model in tokens; ``warn`` as in ``make_environment``.
    """
    try:
        environment = make_environment(config, tokenizer_dir, seed, warn=warn)
    except EnvironmentSetupError as error:
        return list(error.problems)
    prompt = environment.max_prompt_tokens
    answer = environment.sampling.get("max_new_tokens", 1)
    if prompt + answer > context_length:
        return [
            f"environment {config.name}: a prompt of {prompt} tokens and an answer of {answer} exceed the model's "
            f"context of {context_length}; shorten the prompts or take a model with a longer context"
        ]
    return []
