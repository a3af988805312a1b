"""Tokens of chosen trajectories: text is only shown, characters of several tokens are whole, colours are theirs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.messages import assert_names
from vcpo_megatron.report.runs import ReportedRun
from vcpo_megatron.report.samples import ChosenSample, Decoder, sample_html, shown
from vcpo_megatron.run.directory import RunDirectory
from vcpo_megatron.types import PolicyVersion, Trajectory, Turn, VersionSpan


def decoder_of(folder: Path, tokenizer: Tokenizer) -> Decoder:
    tokenizer.save(str(folder / "tokenizer.json"))
    return Decoder(ReportedRun("run", RunDirectory(folder), [], {"model.path": json.dumps(str(folder))}, None))


@pytest.fixture
def words(tmp_path: Path) -> Decoder:
    """Each token is a text that would be obeyed."""
    texts = ["<script>", "</pre>", "&amp;", "\x1b[2J", "a\nb", "\u202e", "q", "[UNK]"]
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.Fuse()
    return decoder_of(tmp_path, tokenizer)


@pytest.fixture
def bytewise(tmp_path: Path) -> Decoder:
    """Each token is one byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return decoder_of(tmp_path, tokenizer)


def sample(
    prompt: list[int], answers: list[list[int]], log_ratio: float | None = 0.0, observed: int = 0
) -> ChosenSample:
    """A trajectory of these tokens, each answer by a version of its own, ``observed`` tokens "q" between them."""
    tokens, turns, mask = list(prompt), [], [False] * len(prompt)
    for number, answer in enumerate(answers):
        start = len(tokens)
        tokens += answer
        mask += [True] * len(answer)
        turns.append(Turn(start, len(tokens), "stop", (VersionSpan(start, len(tokens), PolicyVersion(1, number)),)))
        tokens += [6] * observed
        mask += [False] * observed
    logprobs = np.where(mask, math.log(0.7), 0.0).astype(np.float32)
    trajectory = Trajectory(
        3, 1, "p<3>", len(prompt), np.array(tokens, np.int32), np.array(mask), logprobs, tuple(turns), 1.0
    )
    row: dict[str, Any] = {"prompt_id": "p<3>", "reward": 1.0, "staleness": 2, "weight": 4.0, "log_ratio": log_ratio}
    return ChosenSample("largest & best", {**row, "grad_norm": None, "baseline": 0.5}, trajectory)


def test_no_token_is_obeyed(words: Decoder) -> None:
    text = sample_html(sample([0, 1], [[0, 1, 2, 3, 4, 5]], observed=2), words, 100)
    assert "<script" not in text and text.count("</pre>") == 1 and not {"\x1b", "\u202e"} & set(text)
    assert '<span class="prompt">&lt;script&gt;&lt;/pre&gt;</span>' in text
    assert '<i class="v0 p1">&amp;amp;</i>' in text and "a⏎\nb" in text and "p&lt;3&gt;, sample 3/1" in text
    assert '<span class="observation">qq</span>' in text and "largest &amp; best" in text


def test_versions_and_weights(words: Decoder) -> None:
    text = sample_html(sample([6], [[6], [6]], log_ratio=math.log(4.0)), words, 100)
    assert 'class="sample w10"' in text  # two bins a factor of two, from 6
    assert text.count('<i class="v0 p1">q</i>') == text.count('<i class="v1 p1">q</i>') == 1
    assert_names(text, "weight", "4")
    for log_ratio, number in ((None, 6), (-99.0, 0), (99.0, 12), (math.inf, 12), (math.nan, 6)):
        assert f'class="sample w{number}"' in sample_html(sample([6], [[6]], log_ratio=log_ratio), words, 100)


def test_long_answers_are_cut_and_say_so(words: Decoder) -> None:
    text = sample_html(sample([6] * 30, [[6] * 50]), words, 10)
    assert text.count("<i ") - text.count('<i class="v0">') == 10
    assert "20 tokens … " in text and "… 40 more tokens" in text


def test_a_character_of_several_tokens_is_whole(bytewise: Decoder) -> None:
    text = "aé€😀b"
    letters = {chr_: i for i, chr_ in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = bytewise._tokenizer
    assert tokenizer is not None and len(letters) == 256
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert bytewise.pieces(ids) == [(1, "a"), (2, "é"), (3, "€"), (4, "😀"), (1, "b")]
    assert sum(count for count, _ in bytewise.pieces(ids[:-2])) == len(ids) - 2  # cut within a character
    rest, (lead, tail) = tokenizer.encode("é").ids[1], tokenizer.encode("é").ids
    assert bytewise.pieces([rest, rest, rest, lead, tail]) == [(4, "\ufffd" * 4), (1, "\ufffd")]


def test_ids_where_there_is_no_tokenizer(tmp_path: Path) -> None:
    decoder = Decoder(ReportedRun("run", RunDirectory(tmp_path), [], {"model.path": "7"}, None))
    assert decoder.problem and decoder.pieces([5, 60]) == [(1, "5 "), (1, "60 ")]


@pytest.mark.parametrize(
    ("text", "html"), [("a\tb\n", "a\tb⏎\n"), ("<", "&lt;"), ("\ud83d", "\\ud83d"), ("\r\x00", "\\r\\x00"), ("é", "é")]
)
def test_text_for_a_page(text: str, html: str) -> None:
    assert shown(text) == html
