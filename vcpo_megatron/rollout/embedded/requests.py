"""``/generate``: from a JSON body to sequences, and from ended sequences to the JSON answer."""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...models.tokenizer import TokenizerError, encode_text
from ..client.protocol import ProtocolError, SamplingParams, token_ids
from ..client.routed_experts import encode
from .errors import RequestError
from .sequence import SequenceState

#: Sequences of one request (prompts times n). All are queued and answered as one: more belong into further requests.
MAX_SEQUENCES = 8192
_KEYS = {
    "rid",
    "input_ids",
    "text",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "stream",
    "return_routed_experts",
    "extra_key",  # keeps caches of prefixes apart, of which this engine has none
    "return_sampling_mask",  # comes with what is refused by name, below
}


@dataclass(frozen=True)
class RequestParser:
    """What a request is checked against. ``generator`` gives unseeded requests their seeds.
    ``routed_experts``: the model's experts are captured, so they can be asked for."""

    vocab_size: int
    context_length: int
    stop_tokens: frozenset[int]
    tokenizer: Any
    generator: random.Random
    routed_experts: bool = False

    def parse(self, body: Mapping[str, Any]) -> ParsedRequest:
        """RequestError names the key and value that cannot be served."""
        body = {key: value for key, value in body.items() if value is not None}
        if body.get("stream"):
            raise RequestError("stream: true is not supported by the embedded engine")
        unknown = sorted(key for key in body if key not in _KEYS)
        if unknown:
            raise RequestError(f"{', '.join(unknown)} not supported by the embedded engine; supported: {sorted(_KEYS)}")
        try:
            return self._parse(body)
        except ProtocolError as error:
            raise RequestError(str(error)) from error

    def _parse(self, body: Mapping[str, Any]) -> ParsedRequest:
        _check_count(_list_length(body))
        prompts, is_list = self._prompts(body)
        count = len(prompts)
        with_logprob = _boolean(body, "return_logprob")
        samplings = _per_prompt(body.get("sampling_params", {}), count, is_list, "sampling_params")
        starts = _per_prompt(body.get("logprob_start_len", -1), count, is_list, "logprob_start_len")
        rids = _rids(body.get("rid"), count, is_list)
        _check_count(sum(_copies(sampling) for sampling in samplings))
        with_experts = _boolean(body, "return_routed_experts")
        if with_experts and not self.routed_experts:
            raise RequestError("return_routed_experts: start the server with --enable-return-routed-experts")
        sequences = []
        for prompt, sampling, start, rid in zip(prompts, samplings, starts, rids, strict=True):
            sequences.extend(self._sequences(prompt, sampling, start if with_logprob else -1, rid))
        for sequence in sequences:
            sequence.return_experts = with_experts
        flat = is_list or len(sequences) > 1
        return ParsedRequest(sequences, flat, with_logprob)

    def _prompts(self, body: Mapping[str, Any]) -> tuple[list[tuple[int, ...]], bool]:
        if ("input_ids" in body) == ("text" in body):
            raise RequestError("exactly one of input_ids and text is needed")
        if "text" in body:
            text = body["text"]
            texts = text if isinstance(text, list) else [text]
            if self.tokenizer is None:
                raise RequestError("text needs a tokenizer.json in the model folder: send input_ids")
            if not all(isinstance(item, str) for item in texts):
                raise RequestError("text: expected a string or a list of strings")
            prompts = [self._encode(item) for item in texts]
            is_list = isinstance(text, list)
        else:
            ids = body["input_ids"]
            is_list = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
            prompts = [
                token_ids(item, f"input_ids[{index}]" if is_list else "input_ids", self.vocab_size)
                for index, item in enumerate(ids if is_list else [ids])
            ]
        if not prompts or not all(prompts):
            raise RequestError("a prompt has at least one token")
        return prompts, is_list

    def _encode(self, text: str) -> tuple[int, ...]:
        try:
            return tuple(encode_text(self.tokenizer, text))
        except TokenizerError as error:
            raise RequestError(f"text: {error}") from error

    def _sequences(self, prompt: tuple[int, ...], sampling: object, start: object, rid: str) -> list[SequenceState]:
        assert isinstance(sampling, Mapping)  # _copies has looked
        copies = _copies(sampling)
        params = SamplingParams.from_json({key: value for key, value in sampling.items() if key != "n"})
        if params.restricted:
            raise RequestError("top_p, top_k and min_p are not supported by the embedded engine: it samples from all")
        self._check_length(len(prompt), params.max_new_tokens)
        if isinstance(start, bool) or not isinstance(start, int) or not -1 <= start < len(prompt):
            raise RequestError(f"logprob_start_len = {start!r}: expected -1 or a position of the prompt")
        stop = frozenset() if params.ignore_eos else self.stop_tokens | frozenset(params.stop_token_ids)
        names = [rid] if copies == 1 else [f"{rid}_{index}" for index in range(copies)]
        first = self.generator.getrandbits(63) if params.sampling_seed is None else params.sampling_seed
        # Copies of one seeded request must differ: the seed counts up.
        return [
            SequenceState(name, prompt, params, stop, first + index, None if start == -1 else start)
            for index, name in enumerate(names)
        ]

    def _check_length(self, prompt: int, new: int) -> None:
        if prompt > self.context_length:
            raise RequestError(f"a prompt of {prompt} tokens is longer than the context of {self.context_length}")
        if prompt + new > self.context_length:
            raise RequestError(
                f"a prompt of {prompt} tokens and max_new_tokens = {new} exceed the context of {self.context_length}"
            )


@dataclass(frozen=True)
class ParsedRequest:
    """``flat``: the answer is a list, one entry a sequence (list request, or n > 1)."""

    sequences: Sequence[SequenceState]
    flat: bool
    with_logprob: bool

    def answer(self, version: str, tokenizer: Any) -> Any:
        """JSON answer after every sequence has ended; ``version`` is the server's at that time."""
        answers = [self._one(sequence, version, tokenizer) for sequence in self.sequences]
        return answers if self.flat else answers[0]

    def _one(self, sequence: SequenceState, version: str, tokenizer: Any) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": sequence.rid,
            "finish_reason": sequence.finish,
            "prompt_tokens": len(sequence.prompt),
            "completion_tokens": len(sequence.output_ids),
            "cached_tokens": 0,
            "num_retractions": sequence.retractions,
            "weight_version": version,
            "weight_versions": [span._asdict() for span in sequence.spans],
            "e2e_latency": sequence.ended - sequence.arrived,
        }
        if self.with_logprob:
            meta["output_token_logprobs"] = [
                [logprob, token, None] for logprob, token in zip(sequence.logprobs, sequence.output_ids, strict=True)
            ]
            meta["input_token_logprobs"] = _input_logprobs(sequence)
        if sequence.return_experts and sequence.experts:
            # every token that was computed but the last of a prompt after which nothing was sampled
            rows = len(sequence.prompt) + len(sequence.output_ids) - 1
            meta["routed_experts"] = encode(np.concatenate(sequence.experts)[:rows])
        text = tokenizer.decode(sequence.output_ids) if tokenizer is not None else ""
        return {"text": text, "output_ids": sequence.output_ids, "meta_info": meta}


def _input_logprobs(sequence: SequenceState) -> list[list[Any]]:
    """[[null, id, null], [logprob, id, null], ...] from ``score_from`` on, as SGLang writes it."""
    if sequence.score_from is None or sequence.input_logprobs is None:
        return []
    tokens = sequence.prompt[sequence.score_from :]
    return [[logprob, token, None] for logprob, token in zip([None, *sequence.input_logprobs], tokens, strict=True)]


def _list_length(body: Mapping[str, Any]) -> int:
    """Prompts of a list request, known before any of them is looked at; 1 for a single one."""
    value = body.get("text", body.get("input_ids"))
    return len(value) if isinstance(value, list) and value and not isinstance(value[0], int) else 1


def _copies(sampling: object) -> int:
    """``n`` of one prompt's sampling_params."""
    if not isinstance(sampling, Mapping):
        raise RequestError(f"sampling_params: expected an object, got {sampling!r}")
    copies = sampling.get("n", 1)
    if isinstance(copies, bool) or not isinstance(copies, int) or copies < 1:
        raise RequestError(f"sampling_params: n = {copies!r}: expected an integer >= 1")
    return copies


def _check_count(sequences: int) -> None:
    if sequences > MAX_SEQUENCES:
        raise RequestError(
            f"a request of {sequences} sequences (prompts x n): at most {MAX_SEQUENCES}; send several requests"
        )


def _boolean(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key, False)
    if not isinstance(value, bool):
        raise RequestError(f"{key} = {value!r}: expected true or false")
    return value


def _per_prompt(value: Any, count: int, is_list: bool, key: str) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if not is_list or len(value) != count:
        raise RequestError(f"{key}: a list of {len(value)} for {count} prompt{'s' if count > 1 else ''}")
    return value


def _rids(value: Any, count: int, is_list: bool) -> list[str]:
    if value is None:
        return [uuid.uuid4().hex for _ in range(count)]
    rids = value if is_list else [value]
    if not isinstance(rids, list) or len(rids) != count or not all(isinstance(rid, str) and rid for rid in rids):
        expected = f"a list of {count} strings" if is_list else "a string"
        raise RequestError(f"rid = {value!r}: expected {expected}")
    return rids
