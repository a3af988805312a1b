"""The HTTP API of a rollout server, stated once: endpoints and request bodies; what is answered is in ``replies``.

It is SGLang's native API (0.5.23), of which the embedded engine speaks the part that training needs.
No torch and no HTTP library here: the client, the embedded server and the tests all read this file.

SGLang ignores unknown top-level keys silently, so the builders here are the only place that spells
keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

GENERATE = "/generate"
PAUSE_GENERATION = "/pause_generation"
CONTINUE_GENERATION = "/continue_generation"
ABORT_REQUEST = "/abort_request"
FLUSH_CACHE = "/flush_cache"
BEGIN_WEIGHT_UPDATE = "/begin_weight_update"
END_WEIGHT_UPDATE = "/end_weight_update"
UPDATE_WEIGHTS_FROM_TENSOR = "/update_weights_from_tensor"
UPDATE_WEIGHTS_FROM_DISTRIBUTED = "/update_weights_from_distributed"
INIT_WEIGHTS_UPDATE_GROUP = "/init_weights_update_group"
DESTROY_WEIGHTS_UPDATE_GROUP = "/destroy_weights_update_group"
UPDATE_WEIGHTS_FROM_DISK = "/update_weights_from_disk"
UPDATE_WEIGHT_VERSION = "/update_weight_version"
WEIGHTS_CHECKER = "/weights_checker"
MODEL_INFO = "/model_info"
SERVER_INFO = "/server_info"
HEALTH = "/health"
READY = "/ready"
LOADS = "/v1/loads"
WORKERS = "/workers"  # an sglang-router's alone

PauseMode = Literal["abort", "retract", "in_place"]
PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "retract", "in_place")

#: SGLang's --sampling-mask-max-tokens, by default.
MAX_TOP_K = 4096
#: A temperature at which no policy is certain of a token: logits would have to differ by tens of thousands.
FLAT = 1000.0
#: Seeds are non-negative and fit a signed 64-bit integer.
MAX_SEED = 2**63 - 1


class ProtocolError(ValueError):
    """A request or a reply does not follow the protocol; the message names the field."""


class ImpossibleLogprobs(ProtocolError):
    """Log-probs that no softmax gives: nothing is wrong with the request, the server computes something else."""


def _integer(value: object, name: str, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        bound = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
        raise ProtocolError(f"{name} = {value!r}: expected {bound}")
    return value


def check_number(value: object, name: str, expected: str, fits: Callable[[float], bool]) -> None:
    """ProtocolError, which says what was ``expected``, unless ``value`` is a finite number that ``fits``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and fits(value)):
        raise ProtocolError(f"{name} = {value!r}: expected {expected}")


def token_ids(value: object, name: str, vocab_size: int | None = None) -> tuple[int, ...]:
    """``value`` as a tuple of token ids; ProtocolError names the first that is no id in [0, vocab_size)."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ProtocolError(f"{name} = {value!r}: expected a list of token ids")
    high = None if vocab_size is None else vocab_size - 1
    # A loop in Python over every token is most of what an answer costs: it only looks for what is wrong.
    if set(map(type, value)) <= {int} and (not value or (min(value) >= 0 and (high is None or max(value) <= high))):
        return tuple(value)
    for index, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0 or (high is not None and token > high):
            within = "a non-negative integer" if high is None else f"an id of the vocabulary, 0..{high}"
            raise ProtocolError(f"{name}[{index}] = {token!r} is not {within}")
    return tuple(value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an answer is sampled; the part of SGLang's ``sampling_params`` that training uses.

    temperature 0 is greedy, with log-probs at temperature 1, as in SGLang. ``ignore_eos`` turns off
    every stop token, ``stop_token_ids`` included. ``sampling_seed`` makes the draw of each token a
    function of (seed, position in the answer), whatever else the server runs.

    ``top_p`` below 1, ``top_k`` (-1: all) and ``min_p`` above 0 leave only part of the vocabulary to sample from. The
    log-probs of an answer are then those of what is left, renormalised: what the token was really sampled with. SGLang
    tells them only where ``top_k`` is in [2, 4096], so that is asked for with the other two as well.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    sampling_seed: int | None = None
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0

    def __post_init__(self) -> None:
        _integer(self.max_new_tokens, "max_new_tokens", 0)
        check_number(self.temperature, "temperature", "a number >= 0", lambda value: value >= 0)
        check_number(self.top_p, "top_p", "a number above 0 and at most 1", lambda value: 0 < value <= 1)
        check_number(self.min_p, "min_p", "a number in [0, 1]", lambda value: 0 <= value <= 1)
        if self.restricted and self.top_k == -1:
            raise ProtocolError(f"top_p = {self.top_p}, min_p = {self.min_p}: need a top_k of 2 to {MAX_TOP_K} as well")
        if self.restricted:
            _integer(self.top_k, "top_k", 2, MAX_TOP_K)
        if not isinstance(self.ignore_eos, bool):
            raise ProtocolError(f"ignore_eos = {self.ignore_eos!r}: expected true or false")
        object.__setattr__(self, "stop_token_ids", token_ids(self.stop_token_ids, "stop_token_ids"))
        if self.sampling_seed is not None:
            _integer(self.sampling_seed, "sampling_seed", 0, MAX_SEED)

    @property
    def restricted(self) -> bool:
        """Whether only part of the vocabulary is sampled from. (Greedy sampling takes the best token in any case.)"""
        return self.top_p < 1 or self.top_k != -1 or self.min_p > 0

    def to_json(self) -> dict[str, Any]:
        """Keys of ``sampling_params``; optional ones only where they differ from the default."""
        body: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.stop_token_ids:
            body["stop_token_ids"] = list(self.stop_token_ids)
        if self.sampling_seed is not None:
            body["sampling_seed"] = self.sampling_seed
        for name, everything in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
            if getattr(self, name) != everything:
                body[name] = getattr(self, name)
        return body

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> SamplingParams:
        """Inverse of ``to_json``; ProtocolError names an unknown key or a bad value."""
        unknown = sorted(set(body) - set(cls.__slots__))
        if unknown:
            raise ProtocolError(
                f"sampling_params: {', '.join(unknown)} not supported; supported: {', '.join(cls.__slots__)}, n"
            )
        values = {key: value for key, value in body.items() if value is not None}
        return cls(**values)


class Span(NamedTuple):
    """Positions [start, end) of the answer were sampled by weights ``version``."""

    start: int
    end: int
    version: str


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """One answer. ``logprobs[t]`` is log mu(output_ids[t] | ...) at the sampling temperature.

    ``spans`` tile [0, len(output_ids)); ``finish_reason`` is "stop" (the stop token is the last of
    ``output_ids``), "length" or "abort" (``output_ids`` holds what was sampled until then). ``routed_experts``
    are those of every token of prompt and answer but the last, uint8 or uint16 [P + G - 1, layers, k], where asked for.
    """

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    finish_reason: str
    routed_experts: np.ndarray | None = None


# ---------------------------------------------------------------- request bodies


def generate_body(
    input_ids: Sequence[int], sampling: SamplingParams, rid: str, cache_key: str | None = None
) -> dict[str, Any]:
    """Body of ``/generate`` for one prompt. Prefixes are shared only between requests of one ``cache_key``."""
    body = {"rid": rid, "input_ids": list(input_ids), "sampling_params": sampling.to_json(), "return_logprob": True}
    return _with_options(body, [sampling], cache_key)


def generate_batch_body(
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingParams],
    rids: Sequence[str] | None = None,
    cache_key: str | None = None,
) -> dict[str, Any]:
    """Body of ``/generate`` for an ordered list of prompts, one SamplingParams each."""
    if not prompts or len(prompts) != len(samplings) or (rids is not None and len(rids) != len(prompts)):
        raise ProtocolError(
            f"a batch needs as many sampling params and request ids as prompts, and at least one prompt: got "
            f"{len(prompts)} prompts, {len(samplings)} sampling params, {'no' if rids is None else len(rids)} ids"
        )
    body: dict[str, Any] = {
        "input_ids": [list(prompt) for prompt in prompts],
        "sampling_params": [sampling.to_json() for sampling in samplings],
        "return_logprob": True,
    }
    if rids is not None:
        body["rid"] = list(rids)
    return _with_options(body, samplings, cache_key)


def _with_options(body: dict[str, Any], samplings: Sequence[SamplingParams], cache_key: str | None) -> dict[str, Any]:
    if any(sampling.restricted for sampling in samplings):
        body["return_sampling_mask"] = True
    if cache_key is not None:
        body["extra_key"] = cache_key
    return body


def score_body(tokens: Sequence[int]) -> dict[str, Any]:
    """Body of ``/generate`` that asks for the log-probs of ``tokens`` and samples nothing."""
    return {
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def pause_body(mode: PauseMode) -> dict[str, Any]:
    if mode not in PAUSE_MODES:
        raise ProtocolError(f"pause mode {mode!r}: expected one of {', '.join(PAUSE_MODES)}")
    return {"mode": mode}


def abort_body(rid: str | None) -> dict[str, Any]:
    """Body of ``/abort_request``; None aborts every request."""
    return {"abort_all": True} if rid is None else {"rid": rid}


def update_weights_from_tensor_body(
    bucket: bytes, version: str, flush_cache: bool = False
) -> tuple[bytes, bytes, bytes]:
    """JSON text of one ``/update_weights_from_tensor``, in pieces; ``bucket``, base64 text, is one of them as it is.

    Buckets are large, and one goes to many servers at once: nothing copies it.
    """
    if not bucket or not bucket.isascii() or b'"' in bucket or b"\\" in bucket:
        raise ProtocolError("a weight bucket is not base64 text")
    rest = json.dumps({"load_format": None, "flush_cache": flush_cache, "weight_version": version})
    return b'{"serialized_named_tensors": ["', bucket, b'"], ' + rest[1:].encode()


#: In the name of a tensor that servers compute for themselves: it is received like any other, and not loaded. SGLang
#: 0.5.23 passes over it in the models of every family that is trained here (their ``load_weights``).
COMPUTED = "rotary_emb.inv_freq"
#: One number that no model takes: what a group is tried with.
TRIAL: Sequence[tuple[str, str, Sequence[int]]] = ((f"vcpo.trial.{COMPUTED}", "bfloat16", (1,)),)


def update_weights_from_distributed_body(
    entries: Sequence[Sequence[Any]], group_name: str, version: str | None, flush_cache: bool = False
) -> dict[str, Any]:
    """Body of ``/update_weights_from_distributed`` for one flattened bucket of [name, dtype, shape] entries; without a
    ``version`` that of the weights stays."""
    names, dtypes, shapes = (list(column) for column in zip(*entries, strict=True))
    return {
        "names": names,
        "dtypes": dtypes,
        "shapes": shapes,
        "group_name": group_name,
        "flush_cache": flush_cache,
        "weight_version": version,
        "load_format": "flattened_bucket",
    }


def init_weights_update_group_body(
    address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
) -> dict[str, Any]:
    """Body of ``/init_weights_update_group``: a server's tensor-parallel ranks are rank_offset, rank_offset + 1, ..."""
    return {
        "master_address": address,
        "master_port": port,
        "rank_offset": rank_offset,
        "world_size": world_size,
        "group_name": group_name,
        "backend": backend,
    }


def unknown_weights_body() -> dict[str, Any]:
    """Body of ``/update_weight_version`` for weights that are no version of a run; ends what is in flight."""
    return {"new_version": "unknown", "abort_all_requests": True}


def update_weights_from_disk_body(path: str, version: str, flush_cache: bool = False) -> dict[str, Any]:
    """Body of ``/update_weights_from_disk``."""
    return {"model_path": path, "weight_version": version, "flush_cache": flush_cache}
