"""Rewards by name: built-ins and a user's functions, what they are called with, what they may return."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vcpo_megatron.environments.base import EnvironmentSetupError
from vcpo_megatron.environments.dataset.rewards import RewardError, Rewards, Score, make_rewards
from vcpo_megatron.environments.dataset.scoring import Answered

ROW = {"prompt": "2+2", "answer": "4", "level": 3, "source": "made"}
_NUMBER = itertools.count()


@pytest.fixture
def module(tmp_path: Path) -> Callable[[str], str]:
    """``module(source)`` writes a module of a name of its own into tmp_path and returns that."""

    def write(source: str) -> str:
        name = f"rewards_of_test_{next(_NUMBER)}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


def score(rewards: Rewards, response: str = "4", row: Any = ROW) -> Score:
    return asyncio.run(rewards.score(Answered(response, (7, 8), "stop", row.get("answer")), row))


def problems(given: Any, folder: Path | None = None, mapped: Any = ()) -> list[str]:
    with pytest.raises(EnvironmentSetupError) as caught:
        make_rewards(given, folder, mapped)
    return list(caught.value.problems)


def test_a_name_is_the_whole_reward() -> None:
    rewards = make_rewards("exact_match", None, [])
    assert rewards.fields == {"answer"}
    assert score(rewards) == Score(1.0) and score(rewards, "5") == Score(0.0)


def test_several_are_added_up_and_told_apart(tmp_path: Path, module: Callable[[str], str]) -> None:
    name = module("def half(response):\n    return {'reward': 0.5, 'info': {'seen': len(response)}}\n")
    given = [
        {"use": "number"},
        {"use": "length", "free": 0, "limit": 4, "weight": 2.0, "name": "short"},
        {"use": f"{name}:half", "weight": -1.0},
    ]
    rewards = make_rewards(given, tmp_path, [])
    assert score(rewards) == Score(1.0 - 1.0 - 0.5, {"number": 1.0, "short": -0.5, "half": 0.5, "half/seen": 1.0})


@pytest.mark.parametrize(
    ("parameters", "mapped", "arguments", "given", "fields"),
    [
        ("response", [], {}, {"response": "4"}, set()),
        ("prompt, answer", [], {}, {"prompt": "2+2", "answer": "4"}, {"answer"}),
        ("token_ids, finish_reason", [], {}, {"token_ids": (7, 8), "finish_reason": "stop"}, set()),
        ("answer, level", [], {}, {"answer": "4", "level": 3}, {"answer", "level"}),
        ("level=0", [], {}, {}, set()),  # a default value stays
        ("level=0", ["level"], {}, {"level": 3}, {"level"}),  # unless the field is asked for
        ("*, level, scale", [], {"scale": 2}, {"level": 3, "scale": 2}, {"level"}),
        (
            "**fields",
            ["answer", "source"],
            {"scale": 2},
            {"prompt": "2+2", "response": "4", "token_ids": (7, 8), "finish_reason": "stop"}
            | {"answer": "4", "source": "made", "scale": 2},
            {"answer", "source"},
        ),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_what_a_function_is_called_with(
    tmp_path: Path,
    module: Callable[[str], str],
    kind: str,
    parameters: str,
    mapped: list[str],
    arguments: dict[str, Any],
    given: dict[str, Any],
    fields: set[str],
) -> None:
    source = f"seen = []\n{kind} score({parameters}):\n    seen.append(dict(locals()))\n    return 1\n"
    name = module(source)
    rewards = make_rewards([{"use": f"{name}:score", "arguments": arguments}], tmp_path, mapped)
    assert rewards.fields == fields and score(rewards) == Score(1.0)
    (seen,) = __import__(name).seen
    assert (seen.get("fields", seen)) == (given if parameters != "level=0" or given else {"level": 0})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("True", Score(1.0)),
        ("numpy.float32(0.5)", Score(0.5)),
        ("numpy.array(2)", Score(2.0)),
        ("{'reward': numpy.int64(3), 'info': {'a': numpy.bool_(True)}}", Score(3.0, {"a": 1.0})),
        ("{'reward': 1}", Score(1.0)),
    ],
)
def test_what_it_may_return(tmp_path: Path, module: Callable[[str], str], value: str, expected: Score) -> None:
    name = module(f"import numpy\ndef score():\n    return {value}\n")
    found = score(make_rewards(f"{name}:score", tmp_path, []))
    assert found == expected and type(found.reward) is float
    assert all(type(number) is float for number in found.info.values())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("None", "returned None"),
        ("'1.0'", "returned '1.0'"),
        ("float('nan')", "returned nan"),
        ("[1.0]", "returned [1.0]"),
        ("numpy.array([1.0])", "returned array([1.])"),
        ("{'reward': None}", "returned reward None"),
        ("{'score': 1.0}", "returned a mapping with score"),
        ("{'reward': 1.0, 'info': 3}", "returned info 3"),
        ("{'reward': 1.0, 'info': {'a': None}}", "returned info a = None"),
        ("1 / 0", "raised ZeroDivisionError: division by zero"),
    ],
)
def test_what_it_may_not_return(tmp_path: Path, module: Callable[[str], str], value: str, said: str) -> None:
    assert np.float32  # the module below needs NumPy
    name = module(f"import numpy\ndef judge():\n    return {value}\n")
    with pytest.raises(RewardError) as caught:
        score(make_rewards(f"{name}:judge", tmp_path, []))
    assert f"reward 'judge' {said}" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "exact",
            "environment.options.reward: 'exact' is unknown; known are exact_match, number, math, format, length",
        ),
        ([], "environment.options.reward = []: give at least one reward"),
        ([{}], "environment.options.reward[0].use: missing"),
        ([{"use": "number", "wieght": 2}], "environment.options.reward[0].wieght: unknown key"),
        ([{"use": "number", "weight": "1"}], "environment.options.reward[0].weight = '1'"),
        ([{"use": "number", "weight": float("nan")}], "environment.options.reward[0].weight = nan"),
        ([{"use": "number", "arguments": {"a": 1}}], "environment.options.reward[0].arguments: only for your own"),
        ("format", "environment.options.reward.pattern: missing"),
        ([{"use": "format", "pattern": "("}], "environment.options.reward[0].pattern = '(': no regular expression"),
        ([{"use": "length", "free": 9, "limit": 1}], "environment.options.reward[0]: free = 9: must be below"),
        ([{"use": "number"}, {"use": "number"}], "environment.options.reward: two rewards are called 'number'"),
        ("no_such_module_here:score", "environment.options.reward = 'no_such_module_here:score': No module named"),
        ("math:pi", "environment.options.reward: math:pi is no function that can be called"),
        ("builtins:max", "environment.options.reward: builtins:max is no function that can be called"),
        ("operator:neg", "operator:neg has the positional parameter a; rewards are called with keywords alone"),
        ([{"use": "textwrap:dedent", "x": 1}], "environment.options.reward[0]: x is for arguments of textwrap:dedent"),
        ([{"use": "textwrap:dedent", "arguments": {"txt": 1}}], "textwrap:dedent has no parameter txt"),
    ],
)
def test_a_reward_that_cannot_be_made(given: Any, said: str) -> None:
    (line,) = problems(given)
    assert said in line and "\n" not in line


def test_all_problems_are_found_together() -> None:
    assert len(problems([{"use": "format"}, {"use": "sum"}, {"use": "number", "extract": "["}])) == 3
