"""What is found of an environment before a run: what it says of itself, and what playing it shows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.environments.in_process import InProcess
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.environments.base import Action, Example, Observation, Outcome
from vcpo_megatron.environments.client import Description, Prompt
from vcpo_megatron.orchestrator.modes import environment_check
from vcpo_megatron.orchestrator.modes.environment_check import (
    Examination,
    Model,
    PlayedEpisode,
    ask_and_play,
    check_environment,
    description_problems,
)
from vcpo_megatron.run.tasks import RunError, run_beside

HELD_OUT = (Prompt("heldout/0", "heldout", 0), Prompt("heldout/1", "heldout", 1))
MODEL = Model(vocab_size=12, context_length=64, allowed=tuple(range(10)), stops=(11,))


def run_config(model: Path = Path("/model"), **sections: Any) -> RunConfig:
    given: dict[str, Any] = {
        "model": {"path": model},
        "train": {"steps": 1, "groups_per_step": 2, "group_size": 4},
        "rollout": {"max_new_tokens": 8},
        "environment": {"name": "mine"},
    }
    return RunConfig.model_validate({name: given.get(name, {}) | sections.get(name, {}) for name in given | sections})


def said(
    sampling: Mapping[str, Any] = {}, *, heldout: Sequence[Prompt] = HELD_OUT, longest: int = 9, **sections: Any
) -> list[str]:
    description = Description("mine", "f", sampling, longest, tuple(heldout))
    return list(description_problems(description, run_config(**sections), 12, 64))


@pytest.mark.parametrize(
    ("problems", "expected"),
    [
        (said({"max_tokens": 8}), "sampling has 'max_tokens', which is unknown; did you mean max_new_tokens?"),
        (said({"stop_tokens": (1,)}), "sampling has 'stop_tokens', which is unknown; did you mean stop_token_ids?"),
        (said({"n": 4}), "sampling has 'n', which is unknown; known are max_new_tokens, temperature,"),
        (said({"max_new_tokens": 2.5}), "sampling: max_new_tokens = 2.5: expected an integer"),
        (said({"ignore_eos": 1}), "sampling: ignore_eos = 1: expected true or false"),
        (said({"top_p": 0.9}), "sampling: top_p = 0.9, min_p = 0.0: need a top_k"),
        (said({"stop_token_ids": (3, 12)}), "sampling has the stop token 12, and the model's vocab_size is 12"),
        (said({"max_new_tokens": 9}), "rollout.max_new_tokens = 8 cuts them off; raise it to 9"),
        (
            said({"top_k": 20}, rollout={"max_new_tokens": 8, "router": "http://router:1"}),
            "rollout.router: the environment samples with top_k",
        ),
        (said(longest=64), "a prompt of 64 tokens and an answer of 1 exceed the model's context of 64"),
        (said({"max_new_tokens": 8}, longest=57), "a prompt of 57 tokens and an answer of 8 exceed"),
        (said(heldout=()), "it has no held-out prompts, and train.eval_every = 20 evaluates on them"),
        (
            said(heldout=(HELD_OUT[0], Prompt("heldout/0", "heldout", 1))),
            "prompts 0 and 1 of heldout have one prompt_id, 'heldout/0'",
        ),
    ],
)
def test_what_an_environment_says_of_itself(problems: list[str], expected: str) -> None:
    (line,) = problems
    assert line.startswith("environment mine: ") and expected in line


def test_what_fits_is_no_problem() -> None:
    assert said({"max_new_tokens": 8, "ignore_eos": True, "stop_token_ids": (11,)}, longest=56) == []
    train = {"steps": 1, "groups_per_step": 2, "group_size": 4, "eval_every": 0}
    assert said(heldout=(), train=train) == []


class Task:
    """Two turns: a prompt of the digit that is the index, an observation, and the reward of a right answer."""

    name = "mine"
    fingerprint = "f"
    sampling: Mapping[str, Any] = {}
    max_prompt_tokens = 2

    def train_example(self, index: int) -> Example:
        return Example(f"train/{index}", {"digit": index % 10})

    def heldout(self) -> list[Example]:
        return [Example("heldout/0", {"digit": 5})]

    def episode(self, example: Example) -> Task:
        self.digit, self.turns = example.data["digit"], 0
        return self

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(str, token_ids))

    async def reset(self) -> Any:
        return Observation((self.digit, 10))

    async def step(self, action: Action) -> Any:
        self.turns += 1
        if self.turns == 1 and action.token_ids:
            return Observation((10, 10))
        return Outcome(float(self.turns))

    async def close(self) -> None:
        pass


class WithReference(Task):
    def reference(self, example: Example) -> tuple[int, ...]:
        return (example.data["digit"],) * 2


def examine(
    task: Any, episodes: int = 1, note: Callable[[str], None] = lambda text: None
) -> tuple[list[str], list[PlayedEpisode]]:
    played: list[PlayedEpisode] = []

    async def run() -> list[str]:
        client = InProcess(task)
        try:
            work = ask_and_play(run_config(), MODEL, Examination(episodes, played.append, note), client)
            return await run_beside(work, client.supervise())
        finally:
            await client.stop()

    return asyncio.run(run()), played


def test_episodes_are_played_and_told() -> None:
    problems, played = examine(Task(), episodes=2)
    assert problems == [] and [episode.prompt.prompt_id for episode in played] == ["train/0", "train/1", "heldout/0"]
    assert {(episode.policy, episode.reward, episode.failure) for episode in played} == {("random tokens", 2.0, None)}
    for digit, episode in zip((0, 1, 5), played, strict=True):
        (prompt, asked, _), (first, answer, reason), *rest = episode.pieces()
        assert (prompt, asked, first, reason) == ("prompt", (digit, 10), "answer", "stop") and answer[-1] == 11
        assert [name for name, _, _ in rest] in ([], ["observation", "answer"])
        assert all(token < 12 for _, tokens, _ in episode.pieces() for token in tokens)
    assert examine(Task(), episodes=2) == (problems, played)  # a function of the seed


def test_as_many_episodes_are_played_as_were_asked_for() -> None:
    _, played = examine(Task(), episodes=11)
    trained = [episode.prompt.prompt_id for episode in played if episode.prompt.prompt_id.startswith("train/")]
    assert trained == [f"train/{index}" for index in range(11)]


def test_the_reference_answer_is_played_too() -> None:
    problems, played = examine(WithReference())
    assert problems == []
    assert [(episode.prompt.prompt_id, episode.policy) for episode in played] == [
        ("train/0", "random tokens"),
        ("train/0", "the reference answer"),
        ("heldout/0", "random tokens"),
        ("heldout/0", "the reference answer"),
    ]
    assert played[3].exchanges[0].answer == (5, 5, 11)


@pytest.mark.parametrize(
    ("length", "sampling", "limit"),
    [
        (8, {}, None),
        (9, {}, "rollout.max_new_tokens = 8"),
        (8, {"max_new_tokens": 7}, "max_new_tokens = 7 of its sampling"),
    ],
)
def test_a_reference_answer_that_would_be_cut_off_is_said_once(
    length: int, sampling: dict[str, Any], limit: str | None
) -> None:
    said: list[str] = []
    task = broken(reference=lambda self, example: (1,) * length, sampling=sampling)
    assert examine(task, 1, said.append)[0] == []
    start = f"environment mine, prompt train/0: its reference answer has {length} tokens, and {limit} cuts answers off"
    assert [line.startswith(start) for line in said] == ([] if limit is None else [True])


def broken(**methods: Any) -> Task:
    return type("Broken", (Task,), methods)()


async def returns(value: Any) -> Any:
    return value


def fail(*_: Any) -> Any:
    raise KeyError("column")


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (
            broken(step=lambda self, action: Outcome(1.0)),
            "step returned Outcome(reward=1.0, info={}) and is no coroutine; declare it with `async def`",
        ),
        (
            broken(reset=lambda self: Observation((1,))),
            "reset returned Observation(token_ids=(1,)) and is no coroutine",
        ),
        (broken(close=lambda self: None), "close returned None and is no coroutine; declare it with `async def`"),
        (broken(reset=lambda self: returns(Observation((3, 12)))), "token 12 at position 1 of its prompt is none of"),
        (
            broken(step=lambda self, action: returns(Observation((99,)))),
            "of its sequence with its observations is none of the model's",
        ),
        (broken(train_example=fail), "train_example raised KeyError: 'column'"),
        (
            broken(train_example=lambda self, index: Example("same", {"digit": 1})),
            "prompts 0 and 1 of train_example have one prompt_id, 'same'",
        ),
        (
            broken(train_example=lambda self, index: Example(f"heldout/{index}", {"digit": 1})),
            "the prompt_id 'heldout/0' is that of a training and of a held-out prompt",
        ),
        (broken(episode=fail), "prompt train/0, sample 0/0: episode raised KeyError: 'column'"),
        (broken(step=lambda self, action: returns(Outcome(None))), "step returned reward None"),  # type: ignore[arg-type]
        (broken(step=lambda self, action: returns(3)), "step returned 3, neither an Observation nor an Outcome"),
        (broken(decode=lambda self, ids: None), "decode returned None, not text"),
        (broken(reset=lambda self: returns(Observation((1,) * 64))), "leaves no room for an answer"),
    ],
)
def test_what_playing_shows(task: Task, expected: str) -> None:
    try:
        problems, _ = examine(task)
    except RunError as error:
        problems = [str(error)]
    assert any(expected in line for line in problems)
    assert all(line.startswith("environment mine") and "\n" not in line for line in problems)


SOURCES = {
    "exit": ("import sys\nsys.exit(3)\n", "importing {name} raised SystemExit: 3"),
    "killed": ("import os\nos._exit(3)\n", "while it made the environment"),
    "hangs": ("import time\ntime.sleep(60)\n", "within 3 s (launch.timeout_s)"),
    "sampling": (
        "import types\n\ndef Mine(*_):\n    return types.SimpleNamespace(name='mine', fingerprint='f', sampling=None,\n"
        "        max_prompt_tokens=1, train_example=print, heldout=list, episode=print, decode=print)\n",
        "sampling = None: give a mapping of sampling parameters",
    ),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_user_s_code_never_takes_the_check_down(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """In a process of its own, as a run has it."""
    source, expected = SOURCES[kind]
    name = f"checked_{kind}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setattr(environment_check.tempfile, "tempdir", str(tmp_path))
    config = run_config(
        model_folder,
        environment={"name": f"{name}:Mine", "modules": tmp_path},
        launch={"timeout_s": 3.0 if kind == "hangs" else 60.0},
    )
    (line,) = check_environment(config, Examination(1))
    assert line.startswith(f"environment.name = '{name}:Mine': ") or line.startswith("environment 'mine'")
    assert expected.format(name=name) in line and "\n" not in line
    logs = list(tmp_path.glob("vcpo-environment-*"))
    assert bool(logs) == (str(tmp_path / "vcpo-environment-") in line)  # what is named is there, and nothing else
