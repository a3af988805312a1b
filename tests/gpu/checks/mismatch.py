"""Learner and server on the same weights: how far their log-probs are apart over long answers, and what that leaves of
the effective sample size where nothing is off-policy.

Token noise of standard deviation sigma gives l_i that of sigma sqrt(T), and ESS/N = exp(-T sigma^2) about: at T = 4,096
and sigma = 0.02 that is 0.19, on-policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.checklist import NEEDS_A_GPU, Found, Missed, Place, Skipped, require
from tests.gpu.models import Size, make_random_model, trajectory

#: Tokens of an answer, on GPUs and on CPUs.
LONG, SHORT = 4096, 256
PROMPT = 16
#: dtype -> (least ESS ratio, most nats between the two on average).
LIMITS = {"float32": (0.99, 1e-4), "bfloat16": (0.0, 0.1)}


def made_models(place: Place) -> dict[str, Any]:
    """``models``: a folder for each dtype, and their vocabulary. In the parent: see ``steps.made_models``."""
    size = Size(128, 2, 384, 2, 1, 2048, 8192) if place.large else Size(64, 2, 96, 4, 2, 256, 8192)
    models = {dtype: make_random_model(place.folder / dtype, size, dtype) for dtype in LIMITS}
    return {"models": models, "vocabulary": size.vocabulary}


def with_the_embedded_engine(place: Place, models: dict[str, Path], vocabulary: int) -> Found:
    """Sampled by the embedded engine on CPUs, in either dtype."""
    from benchmarks.rollout import engine_server

    def server(model: Path, dtype: str, fp32_head: bool) -> Any:
        options = ["--dtype", dtype, *["--enable-fp32-lm-head"] * fp32_head]
        log = place.folder / f"embedded-{dtype}-{fp32_head}.log"
        return engine_server(model, log, 16, *options, start_s=place.seconds / 2)

    return compare(place, server, models, vocabulary, group_size=2)


def with_sglang(place: Place, models: dict[str, Path], vocabulary: int) -> Found:
    """Sampled by SGLang on the last GPU, in bfloat16."""
    if place.rollout_python is None:
        raise Skipped("no rollout environment: --rollout-python names its interpreter")
    if not place.large:
        raise Skipped(NEEDS_A_GPU)

    def server(model: Path, dtype: str, fp32_head: bool) -> Any:
        return _sglang(place, model, dtype, fp32_head)

    return compare(place, server, {"bfloat16": models["bfloat16"]}, vocabulary, group_size=8)


def compare(place: Place, server: Any, models: dict[str, Path], vocabulary: int, group_size: int) -> Found:
    """For every dtype, and every head that the learner has for it: a step on two groups that the server has sampled."""
    tokens = LONG if place.large else SHORT
    figures, texts = {}, []
    for dtype, model in models.items():
        for head, keys in heads(dtype).items():
            with server(model, dtype, head == "fp32 head") as url:
                answers = asyncio.run(_sample(place, url, vocabulary, 2 * group_size, tokens))
            found = _step(place, model, {"dtype": dtype, **keys}, answers, group_size)
            name = f"{dtype}, {head}"
            figures[name] = found
            least, most = LIMITS[dtype]
            require(found["mismatch/mean"], most, f"{name}: nats between learner and server, mean,")
            if not found["ess/ratio"] >= least:
                raise Missed(f"{name}: ESS ratio {found['ess/ratio']:.4f} on-policy, expected at least {least:g}")
            texts.append(
                f"{name}: ESS ratio {found['ess/ratio']:.4f}, mismatch mean {found['mismatch/mean']:.1e} max "
                f"{found['mismatch/max']:.1e}, sigma a token {found['sigma']:.1e} (alone {found['ess of sigma']:.4f})"
            )
    return Found("; ".join(texts), {"tokens of an answer": tokens, **figures})


def heads(dtype: str) -> dict[str, dict[str, Any]]:
    """The heads that the learner has for ``dtype``: name -> keys of [model]. In float32 there is one only."""
    from vcpo_megatron.config.schema import ModelConfig

    known = ModelConfig.model_fields
    if dtype == "float32" or FP32_HEAD not in known:
        return {"its head": {}}
    return {"its head": {FP32_HEAD: False}, "fp32 head": {FP32_HEAD: True}}


#: The key of [model] that computes logits in fp32.
FP32_HEAD = "fp32_lm_head"


async def _sample(place: Place, url: str, vocabulary: int, count: int, tokens: int) -> list[Any]:
    """(prompt, answer of ``tokens`` tokens) of ``count`` requests at temperature 1."""
    from vcpo_megatron.rollout.client.http import ServerClient
    from vcpo_megatron.rollout.client.protocol import SamplingParams

    draw = np.random.default_rng(5)
    prompts = [draw.integers(2, vocabulary, PROMPT).tolist() for _ in range(count)]
    sampling = [SamplingParams(max_new_tokens=tokens, ignore_eos=True)] * count
    client = ServerClient(url, vocabulary, place.seconds)
    try:
        await client.model_info()
        return list(zip(prompts, await client.generate_batch(prompts, sampling), strict=True))
    finally:
        await client.close()


def _step(place: Place, model: Path, keys: dict[str, Any], answers: list[Any], group_size: int) -> dict[str, float]:
    """Metrics of a step on ``answers``, two groups of ``group_size``, right and wrong by turns."""
    from tests.learner.run_layouts import one_step_each
    from tests.learner.scenarios import make_config
    from vcpo_megatron.types import Batch, Group

    tokens = len(answers[0][1].output_ids)
    rows = [
        trajectory(i // group_size, i % group_size, prompt, answer.output_ids, answer.logprobs, float(i % 2))
        for i, (prompt, answer) in enumerate(answers)
    ]
    groups = (Group(g, f"p{g}", tuple(rows[g * group_size : (g + 1) * group_size])) for g in range(2))
    config = make_config(
        model,
        place.ranks,
        model=keys,
        train={"groups_per_step": 2, "group_size": group_size, "max_pack_tokens": 2 * tokens},
        rollout={"max_new_tokens": tokens, "temperature": 1.0},
    )
    (outcome,) = one_step_each([(config, [Batch(0, tuple(groups))])])
    (result,) = outcome["results"]
    if result.skipped:
        raise Missed(f"the step was skipped: {result.skipped}")
    metrics = result.metrics
    if metrics["mismatch/tokens"] != tokens * len(rows):
        raise Missed(f"{metrics['mismatch/tokens']:.0f} tokens are of the learner's version, of {tokens * len(rows)}")
    sigma = math.sqrt(sum(row.log_ratio**2 for row in result.trajectories) / len(rows) / tokens)
    return {
        **{key: metrics[key] for key in ("ess/ratio", "mismatch/mean", "mismatch/max", "entropy")},
        "sigma": sigma,
        "ess of sigma": math.exp(-tokens * sigma**2),
    }


@contextlib.contextmanager
def _sglang(place: Place, model: Path, dtype: str, fp32_head: bool) -> Iterator[str]:
    """URL of a server of the rollout environment on the last GPU, which is the learner's where there is one."""
    import urllib.error
    import urllib.request

    from vcpo_megatron.rollout.fleet.sglang import SglangServer
    from vcpo_megatron.transport.child import last_error, start_child, stop_child

    assert place.rollout_python is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    args = ("--mem-fraction-static", "0.3", *(("--enable-fp32-lm-head",) if fp32_head else ()))
    server = SglangServer(
        place.rollout_python,
        model,
        "127.0.0.1",
        port,
        dtype,
        PROMPT + LONG,
        16,
        devices=(_last_device(place),),
        args=args,
    )
    log, url = place.folder / f"sglang-{fp32_head}.log", f"http://127.0.0.1:{port}"
    process = start_child(server.command(), env=server.environment(), log=log)
    try:
        deadline = time.monotonic() + place.seconds / 2
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                pass  # it is starting
            if process.poll() is not None:
                raise Missed(f"the server ended: {last_error(log)}")
            if time.monotonic() > deadline:
                raise Missed(f"the server did not answer in time: {last_error(log)}")
            time.sleep(0.5)
        yield url
    finally:
        stop_child(process, grace_s=5.0)


def _last_device(place: Place) -> str:
    from vcpo_megatron.launch.devices import visible_gpus

    return visible_gpus()[-1]
