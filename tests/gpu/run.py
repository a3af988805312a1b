#!/usr/bin/env python3
"""Checks of the learner on one GPU, within 10 minutes; --device cpu runs all but what needs a GPU's kernels.

    python tests/gpu/run.py                   everything
    python tests/gpu/run.py --only oracle     checks whose name holds a word; may be repeated
    python tests/gpu/run.py --device cpu      the same code without a GPU
    python tests/gpu/run.py --json            one JSON object

Every check prints passed, failed or skipped with its numbers or its reason; exit status 1 when one failed.
Needs the package's own requirements only: no pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]


class Skipped(Exception):
    """A check that cannot be made here; the message says why."""


@dataclass(frozen=True)
class Outcome:
    name: str
    state: str
    text: str
    seconds: float


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", action="append", default=[], metavar="WORD")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: torch.cuda is not available; --device cpu runs what needs none", file=sys.stderr)
        return 2
    chosen = {n: c for n, c in CHECKS.items() if not arguments.only or any(word in n for word in arguments.only)}
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        if any("oracle" in name for name in chosen):
            make_oracles(Path(folder))
        from benchmarks.step import join_world_of_one

        from vcpo_megatron.learner.megatron import platform

        join_world_of_one()
        platform.prepare()
        for name, check in chosen.items():
            done = run_check(name, check, Path(folder))
            outcomes.append(done)
            if not arguments.json:
                print(f"{done.state:<8} {done.seconds:>6.1f} s  {name}: {done.text}", flush=True)
    if arguments.json:
        print(json.dumps({"device": arguments.device, "checks": [asdict(outcome) for outcome in outcomes]}))
    return int(any(outcome.state == "failed" for outcome in outcomes))


def run_check(name: str, check: Callable[[Path], str], folder: Path) -> Outcome:
    from tests.learner.world import leave_layout

    started = time.monotonic()
    try:
        state, text = "passed", check(folder)
    except Skipped as reason:
        state, text = "skipped", str(reason)
    except Exception as error:  # one failure must not hide the others
        traceback.print_exc()
        state, text = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    finally:
        leave_layout()  # every check builds its own groups
    return Outcome(name, state, text, time.monotonic() - started)


def on_gpu() -> bool:
    from vcpo_megatron.learner.megatron import platform

    return platform.has_gpu()


def require(value: float, limit: float, what: str) -> str:
    if not value <= limit:
        raise AssertionError(f"{what} {value:.3g} > {limit:g}")
    return f"{what} {value:.1e} (allowed {limit:g})"


# --- against the fp64 oracle ----------------------------------------------------------------------


#: family, tied -> (configuration, batch, oracle); made by ``make_oracles``.
ORACLES: dict[tuple[str, bool], tuple[Path, Any, Any]] = {}
FAMILIES = (("qwen2", False), ("qwen3", True), ("moe", False))


def make_oracles(folder: Path) -> None:
    """On the CPU, by transformers, and before the learner makes Megatron run there: that changes torch's factories."""
    from learner.scenarios import make_batch, make_config, make_model_folder, oracle_step

    for family, tied in FAMILIES:
        model = make_model_folder(folder / f"{family}{tied}", family, tied=tied, rounded=True)
        batch = make_batch(model)
        ORACLES[family, tied] = (model, batch, oracle_step(model, batch, make_config(model, 1)))


def oracle_float32(folder: Path) -> str:
    """Loss, log ratios, norms, baselines, ESS, learning rate and gradients of every exact mode, several models."""
    worst: dict[str, float] = {}
    for kind in FAMILIES:
        for mode in ("accumulate", "deferred", "two_pass"):
            found = compare_with_oracle(kind, {"algorithm": {"opob_mode": mode}})
            worst = {key: max(value, worst.get(key, 0.0)) for key, value in found.items()}
    limits = {"loss": 1e-4, "log ratio": 1e-4, "norm": 5e-5, "baseline": 1e-4, "ess": 5e-5, "lr": 5e-5}
    limits["gradient"] = 1e-4
    return ", ".join(require(worst[key], limit, key) for key, limit in limits.items())


def oracle_bfloat16(folder: Path) -> str:
    """The same with activations of 8 bits: a few per cent."""
    worst: dict[str, float] = {}
    for mode in ("accumulate", "deferred", "two_pass"):
        sections = {"model": {"dtype": "bfloat16"}, "algorithm": {"opob_mode": mode}}
        found = compare_with_oracle(FAMILIES[0], sections)
        worst = {key: max(value, worst.get(key, 0.0)) for key, value in found.items()}
    limits = {"log ratio": 0.3, "norm": 0.03, "baseline": 0.3, "gradient": 0.15}
    return ", ".join(require(worst[key], limit, key) for key, limit in limits.items())


def compare_with_oracle(kind: tuple[str, bool], sections: dict[str, Any]) -> dict[str, float]:
    """Largest differences of one step; norm, loss, ess, lr relative; gradient relative to the largest of all."""
    import torch
    from learner.run_layouts import one_step_each
    from learner.scenarios import make_config

    model, batch, oracle = ORACLES[kind]
    (outcome,) = one_step_each([(make_config(model, 1, **sections), [batch])])
    result = outcome["results"][0]
    metrics, rows = result.metrics, result.trajectories

    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=torch.float64)

    norms = column("grad_norm")
    known = ~norms.isnan()
    if int(known.sum()) != 12:
        raise AssertionError(f"{int(known.sum())} norms where 12 trajectories have one")
    largest = max(float(g.abs().max()) for g in oracle.gradients.values())
    gradients = {k: g.cpu().double() for k, g in outcome["gradients"].items()}
    missing = set(oracle.gradients) - set(gradients) - {"lm_head.weight"}
    if missing:
        raise AssertionError(f"no gradient of {sorted(missing)}")
    return {
        "loss": abs(metrics["loss"] / oracle.loss - 1),
        "log ratio": float((column("log_ratio") - oracle.log_ratios).abs().max()),
        "norm": float((norms[known] / oracle.norms[known] - 1).abs().max()),
        "baseline": float((column("baseline") - oracle.baselines).abs().max()),
        "ess": abs(metrics["ess/ratio"] / oracle.ess - 1),
        "lr": abs(metrics["lr/effective"] / oracle.learning_rate - 1),
        "gradient": max(float((gradients[k] - oracle.gradients[k]).abs().max()) for k in gradients) / largest,
    }


# --- packs, modes, memory, time ------------------------------------------------------------------


def packed_as_alone(folder: Path) -> str:
    """Block-diagonal attention over packs: the same norms and gradient as one trajectory a micro-batch."""
    import torch

    results = []
    for dtype, limit in (("float32", 2e-5), ("bfloat16", 0.05)):
        bench = Bench(folder, dtype)
        packed, alone = (bench.gradient({}, pack) for pack in (4096, 1))
        bench.close()
        difference = max(float((a - b).norm() / b.norm()) for a, b in zip(packed[1], alone[1], strict=True))
        rows = [torch.tensor([r.grad_norm for r in result.trajectories]) for result, _ in (packed, alone)]
        norms = float((rows[0] / rows[1] - 1).abs().max())
        results.append(f"{dtype}: {require(difference, limit, 'gradient')}, {require(norms, limit, 'norm')}")
    return "; ".join(results)


def modes_agree(folder: Path) -> str:
    """accumulate, deferred and two_pass on a larger model: one gradient. proxy: the others' but for its baselines."""
    results = []
    for dtype, limit in (("float32", 2e-5), ("bfloat16", 0.05)):
        bench = Bench(folder, dtype)
        found = {m: bench.gradient({"opob_mode": m}, 4096) for m in ("accumulate", "deferred", "two_pass", "proxy")}
        bench.close()
        reference = found["accumulate"][1]
        for mode in ("deferred", "two_pass"):
            pairs = zip(found[mode][1], reference, strict=True)
            worst = max(float((a - b).norm() / b.norm()) for a, b in pairs)
            results.append(f"{dtype} {require(worst, limit, mode)}")
        ratios = [[r.log_ratio for r in found[m][0].trajectories] for m in ("proxy", "accumulate")]
        worst = max(abs(a - b) for a, b in zip(*ratios, strict=True))
        results.append(f"{dtype} {require(worst, limit, 'log ratio of proxy')}")
    return ", ".join(results)


class Bench:
    """A random model of the benchmark's shape and a batch; gradients without taking the step."""

    def __init__(self, folder: Path, dtype: str, **model: str) -> None:
        """``model``: more keys of [model]."""
        import torch
        from benchmarks import step as benchmark

        from vcpo_megatron.learner.megatron.parallel import initialize
        from vcpo_megatron.learner.megatron.training import build_trainable

        self._work = benchmark.Workload("10M" if on_gpu() else "1M", 512 if on_gpu() else 32, 2, 4)
        self._folder, self._model = folder, {"dtype": dtype, **model}
        self._batch = benchmark.make_batch(self._work)
        config = self._config({}, 4096)
        self._parallel = initialize(config)
        self._trainable = build_trainable(config, self._parallel, load=False)
        torch.manual_seed(0)
        for parameter in self._trainable.chunks[0].parameters():
            parameter.data.fill_(1.0) if parameter.dim() == 1 else parameter.data.normal_(0.0, 0.02)

    def _config(self, keys: dict[str, str], pack: int) -> Any:
        from benchmarks import step as benchmark

        made = benchmark.make_config(self._folder, self._work, keys)
        train = made.train.model_copy(update={"max_pack_tokens": pack})
        return made.model_copy(update={"model": made.model.model_copy(update=self._model), "train": train})

    def gradient(self, keys: dict[str, str], pack: int) -> tuple[Any, list[Any]]:
        """(result of the step, gradients on the host); the parameters stay as they are."""
        from vcpo_megatron.learner.step.vcpo_step import VcpoStep
        from vcpo_megatron.types import PolicyVersion

        gradients: list[Any] = []

        def instead() -> tuple[bool, float, None]:
            gradients.extend(p.main_grad.float().cpu().clone() for p in self._trainable.chunks[0].parameters())
            return True, 0.0, None

        self._trainable.optimizer.step = instead
        step = VcpoStep(self._config(keys, pack), self._parallel, self._trainable)
        result = step.run(self._batch, PolicyVersion(1, 1))
        if result.skipped:
            raise AssertionError(f"the step was skipped: {result.skipped}")
        return result, gradients

    def close(self) -> None:
        from tests.learner.world import leave_layout

        leave_layout()  # so that another can be built


def memory_and_time(folder: Path) -> str:
    """accumulate keeps at most 4 bytes a parameter, deferred no buffer; seconds beside a plain step, as a table."""
    from benchmarks import step as benchmark

    large = [benchmark.Workload("60M", median, 8, 8) for median in (64, 512)]
    works = large if on_gpu() else [benchmark.Workload("1M", 48, 2, 4)]
    texts = []
    for work in works:
        bench = benchmark.Bench(folder, work, benchmark.CONTENDERS)
        found = bench.compare(rounds=3 if on_gpu() else 1)
        print(benchmark.table(found), file=sys.stderr, flush=True)
        peak = {outcome.name: outcome.transient for outcome in found.outcomes}
        kept = {outcome.name: outcome.persistent / bench.parameters for outcome in found.outcomes}
        extra = (peak["accumulate"] - peak["plain"]) / bench.parameters
        from tests.learner.world import leave_layout

        leave_layout()
        texts.append(
            f"median {work.median}: {require(extra, 4.4, 'bytes a parameter beyond plain')}, "
            f"{require(kept['deferred'], 0.0, 'buffers of deferred')}, "
            + ", ".join(f"{name} {found.ratio(name):.2f}x" for name in peak if name != "plain")
        )
    return "; ".join(texts)


# --- kernels -------------------------------------------------------------------------------------


def fused_adam(folder: Path) -> str:
    """Megatron's choice of Adam against torch's, five steps."""
    import torch

    from vcpo_megatron.learner.megatron import platform

    if platform.kernels().adam == "torch":
        raise Skipped("torch's Adam is the one in use")
    from megatron.core.optimizer import Adam

    start = torch.randn(1000, 37, device="cuda")
    ours, plain = (torch.nn.Parameter(start.clone()) for _ in range(2))
    keys = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    pairs = [(ours, Adam([ours], adam_w_mode=True, **keys)), (plain, torch.optim.AdamW([plain], **keys))]
    for _ in range(5):
        gradient = torch.randn_like(start)
        for parameter, optimizer in pairs:
            parameter.grad = gradient.clone()
            optimizer.step()
    return require(float((ours - plain).abs().max()), 1e-5, f"{platform.kernels().adam}'s Adam: parameter")


def fused_weight_gradients(folder: Path) -> str:
    """Apex's kernel against a product in fp32."""
    import torch

    from vcpo_megatron.learner.megatron import platform
    from vcpo_megatron.learner.megatron.platform import add_product

    if not platform.kernels().adds_products:
        raise Skipped("Apex's kernel is not installed, or there is no GPU for it")
    inputs, grads = (torch.randn(777, d, device="cuda", dtype=torch.bfloat16) for d in (256, 384))
    total = torch.randn(384, 256, device="cuda")
    expected = total + grads.float().t() @ inputs.float()
    add_product(total, grads, inputs)
    return require(float((total - expected).abs().max() / expected.abs().max()), 1e-4, "product")


def transformer_engine_attention(folder: Path) -> str:
    """TransformerEngine's attention over a pack against ours: whether the learner could use it."""
    import torch

    if not on_gpu():
        raise Skipped("needs a GPU")
    try:
        from transformer_engine.pytorch import DotProductAttention
    except ImportError as error:
        raise Skipped(f"TransformerEngine cannot be imported: {error}") from error
    from types import SimpleNamespace

    from vcpo_megatron.learner.megatron.layers import PackedAttention

    lengths, heads, groups, width = [700, 33, 256, 11], 8, 2, 64
    edges = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    shapes = ((heads, "q"), (groups, "k"), (groups, "v"))
    tensors = [torch.randn(sum(lengths), n, width, device="cuda", dtype=torch.bfloat16) for n, _ in shapes]
    theirs = DotProductAttention(
        heads, width, num_gqa_groups=groups, attn_mask_type="padding_causal", qkv_format="thd", attention_dropout=0.0
    )
    config = SimpleNamespace(context_parallel_size=1)
    ours = PackedAttention(config, 1, None, "self")
    found = []
    for call in (
        lambda q, k, v: theirs(
            q, k, v, cu_seqlens_q=edges, cu_seqlens_kv=edges, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths)
        ),
        lambda q, k, v: ours(q, k, v, None, packed_seq_params=SimpleNamespace(lengths=lengths)),
    ):
        inputs = [tensor.clone().requires_grad_() for tensor in tensors]
        out = call(*inputs).reshape(sum(lengths), -1)
        out.float().square().sum().backward()
        found.append([out.detach(), *(tensor.grad for tensor in inputs)])
    worst = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(*found, strict=True))
    return require(worst, 0.02, "output and gradients")


def transformer_engine_layers(folder: Path) -> str:
    """A step with its attention over packs, and one with its matrices: norms and gradients of the local layers."""
    import torch

    from vcpo_megatron.learner.megatron.layer_specs import engine_layers

    if not on_gpu():
        raise Skipped("needs a GPU")
    try:
        engine_layers()
    except RuntimeError as error:
        raise Skipped(str(error)) from error
    found = []
    for model in ({}, {"core_attention": "transformer_engine"}, {"transformer_impl": "transformer_engine"}):
        bench = Bench(folder, "bfloat16", **model)
        result, gradients = bench.gradient({}, 4096)
        bench.close()
        found.append((torch.tensor([row.grad_norm for row in result.trajectories]), gradients))
    texts = []
    for name, (norms, gradients) in zip(("attention", "matrices"), found[1:], strict=True):
        difference = max(float((a - b).norm() / b.norm()) for a, b in zip(gradients, found[0][1], strict=True))
        worst = float((norms / found[0][0] - 1).abs().max())
        texts.append(f"{name}: {require(difference, 0.05, 'gradient')}, {require(worst, 0.05, 'norm')}")
    return "; ".join(texts)


CHECKS: dict[str, Callable[[Path], str]] = {
    "oracle in float32": oracle_float32,
    "oracle in bfloat16": oracle_bfloat16,
    "packed as one by one": packed_as_alone,
    "modes agree": modes_agree,
    "memory and time of a step": memory_and_time,
    "fused adam": fused_adam,
    "fused weight gradients": fused_weight_gradients,
    "attention of TransformerEngine": transformer_engine_attention,
    "layers of TransformerEngine": transformer_engine_layers,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
