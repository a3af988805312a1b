"""Strict parsers of what a rollout server answers (``protocol`` has what it is asked).

A server may leave out what was not asked for, so the parsers check everything they return. No torch and no HTTP library
here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...types import PolicyVersion
from .protocol import GenerateResult, ImpossibleLogprobs, ProtocolError, SamplingParams, Span, check_number, token_ids

FINISH_REASONS = ("stop", "length", "abort")

#: A log-prob may exceed 0 by so much.
_ROUNDING = 1e-4
#: Log-probs are kept as float32, whose lowest number this is.
_LOWEST = -3.4028234663852886e38
#: Logarithm of the smallest number above 0 in float32: a token that is less likely is never sampled, be it once in all
#: tokens that were ever sampled. What is scored, and was not sampled, may be.
_LOWEST_SAMPLED = -104.0
#: Splits that a server must not have -> why.
_REFUSED = {
    "dp_size": "its replicas share one address; start each as a server of its own",
    "pp_size": "weights are broadcast to tensor-parallel ranks, by which SGLang numbers its members of a group",
}


class UnsupportedServer(RuntimeError):
    """The server answers, but cannot do what training needs; one line for the user."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """``ranks``: tensor-parallel ones, each a member of a group for weights. ``on_gpus``: parameters lie on GPUs, where
    SGLang hashes them in another way."""

    ranks: int = 1
    on_gpus: bool = False

    @classmethod
    def parse(cls, reply: Mapping[str, object], where: str) -> ServerInfo:
        """What it does not say is the default; UnsupportedServer for a split that is not taken."""
        sizes = {name: reply.get(name, 1) for name in ("tp_size", *_REFUSED)}
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UnsupportedServer(f"{where} says {name} = {size!r}: expected a positive number")
            if size > 1 and name in _REFUSED:
                raise UnsupportedServer(f"{where} has {name} = {size}: {_REFUSED[name]}")
        ranks = sizes["tp_size"]
        assert isinstance(ranks, int)
        return cls(ranks, reply.get("device", "cpu") != "cpu")


def _field(reply: object, name: str, where: str) -> Any:
    if not isinstance(reply, Mapping) or name not in reply:
        raise ProtocolError(f"{where} has no {name!r}")
    return reply[name]


def parse_generate(
    reply: object, vocab_size: int | None = None, sampling: SamplingParams | None = None
) -> GenerateResult:
    """One answer of ``/generate``; ProtocolError when anything that training needs is missing or inconsistent.

    ``sampling``: what was asked for, so many tokens at most. Where it leaves only part of the vocabulary to sample
    from, the log-probs are those of that part, and an answer without them is refused.
    """
    output_ids = token_ids(_field(reply, "output_ids", "generate reply"), "output_ids", vocab_size)
    if sampling is not None and len(output_ids) > sampling.max_new_tokens:
        asked = f"max_new_tokens = {sampling.max_new_tokens} were asked for"
        raise ProtocolError(f"output_ids: {len(output_ids)} tokens where at most {asked}")
    meta = _field(reply, "meta_info", "generate reply")
    reason = _field(meta, "finish_reason", "meta_info")
    finish = _field(reason, "type", "finish_reason")
    if finish not in FINISH_REASONS:
        raise ProtocolError(f"finish_reason.type {finish!r}: expected one of {', '.join(FINISH_REASONS)}")
    logprobs: tuple[float, ...] = ()
    spans: tuple[Span, ...] = ()
    if output_ids:
        entries = _field(meta, "output_token_logprobs", "meta_info")
        logprobs = _logprobs(entries, output_ids, "output_token_logprobs", _LOWEST_SAMPLED)
        if sampling is not None and sampling.restricted:
            logprobs = _restricted_logprobs(meta, len(output_ids))
        spans = _spans(meta, len(output_ids))
    if finish == "stop":
        _check_stop(reason, output_ids)
    return GenerateResult(output_ids, logprobs, spans, finish)


def parse_generate_batch(
    reply: object, samplings: Sequence[SamplingParams], vocab_size: int | None = None
) -> list[GenerateResult]:
    """Answers of a list request, in its order; ``samplings`` are those of its prompts."""
    count = len(samplings)
    if not isinstance(reply, list) or len(reply) != count:
        got = f"{len(reply)} answers" if isinstance(reply, list) else type(reply).__name__
        raise ProtocolError(f"generate reply: expected a list of {count} answers, got {got}")
    return [parse_generate(item, vocab_size, sampling) for item, sampling in zip(reply, samplings, strict=True)]


def parse_score(reply: object, tokens: Sequence[int], vocab_size: int | None = None) -> list[float]:
    """Log-probs [L-1] of ``tokens[1:]`` from the answer to ``score_body``.

    SGLang echoes the last id of the vocabulary as 0, beside the right log-prob.
    """
    entries = _field(_field(reply, "meta_info", "generate reply"), "input_token_logprobs", "meta_info")
    if not isinstance(entries, list) or len(entries) != len(tokens):
        raise ProtocolError(f"input_token_logprobs: expected {len(tokens)} entries")
    echoed = [
        0 if vocab_size is not None and token == vocab_size - 1 and _echo(entry) == 0 else token
        for token, entry in zip(tokens, entries, strict=True)
    ]
    return list(_logprobs(entries[1:], echoed[1:], "input_token_logprobs"))


def _echo(entry: object) -> object:
    """The token of [logprob, token, text]."""
    return entry[1] if isinstance(entry, Sequence) and len(entry) > 1 else None


def parse_success(reply: object) -> str:
    """Message of a control reply {success, message}; ProtocolError when it is not a success."""
    message = str(reply.get("message", "")) if isinstance(reply, Mapping) else repr(reply)
    if isinstance(reply, Mapping) and reply.get("success", True) is True:
        return message
    raise ProtocolError(f"refused: {message}")


def parse_checksums(reply: object) -> list[dict[str, str]]:
    """Checksums by parameter name, one dict a rank of the server, from the answer of ``/weights_checker``."""
    parse_success(reply)
    ranks = _field(reply, "ranks", "weights_checker reply")
    found = [_field(rank, "checksums", "weights_checker reply") for rank in ranks]
    if not found or not all(isinstance(rank, Mapping) and rank for rank in found):
        raise ProtocolError("weights_checker reply holds no checksums")
    return [dict(rank) for rank in found]


def parse_loads(reply: object) -> int:
    """Requests that a server runs or has queued, from what it answers to ``/v1/loads`` or ``/get_load``: an entry for
    each of its replicas."""
    entries = reply.get("loads") if isinstance(reply, Mapping) else reply
    if not isinstance(entries, list):
        return 0
    names = ("num_running_reqs", "num_reqs", "num_waiting_reqs")
    counts = [entry.get(name) for entry in entries if isinstance(entry, Mapping) for name in names]
    return sum(count for count in counts if isinstance(count, int) and count > 0)


def other_run(label: str, run: str) -> str | None:
    """The run that weights of the name ``label`` belong to, if it is another one than ``run``."""
    try:
        named = PolicyVersion.parse(label).run
    except ValueError:
        return None
    return named if named and named != run else None


def router_workers(reply: object) -> dict[str, str] | None:
    """Address -> id of the workers of an sglang-router, from what it answers to ``/workers``; None for no router."""
    workers = reply.get("workers") if isinstance(reply, Mapping) else None
    if not isinstance(workers, list):
        return None
    found = [worker for worker in workers if isinstance(worker, Mapping)]
    return {str(worker.get("url")).rstrip("/"): str(worker.get("id")) for worker in found}


def _check_stop(reason: Mapping[str, Any], output_ids: Sequence[int]) -> None:
    """A stop token is part of the answer: it was sampled, so the learner counts it as well."""
    matched = reason.get("matched")  # a text where a string stopped it
    if isinstance(matched, int) and (not output_ids or output_ids[-1] != matched):
        raise ProtocolError(f"finish_reason {reason!r}: the stop token is not the last of output_ids")


def _restricted_logprobs(meta: object, count: int) -> tuple[float, ...]:
    """Renormalised log-probs of an answer that was sampled from part of the vocabulary."""
    name = "output_token_sampling_logprobs"
    values = _field(meta, name, "meta_info")
    if not isinstance(values, list) or len(values) != count:
        got = len(values) if isinstance(values, list) else repr(values)
        raise ProtocolError(f"{name}: {got} entries for {count} tokens")
    for index, value in enumerate(values):
        check_number(value, f"{name}[{index}]", "a log-prob", lambda logprob: True)
        _check_possible(value, f"{name}[{index}]", _LOWEST_SAMPLED)
    return tuple(float(value) for value in values)


def _check_possible(logprob: float, name: str, lowest: float) -> None:
    if not lowest <= logprob <= _ROUNDING:
        bound = f"above 0 by more than rounding ({_ROUNDING:g})" if logprob > 0 else f"below {lowest:g}"
        raise ImpossibleLogprobs(f"{name} = {logprob!r}: is {bound}; no softmax gives that to a token that it samples")


def _logprobs(entries: object, tokens: Sequence[int], name: str, lowest: float = _LOWEST) -> tuple[float, ...]:
    """Values of [[logprob, id, text], ...], checked against the tokens they belong to: ``lowest`` at least."""
    if not isinstance(entries, list) or len(entries) != len(tokens):
        got = len(entries) if isinstance(entries, list) else repr(entries)
        raise ProtocolError(f"{name}: {got} entries for {len(tokens)} tokens")
    if set(map(type, entries)) == {list} and min(map(len, entries)) > 1:  # as in ``token_ids``
        found = [entry[0] for entry in entries]
        if set(map(type, found)) == {float} and all(map(math.isfinite, found)) and _possible(found, lowest):
            if all(map(operator.eq, (entry[1] for entry in entries), tokens)):
                return tuple(found)
    values = []
    for index, (entry, token) in enumerate(zip(entries, tokens, strict=True)):
        if not isinstance(entry, Sequence) or len(entry) < 2 or entry[1] != token:
            raise ProtocolError(f"{name}[{index}] = {entry!r}: expected [logprob, {token}, text]")
        value = entry[0]
        if isinstance(value, bool) or not isinstance(value, int | float) or not _LOWEST <= value < math.inf:
            raise ProtocolError(f"{name}[{index}]: log-prob {value!r} of token {token} is not a finite number")
        _check_possible(value, f"{name}[{index}]", lowest)
        values.append(float(value))
    return tuple(values)


def _possible(logprobs: Sequence[float], lowest: float) -> bool:
    return min(logprobs) >= lowest and max(logprobs) <= _ROUNDING


def _spans(meta: object, length: int) -> tuple[Span, ...]:
    spans = []
    position = 0
    for entry in _field(meta, "weight_versions", "meta_info"):
        start, end = _field(entry, "start", "weight_versions"), _field(entry, "end", "weight_versions")
        if start != position or not isinstance(end, int) or end <= start:
            raise ProtocolError(f"weight_versions {meta['weight_versions']!r} do not tile {length} tokens")  # type: ignore[index]
        spans.append(Span(start, end, str(_field(entry, "version", "weight_versions"))))
        position = end
    if position != length:
        raise ProtocolError(f"weight_versions {meta['weight_versions']!r} do not tile {length} tokens")  # type: ignore[index]
    return tuple(spans)
