"""Bodies against SGLang's documented keys, and replies that must be refused."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest

from vcpo_megatron.rollout.client import protocol, replies
from vcpo_megatron.rollout.client.protocol import (
    GenerateResult,
    ImpossibleLogprobs,
    ProtocolError,
    SamplingParams,
    Span,
)

#: Fields of SGLang 0.5.23's requests, written out: unknown top-level keys pass there silently.
SGLANG_KEYS = {
    "/generate": {
        "rid",
        "input_ids",
        "text",
        "sampling_params",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "token_ids_logprob",
        "stream",
        "return_routed_experts",
        "return_sampling_mask",
        "return_prompt_token_ids",
        "priority",
        "extra_key",
        "cache_salt",
        "session_id",
        "lora_path",
        "routing_key",
    },
    "sampling_params": {
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "min_new_tokens",
        "stop",
        "stop_token_ids",
        "stop_regex",
        "ignore_eos",
        "skip_special_tokens",
        "no_stop_trim",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
        "sampling_seed",
        "json_schema",
        "regex",
        "ebnf",
    },
    "/pause_generation": {"mode"},
    "/abort_request": {"rid", "abort_all"},
    "/update_weights_from_tensor": {
        "serialized_named_tensors",
        "load_format",
        "flush_cache",
        "abort_all_requests",
        "weight_version",
    },
}

FULL = SamplingParams(7, 0.5, ignore_eos=True, stop_token_ids=(1, 2), sampling_seed=9, top_p=0.9, top_k=5, min_p=0.1)


def test_bodies_use_keys_that_sglang_knows() -> None:
    tensor = json.loads(b"".join(protocol.update_weights_from_tensor_body(b"QUJD", "1.4")))
    bodies = {
        "/generate": [
            protocol.generate_body([1], FULL, "r", "1.4"),
            protocol.generate_batch_body([[1], [2]], [FULL, FULL], ["a", "b"], "1.4"),
            protocol.score_body([1, 2]),
        ],
        "/pause_generation": [protocol.pause_body("retract")],
        "/abort_request": [protocol.abort_body("r"), protocol.abort_body(None)],
        "/update_weights_from_tensor": [tensor],
    }
    for endpoint, made in bodies.items():
        for body in made:
            assert set(body) <= SGLANG_KEYS[endpoint]
            for sampling in _list(body.get("sampling_params", [])):
                assert set(sampling) <= SGLANG_KEYS["sampling_params"]
    assert tensor == {
        "serialized_named_tensors": ["QUJD"],
        "load_format": None,
        "flush_cache": False,
        "weight_version": "1.4",
    }


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def test_generate_body_is_what_it_says() -> None:
    assert protocol.generate_body((5, 6), FULL, "g/0") == {
        "rid": "g/0",
        "input_ids": [5, 6],
        "sampling_params": {
            "max_new_tokens": 7,
            "temperature": 0.5,
            "ignore_eos": True,
            "stop_token_ids": [1, 2],
            "sampling_seed": 9,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
        },
        "return_logprob": True,
        "return_sampling_mask": True,
    }
    assert protocol.generate_body([5], SamplingParams(3), "r", "1.4") == {
        "rid": "r",
        "input_ids": [5],
        "sampling_params": {"max_new_tokens": 3, "temperature": 1.0},
        "return_logprob": True,
        "extra_key": "1.4",
    }
    assert protocol.score_body([4, 5]) == {
        "input_ids": [4, 5],
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def test_sampling_params_survive_the_wire() -> None:
    for params in (SamplingParams(), FULL):
        assert SamplingParams.from_json(json.loads(json.dumps(params.to_json()))) == params


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": 3}, "max_tokens"),
        ({"top_p": 0.9}, "top_p = 0.9, min_p = 0.0: need a top_k of 2 to 4096"),
        ({"min_p": 0.1}, "need a top_k"),
        ({"top_p": 0.0, "top_k": 5}, "top_p = 0.0"),
        ({"min_p": 1.5, "top_k": 5}, "min_p = 1.5"),
        ({"top_k": 1}, "top_k = 1"),
        ({"top_k": 4097}, "top_k = 4097"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stop_token_ids": [1, -2]}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"sampling_seed": -1}, "sampling_seed"),
        ({"sampling_seed": 2**63}, "sampling_seed"),
    ],
)
def test_bad_sampling_params(body: dict[str, Any], named: str) -> None:
    with pytest.raises(ProtocolError, match=named):
        SamplingParams.from_json(body)


@pytest.mark.parametrize("bucket", [b"", b'AA"BB', b"AA\\BB", "ä".encode()])
def test_a_bucket_is_base64_text(bucket: bytes) -> None:
    with pytest.raises(ProtocolError, match="base64"):
        protocol.update_weights_from_tensor_body(bucket, "1.0")


def test_a_batch_needs_matching_lists() -> None:
    for prompts, samplings, rids in (([], [], None), ([[1]], [], None), ([[1]], [FULL], ["a", "b"])):
        with pytest.raises(ProtocolError, match="batch"):
            protocol.generate_batch_body(prompts, samplings, rids)


REPLY: dict[str, Any] = {
    "text": "",
    "output_ids": [7, 8, 9],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 9},
        "weight_versions": [{"version": "1.0", "start": 0, "end": 2}, {"version": "1.1", "start": 2, "end": 3}],
        "output_token_logprobs": [[-0.5, 7, None], [-1, 8, None], [0.0, 9, None]],
    },
}


def test_a_reply_is_read() -> None:
    assert replies.parse_generate(REPLY, 10) == GenerateResult(
        (7, 8, 9), (-0.5, -1.0, 0.0), (Span(0, 2, "1.0"), Span(2, 3, "1.1")), "stop"
    )
    aborted = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}
    assert replies.parse_generate(aborted) == GenerateResult((), (), (), "abort")


def test_sampling_from_a_part_has_the_renormalised_logprobs() -> None:
    restricted = changed("meta_info.output_token_sampling_logprobs", [-0.1, -0.2, 0.0])
    assert replies.parse_generate(restricted, 10, FULL).logprobs == (-0.1, -0.2, 0.0)
    assert replies.parse_generate(restricted, 10, SamplingParams()).logprobs == (-0.5, -1.0, 0.0)
    for reply in (
        REPLY,
        changed("meta_info.output_token_sampling_logprobs", [-0.1, -0.2]),
        changed("meta_info.output_token_sampling_logprobs", [-0.1, None, -0.2]),
        changed("meta_info.output_token_sampling_logprobs", [-0.1, 0.5, -0.2]),
    ):
        with pytest.raises(ProtocolError, match="output_token_sampling_logprobs"):
            replies.parse_generate(reply, 10, FULL)


def changed(path: str, value: Any) -> dict[str, Any]:
    """REPLY with the place ``path`` set to ``value``; the value ... removes it."""
    reply = copy.deepcopy(REPLY)
    *parents, last = path.split(".")
    place = reply
    for name in parents:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return reply


def span(*pairs: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"version": "1.0", "start": start, "end": end} for start, end in pairs]


@pytest.mark.parametrize(
    ("reply", "named"),
    [
        (changed("output_ids", ...), "output_ids"),
        (changed("output_ids", [7, 8, 10]), "10"),
        (changed("output_ids", [7, 8]), "3 entries for 2"),
        (changed("output_ids", [7, 8, 6]), "expected"),
        (changed("meta_info", ...), "meta_info"),
        (changed("meta_info.finish_reason", None), "type"),
        (changed("meta_info.finish_reason", {"type": "error"}), "error"),
        (changed("meta_info.finish_reason", {"type": "stop", "matched": 8}), "stop token is not the last"),
        (changed("meta_info.output_token_logprobs", ...), "output_token_logprobs"),
        (changed("meta_info.output_token_logprobs", REPLY["meta_info"]["output_token_logprobs"][:2]), "2 entries"),
        (changed("meta_info.output_token_logprobs", [[None, 7], [-1, 8], [0, 9]]), "None"),
        (changed("meta_info.output_token_logprobs", [[float("nan"), 7], [-1, 8], [0, 9]]), "nan"),
        (changed("meta_info.output_token_logprobs", [[-math.inf, 7], [-1.0, 8], [0.0, 9]]), "-inf"),
        (changed("meta_info.output_token_logprobs", [[-1e39, 7], [-1.0, 8], [0.0, 9]]), "-1e[+]39"),  # no float32
        (changed("meta_info.output_token_logprobs", [[-0.5, 7], [-1.0, 8], [0.0, 9], [0.0, 9]]), "4 entries"),
        (changed("meta_info.weight_versions", ...), "weight_versions"),
        (changed("meta_info.weight_versions", []), "tile"),
        (changed("meta_info.weight_versions", span((0, 4))), "tile"),
        (changed("meta_info.weight_versions", span((1, 3))), "tile"),
        (changed("meta_info.weight_versions", span((0, 2))), "tile"),
        (changed("meta_info.weight_versions", span((0, 2), (1, 3))), "tile"),
        (changed("meta_info.weight_versions", span((0, 0), (0, 3))), "tile"),
        ([REPLY], "output_ids"),
    ],
)
def test_a_reply_that_lacks_something_is_refused(reply: Any, named: str) -> None:
    with pytest.raises(ProtocolError, match=named):
        replies.parse_generate(reply, 10)


#: log-probs of three sampled tokens -> the one that is refused
IMPOSSIBLE = [
    ([3.0, -1.0, -2.0], r"\[0\] = 3.0"),
    ([-0.5, -9999.0, -2.0], r"\[1\] = -9999.0"),
    ([-0.5, -1.0, 2e-4], r"\[2\] = 0.0002"),
    ([-0.5, -104.5, -1.0], r"\[1\] = -104.5"),
    ([-0.5, -1, 7], r"\[2\] = 7"),
    ([-3.4028234663852886e38, -1.0, -1.0], r"\[0\] = -3.4.*"),  # what SGLang makes of a probability of 0
]


@pytest.mark.parametrize(("values", "named"), IMPOSSIBLE)
def test_log_probs_that_no_softmax_gives_to_what_it_samples_are_refused(values: list[Any], named: str) -> None:
    plain = changed("meta_info.output_token_logprobs", [[value, 7 + at, None] for at, value in enumerate(values)])
    with pytest.raises(ImpossibleLogprobs, match=f"output_token_logprobs{named}: .*no softmax"):
        replies.parse_generate(plain, 10, SamplingParams())
    restricted = changed("meta_info.output_token_sampling_logprobs", values)
    with pytest.raises(ImpossibleLogprobs, match=f"output_token_sampling_logprobs{named}: .*no softmax"):
        replies.parse_generate(restricted, 10, FULL)


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0], [9e-5, -0.0, -1e-7], [-103.9, -50.0, -1e-30]])
def test_log_probs_at_the_limit_are_taken(values: list[float]) -> None:
    """All 0 is what a policy that is certain gives: whether it is one is asked elsewhere."""
    reply = changed("meta_info.output_token_logprobs", [[value, 7 + at, None] for at, value in enumerate(values)])
    assert replies.parse_generate(reply, 10, SamplingParams()).logprobs == tuple(values)


def test_more_tokens_than_were_asked_for_are_refused() -> None:
    assert replies.parse_generate(REPLY, 10, SamplingParams(max_new_tokens=3)).output_ids == (7, 8, 9)
    with pytest.raises(ProtocolError, match="3 tokens .*max_new_tokens = 2"):
        replies.parse_generate(REPLY, 10, SamplingParams(max_new_tokens=2))


def test_batch_replies_are_counted() -> None:
    assert len(replies.parse_generate_batch([REPLY, REPLY], [SamplingParams()] * 2)) == 2
    for reply in ([REPLY], REPLY):
        with pytest.raises(ProtocolError, match="list of 2"):
            replies.parse_generate_batch(reply, [SamplingParams()] * 2)


def test_scores_are_read() -> None:
    reply = {"meta_info": {"input_token_logprobs": [[None, 5, None], [-1.5, 6, None], [-2.5, 7, None]]}}
    assert replies.parse_score(reply, [5, 6, 7]) == [-1.5, -2.5]
    clipped = {"meta_info": {"input_token_logprobs": [[None, 0, None], [-1.5, 0, None], [-2.5, 7, None]]}}
    assert replies.parse_score(clipped, [9, 9, 7], vocab_size=10) == [-1.5, -2.5]  # SGLang echoes the last id as 0
    with pytest.raises(ProtocolError, match="expected"):
        replies.parse_score(clipped, [9, 8, 7], vocab_size=10)
    unlikely = {"meta_info": {"input_token_logprobs": [[None, 5, None], [-250.0, 6, None]]}}
    assert replies.parse_score(unlikely, [5, 6]) == [-250.0]  # it was not sampled
    with pytest.raises(ImpossibleLogprobs, match="= 0.5"):
        replies.parse_score({"meta_info": {"input_token_logprobs": [[None, 5], [0.5, 6]]}}, [5, 6])
    with pytest.raises(ProtocolError, match="expected 2"):
        replies.parse_score(reply, [5, 6])
    with pytest.raises(ProtocolError, match="expected"):
        replies.parse_score(reply, [5, 6, 8])


def test_control_replies() -> None:
    assert replies.parse_success({"success": True, "message": "m"}) == "m"
    with pytest.raises(ProtocolError, match="no session"):
        replies.parse_success({"success": False, "message": "no session"})
