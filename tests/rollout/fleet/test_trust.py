"""A server's word about its weights against the book: doubted, updated in full, asked again, and at last given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.orchestrator.fake_run import FakeClient, FakeProcess
from vcpo_megatron.rollout.client.http import ServerUnavailable
from vcpo_megatron.rollout.client.protocol import GenerateResult, ImpossibleLogprobs, SamplingParams, Span
from vcpo_megatron.rollout.fleet.fleet import MOST_DOUBTS, Fleet, FleetError, FleetOptions
from vcpo_megatron.rollout.fleet.lease import Lease
from vcpo_megatron.rollout.fleet.server import TRUSTED_AFTER, Server
from vcpo_megatron.rollout.fleet.trust import Doubt, Question, label_doubt
from vcpo_megatron.run.notifier import Notifier
from vcpo_megatron.run.tasks import run_beside
from vcpo_megatron.types import PolicyVersion

pytestmark = pytest.mark.timeout(30)

RUN, OTHER = "3f9a21c0", "00c12a9f"


def version(number: int, attempt: int = 2, run: str = RUN) -> PolicyVersion:
    return PolicyVersion(attempt, number, run)


class Liar(FakeClient):
    """``says(label)`` is what it names the weights of an answer that it sampled with those of ``label``."""

    def reset(self) -> None:
        super().reset()
        self.asked = 0
        self.says: Callable[[str], str] = lambda label: label
        self.flat = -4.6  # its log-prob at the temperature at which no policy is certain

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams, rid: str) -> GenerateResult:
        self.asked += 1
        result = await super().generate(input_ids, sampling, rid)
        return replace(result, spans=tuple(Span(s.start, s.end, self.says(s.version)) for s in result.spans))

    async def health(self, timeout_s: float) -> str:
        return self.says(await super().health(timeout_s))

    async def check_logprobs(self) -> None:
        self.events.append("log-probs")
        if not self.flat:
            raise ImpossibleLogprobs("the log-prob of a sampled token is 0.0 at temperature 1000")


Work = Callable[[Fleet, Liar], Coroutine[Any, Any, None]]


def with_liar(
    work: Work,
    *,
    joined: bool = False,
    max_restarts: int = 0,
    health_interval_s: float = 100.0,
    vouch: Callable[[], Question | None] = lambda: None,
) -> list[str]:
    """Run ``work`` with one server, which gets version 2.5 whenever it has none: a weight sync. Its events."""
    client = Liar(0)

    async def main() -> None:
        server = Server(0, client, Path("/nowhere"), joined=joined)  # type: ignore[arg-type]

        def launch(index: int) -> FakeProcess:
            says, flat = getattr(client, "says", None), getattr(client, "flat", None)
            client.reset()
            client.process = FakeProcess()
            client.events.append("start")
            if says is not None:  # the same program
                client.says, client.flat = says, flat
            return client.process

        def stop(process: Any) -> int:
            process.code = -9
            return -9

        options = FleetOptions(64, max_restarts, 5.0, 5.0, health_interval_s=health_interval_s, health_timeout_s=1.0)
        fleet = Fleet([server], options, launch=launch, stop=stop, changes=Notifier())  # type: ignore[arg-type]

        async def sync() -> None:
            while True:
                if server.available and not server.serving:
                    client.version = str(version(5))
                    client.events.append("loaded")
                    fleet.loaded(server, version(5), vouch())
                await fleet.changes.wait(0.01)

        async def ready() -> None:
            await fleet.changes.until(lambda: server.serving or None, 5)
            await work(fleet, client)

        fleet.launch()
        if joined:
            client.process = FakeProcess()
        await run_beside(ready(), fleet.supervise(), sync())

    asyncio.run(asyncio.wait_for(main(), 20))
    return client.events


async def ask(fleet: Fleet, count: int = 1) -> list[GenerateResult]:
    lease = await fleet.changes.until(lambda: fleet.lease(count), 5)
    try:
        return list(await asyncio.gather(*(lease.generate((1, 2), SamplingParams(4), f"r{i}") for i in range(count))))
    finally:
        lease.release(count)


# --- labels -------------------------------------------------------------------------------------

#: What an answer names -> words of the reason. The server was given 2.5, in attempt 2.
WRONG = [
    (str(version(101)), "which it was not given"),
    (str(version(6)), "which it was not given"),
    (str(version(4)), "older than"),
    (str(version(5, attempt=1)), "of attempt 1"),
    (str(version(9, attempt=3)), "of attempt 3"),
    ("default", "lost"),
    ("unknown", "lost"),
    ("", "lost"),
    ("2.5", "another run"),  # of a program that names no run
]


@pytest.mark.parametrize(("label", "words"), WRONG)
def test_a_server_that_names_other_weights_gets_its_own_again_and_is_asked_again(
    label: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def work(fleet: Fleet, client: Liar) -> None:
        client.says = lambda known: label if client.asked == 1 else known
        (result,) = await ask(fleet)
        assert {span.version for span in result.spans} == {str(version(5))}

    assert with_liar(work).count("loaded") == 2
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "names its weights" in line]
    assert said.startswith("rollout server 0 ") and words in said


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("label", [str(version(4)), "default", str(version(101))])
def test_a_server_that_goes_on_with_that_ends_the_run_by_name(label: str, joined: bool) -> None:
    async def work(fleet: Fleet, client: Liar) -> None:
        client.says = lambda known: label
        await ask(fleet)

    match = rf"rollout server 0 names its weights '?{label}'?, .* after {MOST_DOUBTS} full updates; "
    with pytest.raises(FleetError, match=match + ("it runs at http://fake; leave it out" if joined else ".*restarts")):
        with_liar(work, joined=joined)


def test_it_is_replaced_where_that_is_allowed() -> None:
    async def work(fleet: Fleet, client: Liar) -> None:
        client.says = lambda known: "default" if client.events.count("start") == 1 else known
        (result,) = await ask(fleet)
        assert {span.version for span in result.spans} == {str(version(5))}

    assert with_liar(work, max_restarts=1).count("start") == 2


def test_answers_of_one_load_are_one_doubt() -> None:
    """However many were in flight when the server lost its weights."""

    async def work(fleet: Fleet, client: Liar) -> None:
        client.latency_s = 0.05
        client.says = lambda known: "default" if client.events.count("loaded") == 1 else known
        results = await ask(fleet, count=32)
        assert {span.version for result in results for span in result.spans} == {str(version(5))}
        assert fleet.servers[0].doubts == 1

    assert with_liar(work).count("loaded") == 2


def test_two_servers_behind_one_address_are_found_although_every_other_answer_is_right() -> None:
    async def work(fleet: Fleet, client: Liar) -> None:
        client.says = lambda known: known if client.asked % 2 else str(version(4))
        for _ in range(TRUSTED_AFTER):
            await ask(fleet)

    with pytest.raises(FleetError, match="older than"):
        with_liar(work)


def test_a_server_that_was_right_long_enough_is_trusted_again() -> None:
    async def work(fleet: Fleet, client: Liar) -> None:
        client.latency_s = 0.0
        faults = {1 + number * (TRUSTED_AFTER + 1) for number in range(MOST_DOUBTS + 1)}
        client.says = lambda known: "default" if client.asked in faults else known
        while client.asked <= max(faults):
            await ask(fleet)

    assert with_liar(work).count("loaded") == MOST_DOUBTS + 2


def test_weights_that_came_while_an_answer_was_sampled_are_its_own() -> None:
    async def work(fleet: Fleet, client: Liar) -> None:
        server = fleet.servers[0]
        client.latency_s = 0.1
        asked = asyncio.ensure_future(ask(fleet))
        await asyncio.sleep(0.03)
        for number in (6, 8):
            server.give(version(number))
        client.says = lambda known: str(version(8))
        ((result),) = await asked
        assert {span.version for span in result.spans} == {str(version(8))}

    assert with_liar(work).count("loaded") == 1


@pytest.mark.parametrize("number", [0, 5, 99])
def test_another_run_on_the_server_ends_this_one_by_name(number: int) -> None:
    async def work(fleet: Fleet, client: Liar) -> None:
        client.says = lambda known: str(version(number, run=OTHER))
        await ask(fleet)

    match = rf"rollout server 0 at http://fake names its weights {OTHER}.2.{number}, .*: run {OTHER} uses it"
    with pytest.raises(FleetError, match=match):
        with_liar(work)


@pytest.mark.parametrize(
    ("label", "match"), [(str(version(5, run=OTHER)), f"run {OTHER} uses it"), ("default", "lost")]
)
def test_so_does_what_it_says_when_nobody_asks_for_an_answer(label: str, match: str) -> None:
    async def work(fleet: Fleet, client: Liar) -> None:
        client.says = lambda known: label
        await asyncio.sleep(15)

    with pytest.raises(FleetError, match=match):
        with_liar(work, health_interval_s=0.05)


def test_labels_by_the_book() -> None:
    given = {version(number) for number in (3, 5, 9)}
    for label, fits in ((version(5), True), (version(9), True), (version(3), False), (version(7), False)):
        assert (label_doubt(str(label), version(5), given) is None) == fits
    assert label_doubt(str(version(5, run=OTHER)), version(5), given).other_run == OTHER  # type: ignore[union-attr]


# --- log-probs ----------------------------------------------------------------------------------


def certain(client: Liar) -> None:
    """From now on its log-probs are all exactly 0.0."""
    answer = client.generate

    async def generate(*request: Any) -> GenerateResult:
        result = await answer(*request)
        return replace(result, logprobs=(0.0,) * len(result.output_ids))

    client.generate = generate  # type: ignore[method-assign]


def test_a_policy_that_is_certain_is_believed_after_one_question_a_load() -> None:
    async def work(fleet: Fleet, client: Liar) -> None:
        certain(client)
        for _ in range(3):
            results = await ask(fleet, count=4)
            assert not any(any(result.logprobs) for result in results)

    assert with_liar(work).count("log-probs") == 1


def test_a_server_that_computes_no_log_probs_is_given_up() -> None:
    async def work(fleet: Fleet, client: Liar) -> None:
        certain(client)
        client.flat = 0.0
        await ask(fleet)

    with pytest.raises(FleetError, match="0.0 at temperature 1000.*after 3 full updates"):
        with_liar(work)


@pytest.mark.parametrize("sampling", [SamplingParams(4, temperature=0.0), SamplingParams(4, top_k=2)])
def test_log_probs_of_0_are_those_of_greedy_and_of_restricted_sampling(sampling: SamplingParams) -> None:
    async def work(fleet: Fleet, client: Liar) -> None:
        certain(client)
        client.flat = 0.0
        lease = fleet.lease(1)
        assert isinstance(lease, Lease)
        assert not any((await lease.generate((1, 2), sampling, "r")).logprobs)

    assert "log-probs" not in with_liar(work)


def test_log_probs_that_cannot_be_are_the_servers_fault_not_the_prompts() -> None:
    async def work(fleet: Fleet, client: Liar) -> None:
        answer = client.generate

        async def wrong_once(*request: Any) -> GenerateResult:
            result = await answer(*request)
            if client.asked == 1:
                raise ImpossibleLogprobs("output_token_logprobs[0] = 3.0: is above 0")
            return result

        client.generate = wrong_once  # type: ignore[method-assign]
        await ask(fleet)

    assert with_liar(work).count("loaded") == 2


# --- what it computes ---------------------------------------------------------------------------


def test_answers_wait_until_it_is_known_with_which_weights_they_were_sampled() -> None:
    answered = asyncio.Event()

    async def question() -> Doubt | None:
        await answered.wait()
        return None

    async def work(fleet: Fleet, client: Liar) -> None:
        asked = asyncio.ensure_future(ask(fleet))
        await asyncio.sleep(0.1)
        assert client.asked == 1 and not asked.done()
        answered.set()
        await asked

    with_liar(work, vouch=lambda: question)


@pytest.mark.parametrize("last", [1, MOST_DOUBTS])
def test_a_server_that_keeps_its_weights_is_doubted_before_an_answer_is_used(last: int) -> None:
    asked: list[int] = []

    async def question() -> Doubt | None:
        asked.append(len(asked) + 1)
        if len(asked) == 1:  # the server stumbles: that is no doubt
            raise ServerUnavailable("http://fake", "/generate", "connection reset")
        return Doubt("still computes what it did before") if len(asked) <= last + 1 else None

    async def work(fleet: Fleet, client: Liar) -> None:
        await ask(fleet)

    if last < MOST_DOUBTS:
        assert with_liar(work, vouch=lambda: question).count("loaded") == 2
    else:
        with pytest.raises(FleetError, match="server 0 still computes .*after 3 full"):
            with_liar(work, vouch=lambda: question)
