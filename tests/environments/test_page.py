"""docs/environments.md: its example is run as it stands, and its table is what the code has."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pydantic import BaseModel
from tokenizers import Tokenizer

from tests.environments.in_process import play as play_in_process
from tests.environments.in_process import setup_problems
from vcpo_megatron.config.schema import EnvironmentConfig
from vcpo_megatron.environments import base, registry
from vcpo_megatron.environments.base import Environment
from vcpo_megatron.rollout.client.protocol import GenerateResult, SamplingParams, Span
from vcpo_megatron.types import Trajectory

TEXT = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
CHARACTERS = "".join(sorted({*"abcdefghijklmnopqrstuvwxyzTH0123456789 .?+-*\n"}))
PROBLEM = "2 bags of 34 nuts. How many?"


def block(language: str, holding: str) -> str:
    """The one block of code of the page in ``language`` that holds these words."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    (text,) = (text for text in found if holding in text)
    return text


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EnvironmentConfig:
    """What the page configures, with the module and the files beside it."""
    (tmp_path / "calculator.py").write_text(block("python", "# calculator.py"))
    (tmp_path / "train.jsonl").write_text(f'{{"problem": "{PROBLEM}", "answer": "68"}}\n')
    (tmp_path / "heldout.jsonl").write_text('{"problem": "3 bags of 5?", "answer": 15}\n')
    given = tomllib.loads(block("toml", "calculator:Calculator"))["environment"]
    return EnvironmentConfig(
        **{**given, "data": tmp_path / given["data"], "heldout": tmp_path / given["heldout"]}, modules=tmp_path
    )


def play(
    environment: Environment,
    *answers: str,
    heldout: int | None = None,
    encode: Callable[[str], Sequence[int]] | None = None,
) -> tuple[Trajectory, str]:
    """Trajectory of a policy that gives these answers, and all of its text."""
    left = list(answers)
    encoded = encode or environment.encode  # type: ignore[attr-defined]

    async def generate(tokens: Sequence[int], sampling: SamplingParams, rid: str) -> GenerateResult:
        ids = tuple(encoded(left.pop(0)))
        return GenerateResult(ids, (-0.5,) * len(ids), (Span(0, len(ids), "1.0"),), "stop")

    trajectory = asyncio.run(
        play_in_process(generate, environment, heldout=heldout, sampling=SamplingParams(max_new_tokens=32))
    )
    assert not left
    return trajectory, environment.decode(trajectory.tokens.tolist())


def test_the_example_of_the_page_runs(settings: EnvironmentConfig, make_tokenizer: Callable[[str], Path]) -> None:
    folder = make_tokenizer(CHARACTERS)
    environment = registry.make_environment(settings, folder, 0)

    trajectory, text = play(environment, "calc 2*34", "68")
    assert text == f"{PROBLEM}\ncalc 2*3468\n68" and trajectory.reward == 1.0 and trajectory.info == {"calls": 1.0}
    sampled = "".join(char for char, kept in zip(text, trajectory.loss_mask, strict=True) if kept)
    assert sampled == "calc 2*3468"  # the calculator's "68\n" is masked out
    assert play(environment, "68")[0].reward == 1.0
    assert play(environment, "calc 1-3", "calc 1+1", "calc 2*34")[0].reward == 0.0  # a third call is an answer
    assert play(environment, "calc 1-3", "calc 999999999*999999999")[0].reward == 0.0  # no room is left

    (held,) = environment.heldout()
    assert held.data["answer"] == 15  # a number
    assert play(environment, "15", heldout=0)[0].reward == 1.0
    assert environment.max_prompt_tokens == len(PROBLEM) + 1


def test_its_settings_are_checked_together(settings: EnvironmentConfig, make_tokenizer: Callable[[str], Path]) -> None:
    bad = settings.model_copy(update={"heldout": None, "options": {"max_call": 1}})
    problems = setup_problems(bad, make_tokenizer(CHARACTERS))
    assert len(problems) == 2 and "environment.options.max_call" in problems[0] and "both are needed" in problems[1]


@pytest.mark.parametrize(
    ("answers", "reward", "said"),
    [
        (["4</s>"], 1.0, "<s>user 2+2?</s><s>assistant [4</s>]"),
        (["5</s>", "4</s>"], 0.5, "[5</s>]<s>user No. Once more.</s><s>assistant [4</s>]"),
        (["5", "5</s>"], 0.0, "[5]</s><s>user No. Once more.</s><s>assistant [5</s>]"),  # cut off: the turn is ended
    ],
)
def test_the_two_turns_of_the_page_run(
    chat_folder: Path, monkeypatch: pytest.MonkeyPatch, answers: list[str], reward: float, said: str
) -> None:
    (chat_folder / "second_try.py").write_text(block("python", "# second_try.py"))
    settings = EnvironmentConfig(name="second_try:SecondTry", modules=chat_folder)
    environment = registry.make_environment(settings, chat_folder, 0)
    tokenizer = Tokenizer.from_file(str(chat_folder / "tokenizer.json"))
    trajectory, _ = play(
        environment, *answers, encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    )
    shown, before = "", False
    for token, sampled in zip(trajectory.tokens.tolist(), [*trajectory.loss_mask.tolist()], strict=True):
        shown += ("[" if sampled and not before else "]" if before and not sampled else "") + tokenizer.decode(
            [token], skip_special_tokens=False
        )
        before = sampled
    assert trajectory.reward == reward and f"{shown}]".endswith(said)


def test_the_reward_of_the_page_runs(chat_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (chat_folder / "rewards.py").write_text(block("python", "# rewards.py"))
    (chat_folder / "train.jsonl").write_text('{"prompt": "2+2?", "answer": "4", "level": 3}\n')
    given = re.search(r"reward = (\[.*\])$", block("python", "# rewards.py"), flags=re.MULTILINE)
    assert given
    environment = registry.make_environment(
        EnvironmentConfig(
            name="dataset",
            data=chat_folder / "train.jsonl",
            modules=chat_folder,
            options={"reward": tomllib.loads(f"reward = {given[1]}")["reward"]},
        ),
        chat_folder,
        0,
    )
    step = environment.episode(environment.train_example(0)).step
    assert asyncio.run(step(base.Action((1,), "It is 4", "stop"))) == base.Outcome(1.3, {"level": 3.0})


def test_the_data_set_of_the_page_is_configured_as_the_code_wants_it(tmp_path: Path) -> None:
    given = tomllib.loads(block("toml", 'name = "dataset"'))["environment"]
    problems = setup_problems(
        EnvironmentConfig(**{**given, "data": tmp_path / "a.parquet", "heldout": tmp_path / "b.parquet"}), tmp_path
    )
    assert all(any(word in line for word in ("no such file", "math-verify")) for line in problems) and problems


@pytest.mark.parametrize("record", [base.Action, base.Observation, base.Outcome, base.Example])
def test_every_field_of_the_records_is_listed(record: type) -> None:
    row = re.search(rf"^\| `{record.__name__}` \|.*$", TEXT, flags=re.MULTILINE)
    assert row and re.findall(r"`(\w+)`:", row[0]) == [field.name for field in dataclasses.fields(record)]


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_every_built_in_environment_is_in_the_table(name: str) -> None:
    row = re.search(rf"^\| `{name}` \|.*$", TEXT, flags=re.MULTILINE)
    assert row, f"docs/environments.md: add to the first table | `{name}` | TASK | `OPTION` (DEFAULT): MEANING |"
    module = importlib.import_module(registry.BUILT_IN[name].__module__)  # type: ignore[attr-defined]
    models = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, BaseModel)]
    (options,) = (model for model in models if model.__module__ == module.__name__)
    for option, field in options.model_fields.items():
        shown = f"`{field.default}`" if isinstance(field.default, str) else str(field.default)
        assert f"`{option}` ({shown})" in row[0], f"docs/environments.md, {name}: add `{option}` ({shown}): MEANING"
