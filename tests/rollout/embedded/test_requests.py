"""Requests that are refused, and many sequences given up at once: no model, no server."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.messages import assert_names
from vcpo_megatron.rollout.client.protocol import SamplingParams
from vcpo_megatron.rollout.embedded.engine import Engine, _Request
from vcpo_megatron.rollout.embedded.errors import ModelError, RequestError
from vcpo_megatron.rollout.embedded.loading import stop_tokens
from vcpo_megatron.rollout.embedded.requests import MAX_SEQUENCES, RequestParser
from vcpo_megatron.rollout.embedded.scheduler import Scheduler
from vcpo_megatron.rollout.embedded.sequence import SequenceState


class IdleRunner:
    """Two sequences run, the others wait."""

    def __init__(self) -> None:
        self.running: list[SequenceState] = []

    def remove_done(self) -> list[SequenceState]:
        done = [sequence for sequence in self.running if sequence.finish]
        self.running = [sequence for sequence in self.running if not sequence.finish]
        return done


def sequences(prefix: str, count: int) -> list[SequenceState]:
    params = SamplingParams(max_new_tokens=4)
    return [SequenceState(f"{prefix}{index}", (1,), params, frozenset(), index) for index in range(count)]


def test_abort_ends_those_named_and_keeps_the_order_of_the_others() -> None:
    runner: Any = IdleRunner()
    scheduler = Scheduler(runner, "0")
    made = sequences("r", 6)
    scheduler.submit(made)
    runner.running = [scheduler._waiting.popleft(), scheduler._waiting.popleft()]
    scheduler.abort({"r1", "r3", "r4", "unknown"}, "gone")
    assert [sequence.rid for sequence in scheduler.ended] == ["r1", "r3", "r4"]
    assert made[3].finish == {"type": "abort", "message": "gone"}
    assert [sequence.rid for sequence in runner.running] == ["r0"]
    assert [sequence.rid for sequence in scheduler._waiting] == ["r2", "r5"]
    scheduler.submit(sequences("r", 2)[1:])  # the id is free again
    scheduler.abort(None, "all")
    assert scheduler.num_waiting == 0 and len(scheduler.ended) == 7


def test_a_client_that_gives_up_a_large_request_costs_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """One abort a sequence would be quadratic in the number that wait."""
    calls: list[int] = []
    original = Scheduler.abort

    def counted(self: Scheduler, rids: Any, message: str) -> None:
        calls.append(len(rids))
        original(self, rids, message)

    monkeypatch.setattr(Scheduler, "abort", counted)

    async def scenario() -> Scheduler:
        runner: Any = IdleRunner()
        scheduler = Scheduler(runner, "0")
        engine = Engine(scheduler, lambda: None)  # never started: its commands run here
        kept, given_up = sequences("kept", 3), sequences("many", 5000)
        for members in (kept, given_up):
            engine._submit(_Request(members, asyncio.get_running_loop().create_future()))
        engine._abandon(given_up)
        engine._deliver()
        engine._abandon(given_up)  # they have ended: nothing to do
        return scheduler

    assert asyncio.run(scenario()).num_waiting == 3
    assert calls == [5000]


@pytest.mark.parametrize("value", ["x", [1, "x"], True, {"a": 1}])
def test_stop_tokens_are_ids(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ModelError, match="is no token id or list of them"):
        stop_tokens(tmp_path, {"eos_token_id": value})
    assert stop_tokens(tmp_path, {"eos_token_id": [1, 2]}) == {1, 2}


def parser(tokenizer: Any = None) -> RequestParser:
    return RequestParser(12, 64, frozenset(), tokenizer, random.Random(0))


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"input_ids": [1], "sampling_params": {"n": MAX_SEQUENCES + 1}}, 8193),
        ({"input_ids": [1], "sampling_params": {"n": 10**30}}, 10**30),
        ({"input_ids": [[1]] * 8193}, 8193),
        ({"text": ["a"] * 8193}, 8193),
        ({"input_ids": [[1], [2]], "sampling_params": [{"n": 8000}, {"n": 193}]}, 8193),
    ],
)
def test_the_number_of_sequences_is_bounded(body: dict[str, Any], count: int) -> None:
    with pytest.raises(RequestError) as caught:
        parser().parse(body)
    assert_names(caught.value, f"a request of {count} sequences", "at most 8192", "send several requests")


def test_as_many_as_allowed_are_made() -> None:
    body = {"input_ids": [1, 2], "sampling_params": {"n": 8192, "max_new_tokens": 4}}
    assert len(parser().parse(body).sequences) == 8192


def test_a_text_that_the_tokenizer_cannot_encode_is_the_clients_mistake() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"hello": 0}))  # no UNK: tokenizers raises for other words
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 4}}
    assert parser(tokenizer).parse(body).sequences[0].prompt == (0,)
    for text in ("hello world", "\ud800"):
        with pytest.raises(RequestError, match="text: the model's tokenizer cannot encode the text: "):
            parser(tokenizer).parse({**body, "text": text})
