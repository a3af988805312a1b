"""The environment "dataset": files in, prompts and rewards out, and a split that holds."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.environments.in_process import setup_problems
from tests.messages import assert_names
from vcpo_megatron.config.schema import EnvironmentConfig
from vcpo_megatron.environments.base import Action, EnvironmentSetupError, Example, Outcome
from vcpo_megatron.environments.dataset.environment import Dataset

USER = {"role": "user", "content": "1+1"}
ROWS = [{"prompt": f"{number}+1", "answer": str(number + 1)} for number in range(20)]


def write(path: Path, rows: Sequence[Any]) -> Path:
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(folder: Path, rows: Sequence[Any] = ROWS, held: Sequence[Any] | None = None, **given: Any) -> Any:
    """``environment`` with ``rows`` in a file, ``held`` in another; what is no key of it is an option."""
    suffix = given.pop("suffix", "jsonl")
    keys = {name: given.pop(name) for name in ("fields", "modules") if name in given}
    heldout = write(folder / f"heldout.{suffix}", held) if held is not None else None
    data = write(folder / f"train.{suffix}", rows)
    return EnvironmentConfig(name="dataset", data=data, heldout=heldout, options=given, **keys)


def make(folder: Path, *args: Any, seed: int = 0, **given: Any) -> Dataset:
    return Dataset(settings(folder, *args, **given), folder, seed)


def shown(environment: Dataset, example: Example) -> str:
    observation = asyncio.run(environment.episode(example).reset())
    return environment._writer.tokenizer.decode(list(observation.token_ids), skip_special_tokens=False)


def outcome(environment: Dataset, example: Example, text: str) -> Outcome:
    return asyncio.run(environment.episode(example).step(Action((1, 2), text, "stop")))


def problem(folder: Path, *args: Any, **given: Any) -> str:
    with pytest.raises(EnvironmentSetupError) as caught:
        make(folder, *args, **given)
    (line,) = caught.value.problems
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("prompt", "options", "text"),
    [
        ("1+1", {}, "<s>user 1+1</s><s>assistant "),
        ("1+1", {"system": "Add."}, "<s>system Add.</s><s>user 1+1</s><s>assistant "),
        ("1+1", {"text": "{prompt} = {x}?"}, "<s>user 1+1 = {x}?</s><s>assistant "),
        ("1+1", {"chat": False, "text": "Q: {prompt} A:"}, "Q: 1+1 A:"),
        ([USER], {}, "<s>user 1+1</s><s>assistant "),
        (
            [{"role": "system", "content": "Subtract."}, USER],
            {"system": "Add."},
            "<s>system Add.</s><s>user 1+1</s><s>assistant ",
        ),
        (
            [USER, {"role": "assistant", "content": "2"}, {"role": "user", "content": "and 1?"}],
            {},
            "<s>user 1+1</s><s>assistant 2</s><s>user and 1?</s><s>assistant ",
        ),
    ],
)
def test_how_a_prompt_is_written(chat_folder: Path, prompt: Any, options: dict[str, Any], text: str) -> None:
    environment = make(chat_folder, [{"prompt": prompt, "answer": "2"}], **options)
    example = environment.train_example(0)
    assert shown(environment, example) == text
    assert environment.max_prompt_tokens == len(asyncio.run(environment.episode(example).reset()).token_ids)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_data_set_of_verl_needs_a_mapping_alone(chat_folder: Path, suffix: str) -> None:
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{number} + 1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"split": "train", "index": number},
        }
        for number in (1, 2)
    ]
    fields = {"answer": "reward_model.ground_truth"}
    environment = make(chat_folder, rows, [rows[1]], suffix=suffix, fields=fields, reward="number")
    example = environment.train_example(0)  # the other row is held out
    assert shown(environment, example) == "<s>user 1 + 1?</s><s>assistant "
    assert outcome(environment, example, "1 + 1 = 2").reward == 1.0
    assert outcome(environment, *environment.heldout(), "2 + 1 = 2").reward == 0.0


def test_a_row_reaches_your_own_function(chat_folder: Path) -> None:
    (chat_folder / "level_reward.py").write_text(
        "async def score(prompt, response, answer, level, **_):\n"
        "    return {'reward': level * (response == answer), 'info': {'asked': len(prompt)}}\n"
    )
    rows = [{"question": "1+1", "answer": "2", "info": {"level": 3}}]
    environment = make(
        chat_folder,
        rows,
        fields={"prompt": "question", "level": "info.level"},
        reward="level_reward:score",
        modules=chat_folder,
    )
    assert outcome(environment, environment.train_example(0), "2") == Outcome(3.0, {"asked": 3.0})
    assert outcome(environment, environment.train_example(0), "3") == Outcome(0.0, {"asked": 3.0})


def test_every_row_comes_once_an_epoch_under_its_number(chat_folder: Path) -> None:
    environment = make(chat_folder)
    assert {environment.train_example(index).prompt_id for index in range(20)} == {f"train/0/{n}" for n in range(20)}
    assert environment.train_example(25) == make(chat_folder).train_example(25)
    for index in (0, 7):
        example = environment.train_example(index)
        number = int(example.prompt_id.rpartition("/")[2])
        assert outcome(environment, example, str(number + 1)).reward == 1.0


def test_a_share_is_held_out_by_prompt(chat_folder: Path) -> None:
    rows = [*ROWS, *ROWS[:10]]  # ten prompts twice
    environment = make(chat_folder, rows, heldout_share=0.25)
    held = {ROWS[int(example.prompt_id.rpartition("/")[2])]["prompt"] for example in environment.heldout()}
    trained = {shown(environment, environment.train_example(index)) for index in range(len(rows))}
    assert len(held) == len(environment.heldout()) == 5 and len(trained) == 15
    assert not any(f"<s>user {prompt}</s>" in text for prompt in held for text in trained)
    again = {example.prompt_id for example in make(chat_folder, rows, heldout_share=0.25).heldout()}
    other = {example.prompt_id for example in make(chat_folder, rows, heldout_share=0.25, seed=1).heldout()}
    assert again == {example.prompt_id for example in environment.heldout()} != other


def test_what_the_held_out_file_has_is_not_trained(chat_folder: Path) -> None:
    environment = make(chat_folder, ROWS, ROWS[3:5])
    trained = {environment.train_example(index).prompt_id for index in range(18)}
    assert trained == {f"train/0/{number}" for number in range(20) if number not in (3, 4)}
    (note,) = environment.notes
    assert_names(note, f"{chat_folder}/train.jsonl: 2 of 20 rows", "held out")
    assert "no row is left to train on" in problem(chat_folder, ROWS, ROWS)


def test_long_prompts_are_left_out(chat_folder: Path) -> None:
    limit = len("user 1+1assistant ") + 3
    environment = make(chat_folder, ROWS, [ROWS[11], {"prompt": "1+7", "answer": 8}], max_prompt_tokens=limit)
    assert {environment.train_example(index).prompt_id for index in range(10)} == {f"train/0/{n}" for n in range(10)}
    assert environment.max_prompt_tokens == limit and len(environment.heldout()) == 1
    assert [note.split(": ")[1] for note in environment.notes] == [
        "10 of 20 prompts are left out",
        "1 of 2 prompts are left out",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [*ROWS[:-1], {"prompt": "0", "answer": "0"}]},
        {"rows": [*ROWS[:-1], {**ROWS[-1], "answer": "0"}]},
        {"system": "Add."},
        {"seed": 1},
        {"held": ROWS[:1]},
    ],
)
def test_the_fingerprint_follows_what_an_index_gives(chat_folder: Path, change: dict[str, Any]) -> None:
    before = make(chat_folder).fingerprint
    assert make(chat_folder).fingerprint == before
    assert make(chat_folder, change.pop("rows", ROWS), change.pop("held", None), **change).fingerprint != before


@pytest.mark.parametrize(
    ("row", "options", "said"),
    [
        ({"prompt": 5, "answer": "2"}, {}, "line 2: the prompt is 5; give a text or a list of messages"),
        ({"prompt": [], "answer": "2"}, {}, "line 2: its prompt ends with nothing"),
        ({"prompt": [{"role": "user"}], "answer": "2"}, {}, "line 2: message 0 of its prompt is {'role': 'user'}"),
        ({"prompt": ["1+1"], "answer": "2"}, {}, "line 2: message 0 of its prompt is '1+1'"),
        (
            {"prompt": [USER, {"role": "assistant", "content": "2"}], "answer": "2"},
            {},
            "line 2: its prompt ends with an answer of the assistant",
        ),
        ({"prompt": [USER], "answer": "2"}, {"text": "{prompt}?"}, "line 2: the prompt is a list of messages"),
        ({"prompt": [USER], "answer": "2"}, {"chat": False}, "line 2: the prompt is no text"),
        ({"prompt": "\ud83d", "answer": "2"}, {}, "line 2: "),
        ({"prompt": "x", "answer": {"a": 1}}, {}, "line 2: the reference answer {'a': 1} is no text"),
        ({"prompt": "x", "answer": "two"}, {"reward": "number"}, "line 2: the reference answer 'two' holds no number"),
        ({"prompt": "x"}, {}, "line 2: field 'answer' is missing or null"),
    ],
)
def test_a_bad_row_is_named(chat_folder: Path, row: Any, options: dict[str, Any], said: str) -> None:
    assert problem(chat_folder, [ROWS[0], row], **options).startswith(f"{chat_folder}/train.jsonl: {said}")


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    ("prompt", "said"),
    [("1?", "its prompt cannot be written (Exception: WordLevel error"), ("", "its prompt, '', has no tokens")],
)
def test_a_row_without_usable_tokens_is_named(
    make_tokenizer: Callable[[str], Path], place: int, prompt: str, said: str
) -> None:
    folder = make_tokenizer("0123456789+=")
    rows = [*ROWS[:2]]
    rows.insert(place, {"prompt": prompt, "answer": "2"})
    assert problem(folder, rows, chat=False).startswith(f"{folder}/train.jsonl: line {place + 1}: {said}")
    held = problem(folder, ROWS, rows, chat=False)
    assert held.startswith(f"{folder}/heldout.jsonl: line {place + 1}: {said}")


@pytest.mark.parametrize(
    "extra", [datetime.datetime(2026, 1, 2), datetime.date(2026, 1, 2), decimal.Decimal("1.5"), b"\xff"]
)
def test_messages_may_hold_whatever_a_parquet_file_has(chat_folder: Path, extra: Any) -> None:
    rows = [{"prompt": [{**USER, "content": str(n), "at": extra}], "answer": "2"} for n in (1, 2, 2, 3)]
    environment = make(chat_folder, rows, rows[1:2], suffix="parquet")
    names = {environment.train_example(index).prompt_id for index in range(2)}
    assert names == {"train/0/0", "train/0/3"}  # rows of the prompt that is held out are found


@pytest.mark.parametrize("answer", [1.0, "two", ["?", "2"]])
def test_a_reference_that_the_tokenizer_cannot_write_has_no_tokens(
    make_tokenizer: Callable[[str], Path], answer: Any
) -> None:
    environment = make(make_tokenizer("0123456789+="), [{"prompt": "1+1", "answer": answer}], chat=False)
    assert environment.reference(environment.train_example(0)) == ()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"text": "{question}"}, "environment.options.text = '{question}': must hold {prompt}"),
        ({"chat": False, "system": "Add."}, "environment.options.system: plain text has no system prompt"),
        ({"heldout_share": 1.0}, "environment.options.heldout_share = 1.0"),
        ({"rewards": "number"}, "environment.options.rewards: unknown key; did you mean environment.options.reward?"),
        ({"fields": {"token_ids": "x"}}, "environment.fields.token_ids: rewards get the policy's own under this name"),
        ({"fields": {"promt": "x"}}, "environment.fields names 'promt', which this environment does not read"),
        ({"reward": "exact"}, "environment.options.reward: 'exact' is unknown"),
    ],
)
def test_a_bad_setting_is_named(chat_folder: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(EnvironmentSetupError) as caught:
        make(chat_folder, **options)
    assert any(line.startswith(said) for line in caught.value.problems)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reward": 5}, "environment.options.reward = 5: give a reward's name"),
        ({"reward": ["number"]}, "environment.options.reward = ['number']: give a reward's name"),
        ({"reward": {"use": "number"}}, "environment.options.reward = {'use': 'number'}: give a reward's name"),
        ({"held": ROWS[:1], "fields": {"promt": "x"}}, "environment.fields names 'promt'"),
        ({"held": ROWS[:1], "fields": {"promt": "x", "anser": "y"}}, "environment.fields names 'anser', 'promt'"),
    ],
)
def test_a_bad_setting_is_one_line(chat_folder: Path, options: dict[str, Any], said: str) -> None:
    assert problem(chat_folder, **options).startswith(said)


def test_all_problems_are_found_together(chat_folder: Path) -> None:
    (chat_folder / "tokenizer_config.json").write_text("{}")
    given = settings(chat_folder, ROWS, ROWS, heldout_share=0.1, reward="exact")
    lines = setup_problems(given.model_copy(update={"data": None}), chat_folder)
    for word in ("options.heldout_share", "environment.data: missing", "no chat template", "'exact' is unknown"):
        assert any(word in line for line in lines), word


def test_the_reference_answer_as_tokens(chat_folder: Path, make_tokenizer: Callable[[str], Path]) -> None:
    environment = make(chat_folder, [{"prompt": "1+1", "answer": ["2", "two"]}])
    assert environment.decode(environment.reference(environment.train_example(0))) == "2"
