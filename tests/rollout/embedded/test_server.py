"""What the embedded engine promises beyond the protocol that both engines are tested for (test_engines.py)."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.rollout.conftest import VOCABULARY
from tests.rollout.raw_http import post, wait_until
from vcpo_megatron.rollout.client import http as client_module
from vcpo_megatron.rollout.client.http import ServerClient, ServerError
from vcpo_megatron.rollout.client.protocol import SamplingParams, Span
from vcpo_megatron.rollout.client.replies import UnsupportedServer

pytestmark = pytest.mark.timeout(300)  # longer than a server may take to start, and a scenario after it

PROMPT = [5, 17, 42, 8, 60]
LONG = SamplingParams(max_new_tokens=480, ignore_eos=True)


def close(got: Any, expected: Any, tolerance: float = 1e-5) -> bool:
    return len(got) == len(expected) and all(abs(a - b) < tolerance for a, b in zip(got, expected, strict=True))


async def load(client: ServerClient, versions: Any, version: str) -> None:
    await client.begin_weight_update()
    await client.update_weights_from_tensor(versions.bucket(version), version)
    await client.end_weight_update()


# ---------------------------------------------------------------- sampling


def test_samples_follow_the_model_distribution(use: Callable[..., Any], versions: Any) -> None:
    """4000 first tokens against the model's probabilities: a chi-square over the likely tokens."""
    import torch

    count = 4000
    with torch.no_grad():
        logits = versions.models["0"](input_ids=torch.tensor([PROMPT])).logits[0, -1].double()
    expected = (torch.softmax(logits, -1) * count).tolist()
    one = SamplingParams(max_new_tokens=1)
    results = use(lambda client: client.generate_batch([PROMPT] * count, [one] * count))
    seen = [0] * len(expected)
    for result in results:
        seen[result.output_ids[0]] += 1
    terms = [(s - e) ** 2 / e for s, e in zip(seen, expected, strict=True) if e >= 5]
    # Mean len(terms), standard deviation sqrt(2 len(terms)): five of them are one in a million.
    assert sum(terms) < len(terms) + 5 * (2 * len(terms)) ** 0.5


def test_seeded_answers_do_not_depend_on_the_batch(use: Callable[..., Any]) -> None:
    seeded = SamplingParams(max_new_tokens=30, ignore_eos=True, sampling_seed=123)
    other = SamplingParams(max_new_tokens=50, ignore_eos=True)

    async def scenario(client: ServerClient) -> list[tuple[int, ...]]:
        alone = await client.generate(PROMPT, seeded, "alone")
        crowd = [client.generate(PROMPT[:2], other, f"c{i}") for i in range(7)]
        among = (await asyncio.gather(*crowd, client.generate(PROMPT, seeded, "among")))[-1]
        listed = (await client.generate_batch([PROMPT[:3], PROMPT], [other, seeded]))[1]
        different = await client.generate(PROMPT, replace(seeded, sampling_seed=124), "different")
        return [result.output_ids for result in (alone, among, listed, different)]

    alone, among, listed, different = use(scenario)
    assert alone == among == listed != different


def test_reply_has_sglang_fields(server: Any) -> None:
    body = {
        "input_ids": PROMPT,
        "rid": "fields",
        "return_logprob": True,
        "logprob_start_len": 2,
        "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
    }
    status, reply = post(server.url, "/generate", body)
    meta = reply["meta_info"]
    assert status == 200 and meta["id"] == "fields" and meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (5, 4, "0")
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 4}]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == PROMPT[2:]
    assert meta["input_token_logprobs"][0][0] is None


def test_n_answers_a_flat_list(server: Any) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 20, "ignore_eos": True, "n": 3}}
    status, reply = post(server.url, "/generate", body)
    assert status == 200 and len({tuple(answer["output_ids"]) for answer in reply}) == 3


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"input_ids": [5, 97]}, "97"),
        ({"input_ids": [-1]}, "-1"),
        ({"input_ids": []}, "at least one token"),
        ({"input_ids": [[5], []]}, "at least one token"),
        ({"input_ids": "abc"}, "input_ids"),
        ({"input_ids": [1] * 513}, "513"),
        ({"sampling_params": {"max_new_tokens": 508}}, "508"),
        ({"sampling_params": {"max_tokens": 5}}, "max_tokens"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"n": 0}}, "n = 0"),
        ({"sampling_params": {"n": 100_000}}, "a request of 100000 sequences (prompts x n): at most 8192"),
        ({"input_ids": [[5]] * 8193}, "a request of 8193 sequences (prompts x n): at most 8192"),
        ({"sampling_params": [{}, {}]}, "sampling_params"),
        ({"stream": True}, "stream"),
        ({"rid": 5}, "rid"),
        ({"logprob_start_len": 9, "return_logprob": True}, "logprob_start_len"),
        ({"top_logprobs_num": 3}, "top_logprobs_num"),
    ],
)
def test_bad_requests_answer_400_by_name_and_the_server_lives(server: Any, change: dict, named: str) -> None:
    good = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
    status, reply = post(server.url, "/generate", {**good, **change})
    assert status == 400 and named in reply["message"]
    assert post(server.url, "/generate", good)[0] == 200


@pytest.mark.parametrize(
    ("endpoint", "body", "named"),
    [
        ("/pause_generation", b"", "JSON"),
        ("/pause_generation", {"mode": "stop"}, "stop"),
        ("/generate", b"[1]", "object"),
        ("/generate", b"[" * 100_000, "nested too deeply"),
        ("/generate", b'{"input_ids": ' + b"[" * 100_000, "nested too deeply"),
        ("/pause_generation", b"\xff{}", "JSON"),
        ("/abort_request", {}, "rid"),
        ("/end_weight_update", {}, "/begin_weight_update"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["AAAA"]}, "/begin_weight_update"),
        ("/update_weights_from_disk", {"model_path": "/nonexistent"}, "/nonexistent"),
        ("/update_weight_version", {}, "new_version"),
        ("/weights_checker", {"action": "compare"}, "compare"),
    ],
)
def test_bad_control_requests_answer_400(server: Any, endpoint: str, body: Any, named: str) -> None:
    status, reply = post(server.url, endpoint, body)
    assert status == 400 and named in reply["message"]
    assert post(server.url, "/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}})[0] == 200


def test_an_update_without_tensors_changes_nothing(server: Any) -> None:
    before = post(server.url, "/weights_checker", {})[1]
    assert post(server.url, "/begin_weight_update", {})[0] == 200
    status, reply = post(server.url, "/end_weight_update", {})
    assert status == 200 and "unchanged" in reply["message"]
    assert post(server.url, "/weights_checker", {})[1] == before
    assert post(server.url, "/end_weight_update", {})[0] == 400


def test_request_id_in_use(use: Callable[..., Any], server: Any) -> None:
    """A request whose connection was lost may still run: the next try has a name of its own."""
    body = {"input_ids": PROMPT, "sampling_params": LONG.to_json(), "return_logprob": True}

    async def scenario(client: ServerClient) -> None:
        await client.pause("in_place")
        first = asyncio.create_task(asyncio.to_thread(post, server.url, "/generate", {**body, "rid": "same"}))
        await asyncio.to_thread(wait_until, server.url, lambda running, waiting: waiting == 1)
        status, reply = await asyncio.to_thread(post, server.url, "/generate", {**body, "rid": "same"})
        assert status == 400 and "'same' is already in use" in reply["message"]
        tries = [asyncio.create_task(client.generate(PROMPT, LONG, "same")) for _ in range(2)]
        await asyncio.to_thread(wait_until, server.url, lambda running, waiting: waiting == 3)
        await client.abort("same")  # of this client
        assert [(await each).output_ids for each in tries] == [(), ()]
        assert post(server.url, "/abort_request", {"rid": "same"})[0] == 200
        assert (await first)[1]["output_ids"] == []
        await client.resume()

    use(scenario)


def test_a_server_that_a_run_uses_is_not_taken_over_by_another(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LEFTOVER_S", 0.2)
    first, second = (ServerClient(server.url, VOCABULARY, 30.0, run=run) for run in ("3f9a21c0", "00c12a9f"))

    async def scenario() -> None:
        assert post(server.url, "/update_weight_version", {"new_version": "3f9a21c0.1.7"})[0] == 200
        await first.pause("in_place")  # so that the answer takes as long as it should
        answer = asyncio.create_task(first.generate(PROMPT, LONG, "long"))
        await asyncio.to_thread(wait_until, server.url, lambda running, waiting: waiting == 1)
        with pytest.raises(UnsupportedServer, match="is used by another run, 3f9a21c0"):
            await second.adopt()
        await first.resume()
        assert {span.version for span in (await answer).spans} == {"3f9a21c0.1.7"}
        assert await first.adopt() is None  # its own, after a crash
        assert post(server.url, "/update_weight_version", {"new_version": "3f9a21c0.1.7"})[0] == 200
        assert await second.adopt() == "3f9a21c0"  # which asks it nothing any more
        assert (await second.model_info())["weight_version"] == "unknown"

    async def bounded() -> None:
        try:
            async with asyncio.timeout(60):
                await scenario()
        finally:
            post(server.url, "/update_weight_version", {"new_version": "0"})
            for client in (first, second):
                await client.close()

    asyncio.run(bounded())


# ---------------------------------------------------------------- abort and pause


def test_a_paused_server_says_that_it_takes_no_requests_and_serves_whoever_joins_it(
    use: Callable[..., Any], server: Any
) -> None:
    async def scenario(client: ServerClient) -> None:
        await client.health(30.0)
        await client.pause("retract")
        assert not await client.ready()
        with pytest.raises(ServerError, match="/ready .*it is paused"):
            await client.health(30.0)
        await client.adopt()
        assert await client.ready()
        assert (await client.generate(PROMPT, SamplingParams(max_new_tokens=2), "joined")).output_ids
        await client.health(30.0)

    try:
        use(scenario)
    finally:  # who joins a server takes the name of its weights away, and other tests use this one
        post(server.url, "/update_weight_version", {"new_version": "0"})


def test_flush_is_refused_while_busy(use: Callable[..., Any], server: Any) -> None:
    async def scenario(client: ServerClient) -> None:
        await client.flush_cache()
        running = asyncio.create_task(client.generate(PROMPT, LONG, "busy"))
        await asyncio.to_thread(wait_until, server.url, lambda running, waiting: running == 1)
        await client.pause("in_place")
        with pytest.raises(ServerError, match="cannot be flushed"):
            await client.flush_cache()
        await client.resume()
        await client.abort()
        assert (await running).finish_reason == "abort"
        await client.flush_cache()

    use(scenario)


# ---------------------------------------------------------------- weights


def bad_bucket(versions: Any, kind: str) -> bytes:
    import base64
    import pickle

    import torch

    name, tensor = versions.tensors("1")[0]
    values: dict[str, Any] = {
        "unknown": [(name, tensor), ("model.nonsense.weight", tensor)],
        "shape": [(name, tensor[:, :-1].clone())],
        "dtype": [(name, tensor.to(torch.bfloat16))],
        "not tensors": {"a": 1},
        "code": [print],
    }
    return base64.b64encode(pickle.dumps(values[kind]))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("unknown", "model.nonsense.weight"),
        ("shape", r"\[97, 31\], the model's is \[97, 32\]"),
        ("dtype", "bfloat16"),
        ("not tensors", "list of"),
        ("code", r"builtins.print is not allowed"),
    ],
)
def test_a_bucket_that_does_not_fit_changes_nothing(
    use: Callable[..., Any], versions: Any, kind: str, message: str
) -> None:
    async def scenario(client: ServerClient) -> None:
        before = await client.score(PROMPT)
        await client.begin_weight_update()
        await client.update_weights_from_tensor(versions.bucket("1"), "1")
        with pytest.raises(ServerError, match=message) as caught:
            await client.update_weights_from_tensor(bad_bucket(versions, kind), "1")
        assert caught.value.status == 400
        with pytest.raises(ServerError, match="refused"):
            await client.end_weight_update()
        assert await client.score(PROMPT) == before
        assert (await client.model_info())["weight_version"] == "0"

    use(scenario)


def test_update_is_visible_at_its_end_and_all_at_once(use: Callable[..., Any], versions: Any, server: Any) -> None:
    async def scenario(client: ServerClient) -> None:
        checksums = post(server.url, "/weights_checker", {"action": "checksum"})[1]["per_engine_checksum"]
        await client.begin_weight_update()
        await client.update_weights_from_tensor(versions.bucket("2"), "2")
        assert close(await client.score(PROMPT), versions.logprobs("0", PROMPT))
        await client.begin_weight_update()  # a trainer that died half-way starts again
        await client.update_weights_from_tensor(versions.bucket("1"), "1")
        await client.end_weight_update()
        assert close(await client.score(PROMPT), versions.logprobs("1", PROMPT))
        assert (await client.model_info())["weight_version"] == "1"
        assert post(server.url, "/weights_checker", {})[1]["per_engine_checksum"] != checksums
        await load(client, versions, "0")
        assert post(server.url, "/weights_checker", {})[1]["per_engine_checksum"] == checksums

    use(scenario)


def test_update_without_a_pause_waits_for_running_requests(use: Callable[..., Any], versions: Any, server: Any) -> None:
    async def scenario(client: ServerClient) -> None:
        await client.begin_weight_update()
        await client.update_weights_from_tensor(versions.bucket("1"), "1")
        running = [asyncio.create_task(client.generate(PROMPT, LONG, f"running{i}")) for i in range(16)]
        await asyncio.to_thread(wait_until, server.url, lambda running, waiting: running == 16)
        update = asyncio.create_task(client.end_weight_update())
        await asyncio.sleep(0.02)
        behind = asyncio.create_task(client.generate(PROMPT, replace(LONG, max_new_tokens=5), "behind"))
        assert not update.done()
        for answer in await asyncio.gather(*running):
            assert answer.spans == (Span(0, 480, "0"),)
        await update
        assert (await behind).spans == (Span(0, 5, "1"),)
        await load(client, versions, "0")

    use(scenario)


def test_update_from_disk_and_renaming(use: Callable[..., Any], versions: Any, server: Any) -> None:
    async def scenario(client: ServerClient) -> None:
        body = {"model_path": str(versions.folder.parent / "2"), "weight_version": "2"}
        status, reply = await asyncio.to_thread(post, server.url, "/update_weights_from_disk", body)
        assert status == 200 and reply["success"]
        assert close(await client.score(PROMPT), versions.logprobs("2", PROMPT))
        assert (await client.generate(PROMPT, SamplingParams(2), "disk")).spans[0].version == "2"
        await asyncio.to_thread(post, server.url, "/update_weight_version", {"new_version": "two"})
        assert (await client.model_info())["weight_version"] == "two"
        await load(client, versions, "0")

    use(scenario)


def test_information(use: Callable[..., Any], server: Any, versions: Any) -> None:
    info = use(lambda client: client.model_info())
    assert info["model_path"] == str(versions.folder) and info["weight_version"] == "0"
    assert use(lambda client: client.ready()) is True
    for endpoint in ("/health", "/server_info"):
        with urllib.request.urlopen(server.url + endpoint, timeout=10) as response:
            assert response.status == 200


def test_a_client_that_goes_away_frees_its_place(use: Callable[..., Any], server: Any) -> None:
    async def scenario(client: ServerClient) -> None:
        await client.pause("in_place")  # so that nothing ends by itself
        task = asyncio.create_task(client.generate(PROMPT, LONG, "gone"))
        await asyncio.to_thread(wait_until, server.url, lambda running, waiting: waiting == 1)
        task.cancel()
        await asyncio.sleep(0)  # it hangs up
        await asyncio.to_thread(wait_until, server.url, lambda running, waiting: running == waiting == 0)
        await client.resume()

    use(scenario)
