"""Tokens a second of the embedded engine against transformers' batched ``generate``: same model, machine and work.

The work is a list of prompts with one answer length each. The engine serves it to a fixed number of
clients that each send the next request when theirs is answered; transformers takes it in batches of
that number, left-padded, each batch until its longest answer is done. Only tokens that were asked for
count. The two sides take turns (A B A B ...), and medians are compared.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vcpo_megatron.rollout.client.http import ServerClient
from vcpo_megatron.rollout.client.protocol import SamplingParams
from vcpo_megatron.transport.child import last_error, start_child, stop_child

START_S = 120.0
PROMPT_TOKENS = (8, 32)
ANSWER_TOKENS = (16, 128)


class BenchmarkError(RuntimeError):
    """The comparison cannot be made; one line for the user."""


@dataclass(frozen=True)
class RequestSpec:
    """One request: prompt token ids, and how many tokens its answer has."""

    prompt: tuple[int, ...]
    new_tokens: int


@dataclass(frozen=True)
class ThroughputComparison:
    """Tokens a second of each run of both sides at one concurrency, and the ratio of their medians."""

    concurrency: int
    requests: int
    tokens: int
    engine: tuple[float, ...]
    transformers: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return statistics.median(self.engine) / statistics.median(self.transformers)

    def as_dict(self) -> dict[str, Any]:
        medians = {
            "engine_median": statistics.median(self.engine),
            "transformers_median": statistics.median(self.transformers),
        }
        return {**asdict(self), **medians, "ratio": self.ratio}


def make_work(count: int, vocab_size: int, seed: int) -> list[RequestSpec]:
    """``count`` requests of uniformly mixed prompt and answer lengths."""
    draw = random.Random(seed)
    return [
        RequestSpec(
            tuple(draw.randrange(vocab_size) for _ in range(draw.randint(*PROMPT_TOKENS))), draw.randint(*ANSWER_TOKENS)
        )
        for _ in range(count)
    ]


@contextmanager
def engine_server(model: Path, log: Path, max_running: int, *options: str, start_s: float = START_S) -> Iterator[str]:
    """URL of an embedded engine that serves ``model`` for the length of the block; ``options`` of its command."""
    command = [
        sys.executable,
        "-m",
        "vcpo_megatron.rollout.embedded",
        "--model-path",
        str(model),
        "--port",
        "0",
        "--max-running-requests",
        str(max_running),
        "--random-seed",
        "0",
        *options,
    ]
    root = str(Path(__file__).resolve().parents[2])
    process = start_child(command, env={"PYTHONUNBUFFERED": "1", "PYTHONPATH": root}, log=log)
    try:
        deadline = time.monotonic() + start_s
        while " at http://" not in log.read_text():
            if process.poll() is not None:
                raise BenchmarkError(f"the engine did not start: {last_error(log)}")
            if time.monotonic() > deadline:
                raise BenchmarkError(f"the engine did not start within {start_s:g} s, see {log}")
            time.sleep(0.05)
        yield log.read_text().rsplit(" at ", 1)[1].split()[0]
    finally:
        stop_child(process, grace_s=10.0)


async def _serve_work(url: str, vocab_size: int, work: Sequence[RequestSpec], concurrency: int) -> float:
    client = ServerClient(url, vocab_size, 600.0)
    queue = iter(enumerate(work))

    async def one_client() -> None:
        for index, item in queue:
            await client.generate(item.prompt, SamplingParams(item.new_tokens, ignore_eos=True), f"bench-{index}")

    try:
        await client.model_info()
        started = time.perf_counter()
        await asyncio.gather(*(one_client() for _ in range(concurrency)))
        return time.perf_counter() - started
    finally:
        await client.close()


def run_engine(url: str, vocab_size: int, work: Sequence[RequestSpec], concurrency: int) -> float:
    """Seconds for ``work`` with ``concurrency`` clients."""
    return asyncio.run(_serve_work(url, vocab_size, work, concurrency))


class TransformersBaseline:
    """``generate`` of transformers on left-padded batches; it records no log-probs, which the engine does."""

    def __init__(self, folder: Path) -> None:
        from vcpo_megatron.rollout.embedded.loading import load_model

        self.model = load_model(folder, "float32")
        self.model.generation_config.eos_token_id = None
        self.vocab_size: int = self.model.config.vocab_size
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())

    def run(self, work: Sequence[RequestSpec], concurrency: int) -> float:
        """Seconds for ``work`` in batches of ``concurrency``."""
        started = time.perf_counter()
        for start in range(0, len(work), concurrency):
            self._batch(work[start : start + concurrency])
        return time.perf_counter() - started

    def _batch(self, work: Sequence[RequestSpec]) -> None:
        import torch

        width = max(len(item.prompt) for item in work)
        ids = torch.tensor([[0] * (width - len(item.prompt)) + list(item.prompt) for item in work])
        mask = torch.tensor([[0] * (width - len(item.prompt)) + [1] * len(item.prompt) for item in work])
        new_tokens = max(item.new_tokens for item in work)
        with torch.inference_mode():
            output = self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        if output.shape[1] != width + new_tokens:
            raise BenchmarkError(f"transformers ended after {output.shape[1] - width} of {new_tokens} tokens")


def compare(
    url: str, baseline: TransformersBaseline, concurrency: int, requests: int, rounds: int, seed: int
) -> ThroughputComparison:
    """Alternates the two sides ``rounds`` times over the same work, after one short warm-up of each."""
    work = make_work(requests, baseline.vocab_size, seed)
    tokens = sum(item.new_tokens for item in work)
    warm = [RequestSpec(item.prompt, 4) for item in work[:concurrency]]
    run_engine(url, baseline.vocab_size, warm, concurrency)
    baseline.run(warm, concurrency)
    engine, transformers = [], []
    for _ in range(rounds):
        engine.append(tokens / run_engine(url, baseline.vocab_size, work, concurrency))
        transformers.append(tokens / baseline.run(work, concurrency))
    return ThroughputComparison(concurrency, requests, tokens, tuple(engine), tuple(transformers))


def table(comparisons: Sequence[ThroughputComparison]) -> str:
    """What is printed for people."""
    lines = ["concurrent  requests   tokens  engine tok/s  transformers tok/s  ratio"]
    for item in comparisons:
        engine, transformers = statistics.median(item.engine), statistics.median(item.transformers)
        lines.append(
            f"{item.concurrency:>10} {item.requests:>9} {item.tokens:>8} {engine:>13.0f} {transformers:>19.0f} "
            f"{item.ratio:>5.2f}x"
        )
    return "\n".join(lines)
