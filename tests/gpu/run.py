#!/usr/bin/env python3
"""Checks of the learner on GPUs, within ten minutes on one; --device cpu runs their code in small sizes without any.

    python tests/gpu/run.py                     everything, on one rank, and on two where there are two GPUs
    python tests/gpu/run.py --ranks 1           what one GPU can do
    python tests/gpu/run.py --only oracle       checks whose name holds a word; may be repeated
    python tests/gpu/run.py --device cpu        the same code on CPUs; checks of kernels say "needs a GPU"
    python tests/gpu/run.py --list              names and budgets

It starts its ranks itself, waits for none of them longer than a check's budget, and kills by pid those that do not
come. Nothing is downloaded: models are random. Needs the package's own requirements only, no pytest.

Every check is passed, failed or skipped, with its numbers or its reason; what there was no time for is skipped by name.
The table is printed, and everything written as JSON (--out): versions, devices, numbers, and the end of the log of what
failed. Exit status 1 when a check failed, 2 when none could start. docs/gpu.md says how to read it.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from tests.gpu.checklist import TOTAL_S, Check, Outcome, Place, chosen, run_checks  # noqa: E402

_STEPS, _WEIGHTS, _MISMATCH = (f"tests.gpu.checks.{name}:" for name in ("steps", "weights", "mismatch"))


@functools.cache
def _made(function: str, place: Place) -> dict[str, Any]:
    """What ``function`` ("module:name") makes for several checks, once."""
    module, name = function.split(":")
    return getattr(importlib.import_module(module), name)(place)


_models, _sent, _sampled = (
    functools.partial(_made, function)
    for function in (_STEPS + "made_models", _WEIGHTS + "made_versions", _MISMATCH + "made_models")
)

#: In the order of their importance. The budgets of those that one GPU can make add up to ``TOTAL_S`` with the ranks'
#: start, but for the last, which has what the others leave.
CHECKS = (
    Check("oracle in float32", _STEPS + "exact", 45, made=_models),
    Check("oracle in bfloat16", _STEPS + "rounded", 25, made=_models),
    Check("values of attention", "tests.gpu.checks.attention:values", 20),
    Check("kernels of attention", "tests.gpu.checks.attention:kernels", 25),
    Check("no read inside the backward", "tests.gpu.checks.reads:none_in_the_schedule", 35),
    *(
        Check(f"layout {name}", _STEPS + "layout", 40, ranks=2, keys={"name": name}, made=_models)
        for name in ("PP 2", "PP 2, tied", "PP 2 x VPP 2", "TP 2", "DP 2", "CP 2", "EP 2")
    ),
    Check("memory and time beside plain", "tests.gpu.checks.cost:beside_plain", 70),
    Check("weight snapshots", _WEIGHTS + "snapshots", 20),
    Check("weight broadcast", _WEIGHTS + "broadcast", 75),
    Check("weights to a server", _WEIGHTS + "to_a_server", 55, alone=True, made=_sent),
    Check("mismatch with the embedded engine", _MISMATCH + "with_the_embedded_engine", 70, made=_sampled),
    Check("finite gradients beyond 2^31", "tests.gpu.checks.large:finite_gradients", 15),
    Check("logits beyond 2^31", "tests.gpu.checks.large:many_logits", 15),
    Check("packed as one by one", _STEPS + "packed_as_alone", 15),
    Check("modes agree", _STEPS + "modes_agree", 15),
    Check("what fits", "tests.gpu.checks.cost:what_fits", 40),
    Check("fused adam", "tests.gpu.checks.kernels:fused_adam", 5),
    Check("fused weight gradients", "tests.gpu.checks.kernels:fused_weight_gradients", 5),
    Check("layers of TransformerEngine", "tests.gpu.checks.kernels:transformer_engine", 20),
    Check("mismatch with SGLang", _MISMATCH + "with_sglang", 240, made=_sampled),
)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, help="ranks of the layouts, a GPU each; default: 2 where there are two")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="checks whose name holds it")
    parser.add_argument(
        "--seconds", type=float, help="of the whole run; default: 600, with more ranks 900, on CPUs twice that"
    )
    parser.add_argument("--out", type=Path, help="JSON file; default: build/gpu-DATE.json")
    parser.add_argument(
        "--rollout-python",
        type=Path,
        default=os.environ.get("VCPO_ROLLOUT_PYTHON"),
        help="interpreter of a rollout environment with SGLang; default: VCPO_ROLLOUT_PYTHON",
    )
    parser.add_argument("--list", action="store_true", help="print the checks and their budgets, and run nothing")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    checks = chosen(CHECKS, arguments.only)
    if arguments.list:
        print("\n".join(f"{check.seconds:>5.0f} s  {check.ranks} ranks  {check.name}" for check in checks))
        return 0
    if not checks:
        return _refused(f"--only {' '.join(arguments.only)}: no check has such a name; --list prints them")
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from vcpo_megatron.launch.devices import visible_gpus

    gpus = len(visible_gpus()) if arguments.device == "cuda" else 0
    if arguments.device == "cuda" and not gpus:
        return _refused(
            "no GPU: this host shows none, or torch is built for CPUs only; --device cpu runs what needs none"
        )
    ranks = arguments.ranks or min(2, gpus or 2)
    if ranks < 1 or (gpus and ranks > gpus):
        return _refused(f"--ranks {ranks}: from 1 to {gpus}, since NCCL wants a GPU a rank")
    # processes that a check starts find this checkout, whether it is installed or not
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with tempfile.TemporaryDirectory(prefix="gpu-checks") as folder:
            return _run(arguments, checks, Place(Path(folder), 0.0, gpus, ranks, arguments.rollout_python))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(arguments: argparse.Namespace, checks: list[Check], place: Place) -> int:
    from tests.gpu.machine import summary
    from tests.gpu.ranks import Ranks, WorldFailed, reason

    started, usual = time.monotonic(), TOTAL_S[min(place.ranks, 2)]
    total = arguments.seconds or (usual if place.gpus else 2 * usual)
    ranks, outcomes = Ranks(), []
    try:
        ranks.start(1)
        for check in checks:
            if check.made is not None:
                check.made(place)  # while they start
        try:
            machine = ranks.ready(1, total / 4)
        except WorldFailed as failure:
            print(failure, file=sys.stderr)
            return _refused(f"a rank did not start: {reason(str(failure))}")
        print(f"{summary(machine)}\n\n{'':<8}{'seconds':>8}{'GiB':>7}  check", flush=True)
        left = total - (time.monotonic() - started)
        for outcome in run_checks(checks, left, total / usual, functools.partial(_one, ranks, place)):
            outcomes.append(outcome)
            print(row(outcome), flush=True)
            if outcome.log:
                print(outcome.log, file=sys.stderr, flush=True)
    finally:
        ranks.close()
    seconds = time.monotonic() - started
    out = arguments.out or ROOT / "build" / f"gpu-{machine['date'].replace(':', '')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    written = {**machine, "command": sys.argv, "ranks": place.ranks, "seconds": seconds}
    out.write_text(json.dumps({**written, "checks": [asdict(outcome) for outcome in outcomes]}, indent=1) + "\n")
    counts = {state: sum(o.state == state for o in outcomes) for state in ("passed", "failed", "skipped")}
    print("\n" + ", ".join(f"{count} {state}" for state, count in counts.items()) + f" in {seconds:.0f} s; {out}")
    return int(counts["failed"] > 0)


def _one(ranks: Any, place: Place, check: Check, budget: float, left: float) -> Outcome:
    """``check`` in a folder of its own."""
    if check.ranks > place.ranks:
        what = "GPUs" if place.gpus else "ranks"
        return Outcome(check.name, "skipped", f"needs {check.ranks} {what}: --ranks {place.ranks}")
    folder = place.folder / check.name.replace(" ", "-").replace(",", "")
    folder.mkdir()
    made = check.made(place) if check.made is not None else {}
    size = place.ranks if check.ranks > 1 else 1
    own = replace(place, folder=folder, seconds=budget, ranks=size)
    return ranks.run(check, own, left, {**check.keys, **made})


def row(outcome: Outcome) -> str:
    """A line of the table."""
    peak = f"{outcome.peak_bytes / 2**30:>7.2f}" if outcome.peak_bytes else f"{'-':>7}"
    return f"{outcome.state:<8}{outcome.seconds:>8.1f}{peak}  {outcome.name}: {outcome.text}"


def _refused(why: str) -> int:
    print(why, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
