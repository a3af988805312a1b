#!/usr/bin/env python3
"""Mutation tests of the modules that decide what is learned: which small changes of the code does no test notice?

    tools/mutants.py                                            300 mutants by two workers, 3 hours at most
    tools/mutants.py --resume                                   go on after a stop
    tools/mutants.py --resume --again                           those that did not die, after tests were added
    tools/mutants.py --count 10 --modules algorithm staleness --out build/mutants-10
    tools/mutants.py --modules '*/ess.py' --count 20 --list     only show what is drawn

Needs the extra "mutation" (pip install -c constraints.txt -e '.[test,mutation]'). Tests run in copies of the checkout,
never in the working tree. Written are OUT/results.jsonl, OUT/table.md and OUT/survivors.md. Exit code 1 when fewer than
90 % of the mutants died, 2 when they could not be drawn or run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import mutation  # noqa: E402
from benchmarks.mutation import Area  # noqa: E402
from benchmarks.tool import run_tool  # noqa: E402

#: The least share of mutants that die.
SHARE = 0.9

#: Every kind of parallelism and of layer against the oracle, and the losses of whole packs.
STEP = ("tests/learner/test_layouts.py", "tests/learner/moe")

AREAS = (
    Area("algorithm", 60, ("vcpo_megatron/algorithm/*.py",), ("tests/algorithm",)),
    Area(
        "gradients",
        80,
        ("vcpo_megatron/learner/gradients/*.py",),
        ("tests/learner/gradients", *STEP),
    ),
    Area("step", 70, ("vcpo_megatron/learner/step/*.py",), ("tests/learner/step", *STEP)),
    Area(
        "staleness",
        25,
        ("vcpo_megatron/orchestrator/modes/staleness.py",),
        ("tests/orchestrator/modes/test_staleness.py",),
    ),
    Area(
        "batching",
        25,
        ("vcpo_megatron/orchestrator/modes/batcher.py", "vcpo_megatron/orchestrator/store/ledger.py"),
        (
            "tests/orchestrator/modes/test_batcher.py",
            "tests/orchestrator/store/test_ledger.py",
            "tests/orchestrator/modes/test_failures.py",
        ),
    ),
    Area(
        "weight-sync",
        40,
        (
            "vcpo_megatron/weight_sync/orchestrator.py",
            "vcpo_megatron/weight_sync/wave.py",
            "vcpo_megatron/orchestrator/peers/weight_sync.py",
        ),
        (
            "tests/orchestrator/peers/test_weight_sync.py",
            "tests/weight_sync/test_orchestrator.py",
            "tests/weight_sync/*/test_orchestrator.py",
            "tests/weight_sync/test_verification.py",
        ),
    ),
)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: %(default)s)")
    parser.add_argument("--count", type=int, default=300, help="mutants in all (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="run at the same time (default: %(default)s)")
    parser.add_argument(
        "--modules", nargs="+", default=[], metavar="M", help=f"of {', '.join(a.name for a in AREAS)}, or path patterns"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants", help="folder (default: build/mutants)")
    parser.add_argument("--resume", action="store_true", help="go on with the results in the folder")
    parser.add_argument("--again", action="store_true", help="with --resume: run those again that did not die")
    parser.add_argument("--list", action="store_true", help="print the diffs of what is drawn, and run nothing")
    arguments = parser.parse_args(argv)
    if arguments.count < 1 or arguments.workers < 1:
        parser.error(f"--count {arguments.count}, --workers {arguments.workers}: expected 1 or more")
    if arguments.again and not arguments.resume:
        parser.error("--again needs --resume")
    return arguments


def main(argv: list[str], areas: tuple[Area, ...] = AREAS, root: Path = ROOT) -> int:
    arguments = parse(argv)
    try:
        areas_chosen = mutation.chosen(root, areas, arguments.modules)
        mutants = mutation.draw(root, areas_chosen, arguments.count, arguments.seed, mutation.equivalent())
        if arguments.list:
            print("\n".join(mutation.difference(mutant, root) for mutant in mutants))
            return 0
        results = mutation.Results(arguments.out.absolute() / "results.jsonl")
        results.begin(mutation.run_identity(root, areas), resume=arguments.resume, again=arguments.again)
        session = mutation.Session(root, mutants, results, arguments.workers, lambda line: print(line, flush=True))
        try:
            session.run()
        finally:
            table = mutation.table(mutants, results.outcomes)
            (arguments.out / "table.md").write_text(table)
            (arguments.out / "survivors.md").write_text(mutation.survivors(root, mutants, results.outcomes))
    except mutation.MutationError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    print(table, end="")
    ended = (results.outcomes.get(mutant.key, {"outcome": ""})["outcome"] for mutant in mutants)
    died = sum(outcome in (mutation.KILLED, mutation.TIMED_OUT) for outcome in ended)
    return 0 if died >= SHARE * len(mutants) else 1


if __name__ == "__main__":
    run_tool(lambda: main(sys.argv[1:]))
