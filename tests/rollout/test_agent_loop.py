"""The agent loop against a scripted server and scripted environments."""

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.environments.in_process import play as play_in_process
from tests.messages import assert_names
from vcpo_megatron.environments.base import Action, Example, Observation, Outcome
from vcpo_megatron.rollout.agent_loop import MAX_EMPTY_ABORTS, EpisodeError
from vcpo_megatron.rollout.client.protocol import GenerateResult, SamplingParams, Span
from vcpo_megatron.types import PolicyVersion, Turn, VersionSpan

EXAMPLE = Example("train/7", {})


@dataclass
class Script:
    """An environment whose ``steps`` are returned one a call (called first when callable)."""

    steps: list
    prompt: tuple = (1, 2, 3)
    sampling: dict = field(default_factory=dict)
    close_error: Exception | None = None
    name: str = "script"
    actions: list = field(default_factory=list)
    closed: int = 0
    fingerprint: str = ""
    max_prompt_tokens: int = 3

    def train_example(self, index):
        return EXAMPLE

    def heldout(self):
        return []

    def episode(self, example):
        assert example is EXAMPLE
        return self

    def decode(self, token_ids):
        return "".join(chr(64 + token) for token in token_ids)

    async def reset(self):
        return Observation(self.prompt)

    async def step(self, action):
        self.actions.append(action)
        step = self.steps[len(self.actions) - 1]
        return await step() if callable(step) else step

    async def close(self):
        self.closed += 1
        if self.close_error:
            raise self.close_error


class Server:
    """Answers in order; notes what it was asked."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = []

    async def __call__(self, input_ids, sampling, rid):
        self.requests.append((tuple(input_ids), sampling, rid))
        answer = self.answers.pop(0) if self.answers else abort()
        return await answer() if callable(answer) else answer


def answer(ids, finish="stop", spans=None, logprobs=None):
    spans = spans if spans is not None else (((0, len(ids), "1.4"),) if ids else ())
    logprobs = logprobs if logprobs is not None else [-0.5 * token for token in ids]
    return GenerateResult(tuple(ids), tuple(logprobs), tuple(Span(*span) for span in spans), finish)


def abort(ids=(), **keywords):
    return answer(ids, "abort", **keywords)


def play(server, script, *, max_new_tokens=20, context_length=100, seed_for_turn=lambda turn: None, **sampling):
    episode = play_in_process(
        server,
        script,
        group_id=5,
        sample_index=2,
        context_length=context_length,
        sampling=SamplingParams(max_new_tokens=max_new_tokens, **sampling),
        seed_for_turn=seed_for_turn,
    )
    return asyncio.run(asyncio.wait_for(episode, 10))


def failure(server, script, **keywords):
    with pytest.raises(EpisodeError) as caught:
        play(server, script, **keywords)
    message = str(caught.value)
    assert message.startswith("environment script, prompt train/7, sample 5/2: ") and "\n" not in message
    return message


def test_one_turn():
    script = Script([Outcome(0.75, {"steps": 3.0})])
    server = Server(answer([4, 5], spans=[(0, 1, "1.3"), (1, 2, "1.4")]))
    trajectory = play(server, script, temperature=0.8)
    assert (trajectory.uid, trajectory.prompt_id, trajectory.prompt_length) == ("5/2", "train/7", 3)
    assert trajectory.tokens.tolist() == [1, 2, 3, 4, 5]
    assert trajectory.loss_mask.tolist() == [False, False, False, True, True]
    assert trajectory.behavior_logprobs.tolist() == [0.0, 0.0, 0.0, -2.0, -2.5]
    spans = (VersionSpan(3, 4, PolicyVersion(1, 3)), VersionSpan(4, 5, PolicyVersion(1, 4)))
    assert trajectory.turns == (Turn(3, 5, "stop", spans),)
    assert (trajectory.reward, trajectory.info) == (0.75, {"steps": 3.0})
    assert (trajectory.oldest_version, trajectory.newest_version) == (3, 4)
    assert script.actions == [Action((4, 5), "DE", "stop")]
    assert script.closed == 1
    assert server.requests == [((1, 2, 3), SamplingParams(max_new_tokens=20, temperature=0.8), "train/7/5/2/0.0")]


def test_observations_are_masked_and_every_turn_sees_exactly_the_tokens_before_it():
    script = Script([Observation((10, 11)), Observation(()), Outcome(1.0)])
    server = Server(answer([4, 5]), answer([6], spans=[(0, 1, "1.5")]), answer([7, 8], "length"))
    trajectory = play(server, script)
    assert trajectory.tokens.tolist() == [1, 2, 3, 4, 5, 10, 11, 6, 7, 8]
    assert trajectory.loss_mask.astype(int).tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert trajectory.behavior_logprobs.tolist() == [0, 0, 0, -2.0, -2.5, 0, 0, -3.0, -3.5, -4.0]
    assert trajectory.turns == (
        Turn(3, 5, "stop", (VersionSpan(3, 5, PolicyVersion(1, 4)),)),
        Turn(7, 8, "stop", (VersionSpan(7, 8, PolicyVersion(1, 5)),)),
        Turn(8, 10, "length", (VersionSpan(8, 10, PolicyVersion(1, 4)),)),
    )
    assert [request[0] for request in server.requests] == [
        (1, 2, 3),
        (1, 2, 3, 4, 5, 10, 11),
        (1, 2, 3, 4, 5, 10, 11, 6),
    ]
    assert [request[1].max_new_tokens for request in server.requests] == [20, 18, 17]
    assert len({request[2] for request in server.requests}) == 3
    assert [action.token_ids for action in script.actions] == [(4, 5), (6,), (7, 8)]


def test_trained_tokens_are_the_sampled_ones_although_text_would_tokenise_otherwise():
    script = Script([Observation((9,)), Outcome(1.0)])
    script.decode = lambda token_ids: "always the same"
    assert play(Server(answer([4, 4]), answer([4])), script).tokens.tolist() == [1, 2, 3, 4, 4, 9, 4]


def test_an_aborted_generation_is_resumed_with_its_tokens_within_one_budget():
    script = Script([Outcome(1.0)])
    server = Server(abort([4, 5], spans=[(0, 2, "1.1")]), abort(), abort([6]), answer([7, 8], "length"))
    trajectory = play(server, script, max_new_tokens=5)
    assert [request[0] for request in server.requests] == [
        (1, 2, 3),
        (1, 2, 3, 4, 5),
        (1, 2, 3, 4, 5),
        (1, 2, 3, 4, 5, 6),
    ]
    assert [request[1].max_new_tokens for request in server.requests] == [5, 3, 3, 2]
    assert len({request[2] for request in server.requests}) == 4
    old, new = PolicyVersion(1, 1), PolicyVersion(1, 4)
    spans = (VersionSpan(3, 5, old), VersionSpan(5, 6, new), VersionSpan(6, 8, new))
    assert trajectory.turns == (Turn(3, 8, "length", spans),)
    assert trajectory.behavior_logprobs.tolist() == [0, 0, 0, -2.0, -2.5, -3.0, -3.5, -4.0]
    assert script.actions == [Action((4, 5, 6, 7, 8), "DEFGH", "length")]


def test_an_abort_at_the_end_of_the_budget_ends_the_answer():
    script = Script([Outcome(1.0)])
    server = Server(abort([4, 5]))
    assert play(server, script, max_new_tokens=2).turns[0].finish_reason == "length"
    assert len(server.requests) == 1 and script.actions[0].finish_reason == "length"


def test_aborts_without_progress_are_given_up():
    script, server = Script([]), Server(abort([4]))
    assert f"aborted the generation {MAX_EMPTY_ABORTS} times in a row" in failure(server, script)
    assert len(server.requests) == 1 + MAX_EMPTY_ABORTS and script.closed == 1


def test_seeds_are_one_a_turn_and_move_on_when_resumed():
    def seeds(*answers, steps):
        server = Server(*answers)
        play(server, Script(steps), seed_for_turn=lambda turn: 100 + turn)
        return [request[1].sampling_seed for request in server.requests]

    first, second = seeds(answer([4, 5]), answer([6]), steps=[Observation((9,)), Outcome(1.0)])
    assert (first, second) == (100, 101)
    resumed = seeds(abort([4, 5]), answer([6]), steps=[Outcome(1.0)])
    assert resumed[0] == 100 and resumed[1] not in (100, 101) and 0 <= resumed[1] < 2**31
    assert play(server := Server(answer([4])), Script([Outcome(1.0)])) and server.requests[0][1].sampling_seed is None


def test_the_environment_adds_sampling_parameters_and_caps_every_answer():
    sampling = {"ignore_eos": True, "max_new_tokens": 3}
    script = Script([Observation((9,)), Observation((9,)), Outcome(1.0)], sampling=sampling)
    server = Server(answer([4, 5, 6]), answer([4, 5, 6]), answer([4]))
    play(server, script, max_new_tokens=7)
    assert [request[1].max_new_tokens for request in server.requests] == [3, 3, 1]
    assert all(request[1].ignore_eos for request in server.requests)


@pytest.mark.parametrize(
    ("limits", "observation"),
    [
        ({"max_new_tokens": 2}, (9,)),  # all sampled tokens are used up
        ({"context_length": 6}, (9,)),  # the observation fills the context
        ({"context_length": 6}, (9,) * 50),  # and this one exceeds it
        ({"context_length": 5}, ()),
    ],
)
def test_without_room_the_environment_is_asked_for_the_outcome(limits, observation):
    script = Script([Observation(observation), Outcome(0.25)])
    trajectory = play(Server(answer([4, 5])), script, **limits)
    assert trajectory.tokens.tolist() == [1, 2, 3, 4, 5]  # nothing after the last sampled token
    assert trajectory.reward == 0.25
    assert script.actions[1] == Action((), "", "length")


def test_a_last_token_of_room_is_used():
    script = Script([Observation((9,)), Outcome(1.0)])
    server = Server(answer([4, 5]), answer([6], "length"))
    assert play(server, script, context_length=7).tokens.tolist() == [1, 2, 3, 4, 5, 9, 6]
    assert [request[1].max_new_tokens for request in server.requests] == [4, 1]


def test_an_environment_that_goes_on_without_room_fails():
    script = Script([Observation((9,)), Observation((9,))])
    assert "must return an Outcome" in failure(Server(answer([4, 5])), script, max_new_tokens=2)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (answer([]), "answered no token (finish reason 'stop')"),
        (answer([4, 5], spans=[(0, 2, "default")]), "version 'default' is not of the form RUN.ATTEMPT.NUMBER"),
    ],
)
def test_a_bad_answer_fails_the_trajectory(reply, expected):
    script = Script([Outcome(1.0)])
    assert expected in failure(Server(reply), script, max_new_tokens=3)
    assert script.actions == [] and script.closed == 1


def test_an_outcome_without_numbers_fails_the_trajectory():
    failed = failure(Server(answer([4])), Script([Outcome(1.0, {"x": "text"})]))
    assert_names(failed, "step returned info x = 'text'", "a finite number")
    assert "step returned reward nan" in failure(Server(answer([4])), Script([Outcome(float("nan"))]))


def test_exceptions_of_the_environment_are_one_clear_error():
    async def broken():
        raise KeyError("tool")

    script = Script([broken])
    with pytest.raises(EpisodeError) as caught:
        play(Server(answer([4])), script)
    assert_names(caught.value, "environment script, prompt train/7, sample 5/2", "step raised KeyError: 'tool'")
    assert script.closed == 1

    script = Script([])
    script.reset = broken
    assert "reset raised KeyError: 'tool'" in failure(Server(), script)
    assert script.closed == 1

    script = Script([])
    script.episode = lambda example: 1 / 0
    assert "episode raised ZeroDivisionError" in failure(Server(), script)

    script = Script([Outcome(1.0)], close_error=OSError("disk"))
    assert "close raised OSError: disk" in failure(Server(answer([4])), script)

    script = Script([Outcome(1.0)])
    script.decode = lambda token_ids: 1 / 0
    assert "decode raised ZeroDivisionError" in failure(Server(answer([4])), script)
    assert script.closed == 1


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (Script([], prompt=()), "not an Observation with tokens"),
        (Script([], prompt=(1,) * 100), "prompt of 100 tokens leaves no room for an answer in a context of 100"),
        (Script([None]), "step returned None, neither an Observation nor an Outcome"),
        (Script([Outcome(float("nan"))]), "reward nan; give a finite number"),
        (Script([Outcome(1.0)], sampling={"top_q": 1}), "top_q"),
        (Script([Outcome(1.0)], sampling={"stop_token_ids": (-1,)}), "stop_token_ids"),
    ],
)
def test_what_the_environment_returns_is_checked(script, expected):
    assert expected in failure(Server(answer([4])), script)
    assert script.closed == 1


def test_errors_of_the_server_pass_unchanged_and_the_episode_is_closed(capsys):
    async def refuse():
        raise ConnectionError("gone")

    script = Script([], close_error=OSError("disk"))
    with pytest.raises(ConnectionError, match="gone"):
        play(Server(refuse), script)
    assert script.closed == 1
    assert "close raised OSError: disk" in capsys.readouterr().out  # nobody waits for it: it is written down


def test_a_cancelled_episode_is_closed_and_stays_cancelled():
    script = Script([], close_error=OSError("disk"))

    async def scenario():
        waiting = asyncio.Event()

        async def forever():
            waiting.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(play_in_process(Server(forever), script, sampling=SamplingParams()))
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert script.closed == 1


def test_failures_stay_with_their_own_trajectory():
    async def sometimes():
        raise RuntimeError("flaky tool")

    async def scenario():
        scripts = [Script([sometimes if index % 5 == 0 else Outcome(float(index))]) for index in range(20)]
        return await asyncio.gather(
            *(
                play_in_process(Server(answer([4])), script, sample_index=index, sampling=SamplingParams())
                for index, script in enumerate(scripts)
            ),
            return_exceptions=True,
        )

    results = asyncio.run(asyncio.wait_for(scenario(), 10))
    assert [isinstance(result, EpisodeError) for result in results] == [index % 5 == 0 for index in range(20)]
    assert all(result.tokens.dtype == np.int32 for index, result in enumerate(results) if index % 5)
