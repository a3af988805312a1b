"""The modular sum: reward, prompts, and every problem of its settings."""

import asyncio
import json

import pytest

from tests.messages import assert_names, assert_said
from vcpo_megatron.config.schema import EnvironmentConfig
from vcpo_megatron.environments.base import Action, EnvironmentSetupError, Outcome
from vcpo_megatron.environments.modular_sum import ModularSum, draw_heldout, draw_prompt, read_prompts, write_prompts


def config(**values):
    return EnvironmentConfig(name="modular_sum", **values)


def problems(settings, folder):
    with pytest.raises(EnvironmentSetupError) as caught:
        ModularSum(settings, folder, 0)
    assert all("\n" not in line for line in caught.value.problems)
    return list(caught.value.problems)


def play(environment, example, answer):
    async def episode():
        episode = environment.episode(example)
        observation = await episode.reset()
        outcome = await episode.step(Action(tuple(answer), environment.decode(answer), "length"))
        await episode.close()
        return observation.token_ids, outcome

    return asyncio.run(asyncio.wait_for(episode(), 10))


def example_of(environment, prompt):
    return environment.heldout()[0].__class__("x", {"prompt": prompt})


def test_prompt_answer_and_reward_by_hand(make_tokenizer):
    environment = ModularSum(config(), make_tokenizer(), 0)  # the digit d has id 20 - d, "=" has 10
    example = example_of(environment, "31415926")  # sum 31
    right = [20 - digit for digit in (3, 4, 8, 9, 4, 3, 5, 1)]
    prompt, outcome = play(environment, example, right)
    assert prompt == tuple(20 - digit for digit in (3, 1, 4, 1, 5, 9, 2, 6)) + (10,)
    assert outcome == Outcome(1.0)
    assert environment.decode(right) == "34894351"
    assert environment.max_prompt_tokens == 9
    assert environment.sampling == {"ignore_eos": True, "max_new_tokens": 8}


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ([0, 0, 0, 0, 0, 0, 0, 1], 1.0),  # only the last token counts
        ([3, 4, 8, 9, 4, 3, 5, 2], 0.0),
        ([1], 0.0),  # too short, although it ends right
        ([3, 4, 8, 9, 4, 3, 1], 0.0),
        ([], 0.0),
    ],
)
def test_reward_of_other_answers(make_tokenizer, answer, reward):
    environment = ModularSum(config(), make_tokenizer(), 0)
    tokens = [20 - digit for digit in answer]
    assert play(environment, example_of(environment, "31415926"), tokens)[1].reward == reward


def test_the_modulus_and_the_number_of_digits_are_options(make_tokenizer):
    environment = ModularSum(config(options={"digits": 3, "modulus": 7}), make_tokenizer(), 0)
    example = example_of(environment, "995")  # 23 mod 7 = 2
    assert play(environment, example, [20, 20, 18])[1].reward == 1.0
    assert play(environment, example, [20, 20, 17])[1].reward == 0.0  # 23 mod 10
    assert len(environment.train_example(0).data["prompt"]) == 3


def test_training_examples_are_seeded_random_access_and_never_held_out(make_tokenizer):
    folder = make_tokenizer()
    settings = config(options={"digits": 3})
    environment = ModularSum(settings, folder, 5)
    forward = [environment.train_example(index) for index in range(3000)]
    again = ModularSum(settings, folder, 5)
    assert [again.train_example(index) for index in reversed(range(3000))] == forward[::-1]
    assert len({example.prompt_id for example in forward}) == 3000
    heldout = {example.data["prompt"] for example in environment.heldout()}
    drawn = {example.data["prompt"] for example in forward}
    assert len(heldout) == 500
    assert drawn.isdisjoint(heldout)
    assert len(drawn) > 450  # of the 500 that are left: nothing else is lost
    assert {draw_prompt("train/5", index, 3) for index in range(3000)} & heldout  # so something had to be drawn again
    other = ModularSum(settings, folder, 6)
    assert other.train_example(0).data != forward[0].data or other.train_example(1).data != forward[1].data


def test_generated_digits_are_uniform():
    counts = [0] * 10
    for index in range(5000):
        for digit in draw_prompt("train/0", index, 8):
            counts[int(digit)] += 1
    assert all(abs(count - 4000) < 5 * 60 for count in counts)  # five standard deviations


def test_the_generator_is_the_same_everywhere():
    assert [draw_prompt("train/0", index, 8) for index in range(3)] == ["29892301", "20425374", "55148420"]


def test_heldout_of_few_digits_leaves_something_to_train_on(make_tokenizer):
    environment = ModularSum(config(options={"digits": 1}), make_tokenizer(), 0)
    heldout = {example.data["prompt"] for example in environment.heldout()}
    assert len(heldout) == 5
    assert {environment.train_example(index).data["prompt"] for index in range(200)} == set("0123456789") - heldout


def test_prompts_of_files(make_tokenizer, tmp_path):
    data, heldout = tmp_path / "data.jsonl", tmp_path / "heldout.jsonl"
    data.write_text("".join(json.dumps({"question": text}) + "\n" for text in ("11111111", "22222222", "33333333")))
    heldout.write_text('{"question": "44444444"}\n')
    fields = {"prompt": "question"}
    environment = ModularSum(config(data=data, heldout=heldout, fields=fields), make_tokenizer(), 0)
    epochs = [[environment.train_example(3 * epoch + i) for i in range(3)] for epoch in range(4)]
    for epoch in epochs:
        assert sorted(example.data["prompt"] for example in epoch) == ["11111111", "22222222", "33333333"]
    assert len({example.prompt_id for epoch in epochs for example in epoch}) == 12  # an epoch's ids are its own
    assert [example.data["prompt"] for example in environment.heldout()] == ["44444444"]


def test_files_that_name_a_field_differently_are_told_so(make_tokenizer, tmp_path):
    data, heldout = tmp_path / "data.jsonl", tmp_path / "heldout.jsonl"
    data.write_text('{"question": "11111111"}\n')
    write_prompts(heldout, ["44444444"])
    (line,) = problems(config(data=data, heldout=heldout), make_tokenizer())
    assert_said("fields of a data set", "field is missing", line, file=data)
    (line,) = problems(config(data=data, heldout=heldout, fields={"prompt": "question"}), make_tokenizer())
    assert_said("fields of a data set", "field is named otherwise in the other file", line, file=heldout)


def test_written_prompts_are_read_back(tmp_path):
    path = tmp_path / "prompts.jsonl"
    write_prompts(path, draw_heldout(0, 8))
    assert read_prompts(path, 8) == draw_heldout(0, 8)
    assert len(set(draw_heldout(0, 8))) == 512


def test_the_fingerprint_follows_everything_an_example_depends_on(make_tokenizer, tmp_path):
    folder = make_tokenizer()
    heldout, data = tmp_path / "heldout.jsonl", tmp_path / "data.jsonl"
    write_prompts(heldout, ["12345678"])
    write_prompts(data, ["87654321"])
    settings = [config(), config(options={"modulus": 9}), config(heldout=heldout), config(data=data)]
    prints = [ModularSum(setting, folder, 0).fingerprint for setting in settings]
    prints.append(ModularSum(config(), folder, 1).fingerprint)
    prints.append(ModularSum(config(heldout=heldout), folder, 1).fingerprint)
    write_prompts(data, ["87654322"])
    prints.append(ModularSum(config(data=data), folder, 0).fingerprint)
    assert len(set(prints)) == len(prints)
    assert ModularSum(config(), folder, 0).fingerprint == prints[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"digit": 8}, "environment.options.digit: unknown key; did you mean environment.options.digits? (options"),
        ({"zzz": 8}, "environment.options.zzz: unknown key (options"),
        ({"digits": 0}, "environment.options.digits = 0"),
        ({"digits": "8"}, "environment.options.digits = '8'"),
        ({"digits": True}, "environment.options.digits = True"),
        ({"modulus": 1}, "environment.options.modulus = 1"),
        ({"modulus": 11}, "environment.options.modulus = 11"),
    ],
)
def test_bad_options_are_named_with_their_value(make_tokenizer, options, expected):
    (line,) = problems(config(options=options), make_tokenizer())
    assert line.startswith(expected) and "digits, modulus" in line


def test_tokenizer_problems(make_tokenizer, tmp_path):
    (line,) = problems(config(), make_tokenizer("01234568"))
    assert "tokenizer.json: no single token for '7', '9', '='" in line
    (line,) = problems(config(), tmp_path / "nowhere")
    assert "nowhere/tokenizer.json: no such file" in line
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (line,) = problems(config(), tmp_path / "model")
    assert "not a tokenizer" in line


@pytest.mark.parametrize("prompt", ["1234567", "123456789", "1234567x", "١٢٣٤٥٦٧٨", 12345678])
def test_a_bad_prompt_names_file_and_line(make_tokenizer, tmp_path, prompt):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "12345678"}\n' + json.dumps({"prompt": prompt}) + "\n")
    (line,) = problems(config(data=path), make_tokenizer())
    assert_names(line, f"{path}: line 2: prompt {prompt!r}", "8 digits")


def test_heldout_must_be_distinct_disjoint_from_the_data_and_not_everything(make_tokenizer, tmp_path):
    folder = make_tokenizer()
    data, heldout = tmp_path / "data.jsonl", tmp_path / "heldout.jsonl"
    write_prompts(heldout, ["12345678", "11111111", "12345678"])
    (line,) = problems(config(heldout=heldout), folder)
    assert line.startswith(f"{heldout}: prompt '12345678' occurs more than once")
    write_prompts(heldout, ["12345678", "11111111"])
    write_prompts(data, ["22222222", "11111111"])
    (line,) = problems(config(heldout=heldout, data=data), folder)
    assert_names(line, f"{data}: 1 prompt(s)", "'11111111'")
    write_prompts(heldout, "0123456789")
    (line,) = problems(config(heldout=heldout, options={"digits": 1}), folder)
    assert "none is left to train on" in line


def test_all_problems_come_together(make_tokenizer, tmp_path):
    settings = config(options={"modulus": 0}, heldout=tmp_path / "a.jsonl", data=tmp_path / "b.jsonl")
    lines = problems(settings, tmp_path / "nowhere")
    assert [any(word in line for line in lines) for word in ("modulus", "tokenizer.json", "a.jsonl", "b.jsonl")] == [
        True
    ] * 4
    assert len(lines) == 4
