"""Environments by name, and what is found before a start."""

import pytest

from tests.environments.in_process import setup_problems
from vcpo_megatron.config.schema import EnvironmentConfig
from vcpo_megatron.environments.base import EnvironmentSetupError
from vcpo_megatron.environments.modular_sum import ModularSum
from vcpo_megatron.environments.registry import make_environment


def config(name="modular_sum", **values):
    return EnvironmentConfig(name=name, **values)


def test_a_built_in_environment_is_made_by_name(make_tokenizer):
    environment = make_environment(config(), make_tokenizer(), 0)
    assert isinstance(environment, ModularSum) and environment.name == "modular_sum"


def test_a_user_environment_is_made_by_its_factory(make_tokenizer):
    name = "vcpo_megatron.environments.modular_sum:ModularSum"
    assert isinstance(make_environment(config(name), make_tokenizer(), 0), ModularSum)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("modular_product", "known are arithmetic, dataset, modular_sum"),
        ("no_such_package.module:factory", "No module named 'no_such_package'"),
        ("vcpo_megatron.environments.base:nothing", "nothing"),
        ("vcpo_megatron.environments.modular_sum:NAME", "NAME is not callable"),
        ("json:dumps", "cannot be called with (config, tokenizer_dir, seed): too many positional arguments; name a"),
        ("builtins:max", "cannot be called with (config, tokenizer_dir, seed): no signature found for builtin"),
        ("types:SimpleNamespace", "cannot be called with (config, tokenizer_dir, seed): "),
        ("difflib:Match", "it made a Match, which is no environment: it has no decode, episode, fingerprint, "),
        (":factory", "give 'package.module:name'"),
    ],
)
def test_an_unknown_name_is_one_clear_problem(make_tokenizer, name, expected):
    (line,) = setup_problems(config(name), make_tokenizer())
    assert line.startswith(f"environment.name = {name!r}: ") and expected in line
    with pytest.raises(EnvironmentSetupError):
        make_environment(config(name), make_tokenizer(), 0)


def test_all_problems_are_reported(make_tokenizer, tmp_path):
    settings = config(options={"modulus": 0, "digitz": 1}, heldout=tmp_path / "none.jsonl")
    lines = setup_problems(settings, make_tokenizer("012345678"))
    assert len(lines) == 4
    for word in ("modulus", "digitz", "'9', '='", "none.jsonl: no such file"):
        assert any(word in line for line in lines), word


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def make(*_):\n    return {}['key']\n", "making it raised KeyError: 'key' ({file} line 2); correct it"),
        ("import sys\ndef make(*_):\n    sys.exit()\n", "making it raised SystemExit ({file} line 3); correct it"),
        (
            "class make:\n    def __init__(self, *_): pass\n    @property\n    def name(self): raise OSError('no')\n",
            "making it raised OSError: no ({file} line 4); correct it",
        ),
    ],
)
def test_a_factory_that_raises_is_one_problem_with_its_place(make_tokenizer, tmp_path, source, said):
    file = tmp_path / "own_factory.py"
    file.write_text(source)
    (line,) = setup_problems(config("own_factory:make", modules=tmp_path), make_tokenizer())
    assert line == "environment.name = 'own_factory:make': " + said.format(file=file)
