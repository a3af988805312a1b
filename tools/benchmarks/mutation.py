"""Mutation tests: draws small changes of the source (mutants) by a seed and runs the tests against each.

The changes and where they can be made are those of Cosmic Ray (the extra "mutation"); this module chooses among them,
and runs them in copies of the checkout, so that the working tree is never changed.

**What is drawn.** A *site* is a place in the source that an operator can change. Sites are drawn without replacement,
then one of the changes possible there: an operator with eleven replacements is not drawn eleven times as often. Not
drawn is what no test should hold (``left_out``): annotations, ``__all__``, code for type checkers, texts (f-strings,
what is raised, printed, logged or warned), assertions, and arguments and decorators that only guard or describe
(``frozen``, ``slots``, ``strict`` of zip, ``final``, ``abstractmethod`` ...). Docstrings hold nothing that an operator
changes. Nor are changes drawn between kinds, which die as soon as a line runs (``+`` to ``|``, ``<`` to ``is``), nor
those that do not compile, nor those that a person has looked at and found to change nothing that a test could see:
``equivalent_mutants.toml`` lists them, each with the reason.

**What is run.** First, for each set of tests, the unchanged code with a mark before every statement to be changed: the
tests must pass, their time bounds that of the mutants, and a mutant whose mark is never reached is *not covered* and is
not run. Then every mutant; each result is appended to a file at once, and what stands there is not run again.
"""

from __future__ import annotations

import ast
import difflib
import fnmatch
import hashlib
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

KILLED, SURVIVED, TIMED_OUT, NOT_COVERED = OUTCOMES = ("killed", "survived", "timed out", "not covered")

#: A mutant may take so many times what the unchanged code takes, and so many seconds more.
TIMES, MORE_S = 3.0, 30.0
#: The longest that the tests of the unchanged code may take, seconds.
UNCHANGED_S = 900.0

#: Operators of Cosmic Ray, as it names them; in pairs only within a kind.
_ARITHMETIC, _BITS = ("Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"), ("BitOr", "BitAnd", "BitXor")
_SHIFTS, _ORDER, _IDENTITY = ("RShift", "LShift"), ("Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"), ("Is", "IsNot")
OPERATORS = frozenset(
    [f"ReplaceBinaryOperator_{a}_{b}" for kind in (_ARITHMETIC, _BITS, _SHIFTS) for a in kind for b in kind]
    + [f"ReplaceComparisonOperator_{a}_{b}" for kind in (_ORDER, _IDENTITY) for a in kind for b in kind]
    + [f"ReplaceUnaryOperator_Delete_{name}" for name in ("Not", "USub", "Invert")]
    + ["AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"]
    + ["ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ExceptionReplacer", "NumberReplacer"]
    + ["RemoveDecorator", "ZeroIterationForLoop"]
)

#: Calls whose arguments are for people.
_SAYS = re.compile(r"(^|[._])(print|say|warn|warning|info|debug)$|^(log|logger|logging)\.")

EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")

Position = tuple[int, int]
"""Line from 1, column from 0 in characters."""


class MutationError(Exception):
    """The mutants cannot be drawn or run; the message says what to do."""


@dataclass(frozen=True)
class Area:
    """Modules that are mutated together, and the tests that mirror them.

    ``weight``: of the mutants drawn, relative to the other areas. ``modules``: patterns of paths in the checkout.
    ``tests``: paths, patterns of paths or single tests (``path::name``), the fastest first; slow ones among them are
    left out.
    """

    name: str
    weight: int
    modules: tuple[str, ...]
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Mutant:
    """One change of one module: the ``occurrence``-th place in it where ``operator`` applies."""

    number: int
    path: str
    line: int
    column: int
    operator: str
    occurrence: int
    tests: tuple[str, ...]

    @property
    def key(self) -> str:
        """What its result is kept by: the change, whatever else is drawn."""
        return f"{self.path}:{self.line}:{self.column} {self.operator} {self.occurrence}"


def left_out(source: str) -> list[tuple[Position, Position]]:
    """Where the source says something to people or type checkers, or guards against errors in itself alone."""
    tree, lines = ast.parse(source), source.splitlines()
    found: list[ast.AST] = []
    for node in ast.walk(tree):
        match node:
            case ast.arg(annotation=annotation) if annotation is not None:
                found.append(annotation)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if node.returns is not None:
                found.append(node.returns)
            case ast.AnnAssign():
                found.append(node.annotation)
            case ast.Raise() | ast.JoinedStr() | ast.Assert():
                found.append(node)
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                found.append(node)
            case ast.If(test=test) if ast.unparse(test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
                found.append(node)
            case ast.Call():
                name = ast.unparse(node.func)
                if _SAYS.search(name):
                    found += [*node.args, *node.keywords]
                if name in ("cast", "typing.cast"):
                    found += node.args[:1]
                if name in ("TypeVar", "ParamSpec"):
                    found += [*node.args, *node.keywords]
                guards = {"zip": {"strict"}, "dataclass": {"frozen", "slots", "repr", "kw_only", "eq"}}.get(name, set())
                found += [keyword for keyword in node.keywords if keyword.arg in guards]
            case ast.ClassDef() if bases := {ast.unparse(base) for base in node.bases}:
                # a protocol's members are declarations; an autograd function's methods are called on the class
                if bases & {"Protocol", "typing.Protocol", "torch.autograd.Function"}:
                    found += [d for member in node.body for d in getattr(member, "decorator_list", ())]
        for decorator in getattr(node, "decorator_list", ()):
            if ast.unparse(decorator) in ("final", "override", "overload", "abstractmethod", "runtime_checkable"):
                found.append(decorator)
    return [_span(node, lines) for node in found]


def _span(node: Any, lines: Sequence[str]) -> tuple[Position, Position]:
    """A node's first and last position; ast counts columns in bytes."""

    def characters(line: int, offset: int) -> int:
        return len(lines[line - 1].encode()[:offset].decode())

    start = (node.lineno, characters(node.lineno, node.col_offset))
    return start, (node.end_lineno, characters(node.end_lineno, node.end_col_offset))


def sites(source: str) -> dict[tuple[Position, Position], list[tuple[str, int]]]:
    """The places that can be changed, in order, and for each the changes: operator and occurrence."""
    try:
        from cosmic_ray.ast import ast_nodes, get_ast
        from cosmic_ray.plugins import get_operator, operator_names
    except ImportError as error:
        raise MutationError(
            f"Cosmic Ray cannot be imported ({error}); install it: pip install -c constraints.txt -e '.[mutation]'"
        ) from error
    lines = source.splitlines()
    nodes, excluded = list(ast_nodes(get_ast(source))), left_out(source)
    found: dict[tuple[Position, Position], list[tuple[str, int]]] = defaultdict(list)
    for name in sorted(operator_names()):
        if name.partition("/")[2] not in OPERATORS:
            continue
        operator = get_operator(name)()
        spans = [span for node in nodes for span in operator.mutation_positions(node)]
        for occurrence, (start, end) in enumerate(spans):
            if lines[end[0] - 1][end[1] :].lstrip().startswith((",", ")")) and "BinaryOperator" in name:
                continue  # the stars and strokes of signatures
            # a decorator's span begins at its "@", and ends with its line
            if not any(first <= (start[0], start[1] + 1) and start < last for first, last in excluded):
                found[start, end].append((name, occurrence))
    return dict(sorted(found.items()))


def mutated(source: str, operator: str, occurrence: int) -> str | None:
    """The source with one change; None where it changes nothing, or leaves what does not compile."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    try:
        code = mutate_code(source, get_operator(operator)(), occurrence)
        same = code is None or ast.dump(ast.parse(code)) == ast.dump(ast.parse(source))
        compile(code or "", "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, AttributeError):  # Cosmic Ray knows no dotted names after "except"
        return None
    return None if same else code


def change(source: str, code: str) -> tuple[str, str]:
    """The lines in which two texts differ, before and after, without what they are indented by."""
    before, after = source.splitlines(), code.splitlines()
    while before and after and before[0] == after[0]:
        before, after = before[1:], after[1:]
    while before and after and before[-1] == after[-1]:
        before, after = before[:-1], after[:-1]
    return "\n".join(map(str.strip, before)), "\n".join(map(str.strip, after))


def equivalent(file: Path = EQUIVALENT) -> dict[tuple[str, str, str], str]:
    """Changes that no test could see, as (module, before, after), and why."""
    listed = tomllib.loads(file.read_text()).get("mutant", [])
    return {(entry["module"], entry["before"], entry["after"]): entry["why"] for entry in listed}


def allot(count: int, weights: Sequence[float], most: Sequence[int]) -> list[int]:
    """``count`` in parts that are as the weights, none above its ``most``: one at a time to who is furthest behind."""
    given = [0] * len(weights)
    for _ in range(min(count, sum(most))):
        open_ones = [i for i in range(len(given)) if given[i] < most[i]]
        given[min(open_ones, key=lambda i: (given[i] + 1) / weights[i])] += 1
    return given


def draw(
    root: Path,
    areas: Sequence[Area],
    count: int,
    seed: int,
    passed_over: Mapping[tuple[str, str, str], str] = MappingProxyType({}),
) -> list[Mutant]:
    """``count`` mutants by the areas' weights, in an area by its modules' sites, in an order that mixes the modules.

    What is drawn in a module depends on its own text, the seed, how many are drawn there, and the changes that are
    passed over: another site is drawn in the place of each.
    """
    places = {path: sites((root / path).read_text()) for area in areas for path in _modules(root, area)}
    of_areas = [{path: places[path] for path in _modules(root, area) if places[path]} for area in areas]
    most = [sum(map(len, files.values())) for files in of_areas]
    drawn: list[Mutant] = []
    for area, files, number in zip(areas, of_areas, allot(count, [a.weight for a in areas], most), strict=True):
        sizes = [len(found) for found in files.values()]
        for path, wanted in zip(files, allot(number, sizes, sizes), strict=True):
            drawn += _draw_in(path, (root / path).read_text(), files[path], wanted, seed, area.tests, passed_over)
    random.Random(seed).shuffle(drawn)
    return [Mutant(**{**vars(mutant), "number": number}) for number, mutant in enumerate(drawn)]


def _modules(root: Path, area: Area) -> list[str]:
    found = sorted({str(path.relative_to(root)) for pattern in area.modules for path in root.glob(pattern)})
    if not found:
        raise MutationError(f"area {area.name}: no module is like {', '.join(area.modules)}; mend the table of areas")
    return found


def _draw_in(
    path: str,
    source: str,
    found: Mapping[Any, list[tuple[str, int]]],
    wanted: int,
    seed: int,
    tests: tuple[str, ...],
    passed_over: Mapping[tuple[str, str, str], str],
) -> list[Mutant]:
    rng = random.Random(f"{seed} {path}")
    drawn: list[Mutant] = []
    for (line, column), end in rng.sample(list(found), len(found)):
        if len(drawn) == wanted:
            break
        changes = found[(line, column), end]
        for operator, occurrence in rng.sample(changes, len(changes)):
            code = mutated(source, operator, occurrence)
            if code is not None:
                if (path, *change(source, code)) not in passed_over:
                    drawn.append(Mutant(-1, path, line, column, operator, occurrence, tests))
                break
    return drawn


def with_marks(source: str, marks: Mapping[str, Position]) -> str:
    """The source with a statement before each statement that holds a position: it makes the file of that name."""
    lines = source.splitlines(keepends=True)
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    before: dict[int, list[str]] = defaultdict(list)
    for file, (line, _) in marks.items():
        # the innermost one that has its line for itself: not an elif, nor what follows a colon or semicolon
        starts = {}
        for node in statements:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            text = lines[first - 1].lstrip()
            own = node.lineno != first or not lines[first - 1].encode()[: node.col_offset].strip()
            if first <= line <= (node.end_lineno or first) and own and not text.startswith("elif"):
                starts[first] = len(lines[first - 1]) - len(text)
        first = max(starts)
        before[first].append(f"{' ' * starts[first]}open({file!r}, 'a').close()\n")
    return "".join("".join(before.get(number, ())) + line for number, line in enumerate(lines, 1))


def difference(mutant: Mutant, root: Path) -> str:
    """A mutant as a diff."""
    source = (root / mutant.path).read_text()
    lines = (mutated(source, mutant.operator, mutant.occurrence) or "").splitlines()
    return "\n".join(difflib.unified_diff(source.splitlines(), lines, mutant.path, mutant.path, lineterm="", n=2))


@dataclass(frozen=True)
class Run:
    """How tests ended: ``code`` of pytest, None where they were out of time."""

    code: int | None
    seconds: float
    output: str

    @property
    def outcome(self) -> str:
        return TIMED_OUT if self.code is None else KILLED if self.code else SURVIVED

    @property
    def by(self) -> str:
        """The test that failed; empty where the output names none."""
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", self.output, flags=re.MULTILINE)
        return failed[1] if failed else ""


class Checkout:
    """A copy of the checkout's files, without what git ignores, in which tests are run."""

    def __init__(self, root: Path, folder: Path, running: set[int]) -> None:
        self.folder = folder
        self._running = running  # process groups, to be killed when the tool is told to end
        self._written = 0
        command = ["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)

    @contextmanager
    def changed(self, files: Mapping[str, str]) -> Iterator[None]:
        """Other texts for some files."""
        before = {path: (self.folder / path).read_text() for path in files}
        try:
            for path, text in files.items():
                self._write(path, text)
            yield
        finally:
            for path, text in before.items():
                self._write(path, text)

    def _write(self, path: str, text: str) -> None:
        """Each at a time of its own, since Python knows by time and size whether compiled code is of this text."""
        self._written += 1
        (self.folder / path).write_text(text)
        os.utime(self.folder / path, (self._written, self._written))

    def run(self, tests: Sequence[str], timeout_s: float) -> Run:
        """The tests until one fails. A group of processes of its own is killed when the time is over."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "VCPO_"))}
        path = os.pathsep.join([str(self.folder), str(self.folder / "tools")])
        environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        command += [
            "-m",
            "not slow and not by_hand and not gpu and not sglang",
            "-o",
            "addopts=--strict-markers --import-mode=importlib",
        ]
        started = time.monotonic()
        child = subprocess.Popen(
            [*command, *tests],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._running.add(child.pid)
        try:
            output, _ = child.communicate(timeout=timeout_s)
            code: int | None = child.returncode
        except subprocess.TimeoutExpired:
            kill_group(child.pid)
            output, _ = child.communicate()
            code = None
        finally:
            self._running.discard(child.pid)
            kill_group(child.pid)  # what the tests may have left
        return Run(code, time.monotonic() - started, output)


def kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


@dataclass
class Results:
    """What is known, and the file that holds it: one JSON object a line, the first says what is run."""

    file: Path
    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)
    unchanged: dict[tuple[str, ...], dict[str, Any]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, what: Mapping[str, Any], *, resume: bool, again: bool) -> None:
        """Read the file, or begin it. ``again``: what has not died is forgotten, and so is what the tests cover."""
        if not self.file.exists():
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.append(what)
            return
        if not resume:
            raise MutationError(f"{self.file} holds results; go on with them by --resume, or choose another --out")
        first, *lines = self.file.read_text().splitlines(keepends=True)
        if changed := [key for key, value in what.items() if json.loads(first).get(key) != value]:
            raise MutationError(f"{self.file} is of another run ({', '.join(changed)} differ); choose another --out")
        for line in lines:
            if not line.endswith("\n"):
                break  # the last write was cut short
            found = json.loads(line)
            if "mutant" in found:
                self.outcomes[found["mutant"]] = found  # also of mutants that are not drawn now
            else:
                self.unchanged[tuple(found["tests"])] = found
        if again:
            self.unchanged.clear()
            self.outcomes = {key: f for key, f in self.outcomes.items() if f["outcome"] in (KILLED, TIMED_OUT)}
        kept = [what, *self.unchanged.values(), *self.outcomes.values()]
        new = self.file.with_suffix(".new")
        new.write_text("".join(json.dumps(found) + "\n" for found in kept))
        new.replace(self.file)

    def append(self, found: Mapping[str, Any]) -> None:
        with self._lock, self.file.open("a") as file:
            file.write(json.dumps(found) + "\n")


@dataclass
class Session:
    """Drawn mutants, run by ``workers`` threads in a copy of the checkout each."""

    root: Path
    mutants: list[Mutant]
    results: Results
    workers: int
    say: Callable[[str], None]
    #: Set when the session ends early: what runs then is killed, which says nothing about a mutant.
    _stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Run what is not known yet."""
        running: set[int] = set()
        copies: queue.Queue[Checkout] = queue.Queue()
        folder = Path(tempfile.mkdtemp(prefix="mutants"))
        for number in range(self.workers):
            copies.put(Checkout(self.root, folder / str(number), running))
        pool = ThreadPoolExecutor(self.workers)

        def in_a_copy(job: Callable[..., None], *arguments: Any) -> None:
            copy = copies.get()
            try:
                job(copy, *arguments)
            finally:
                copies.put(copy)

        try:
            left = [mutant for mutant in self.mutants if mutant.key not in self.results.outcomes]
            sets = list(dict.fromkeys(mutant.tests for mutant in left))
            unknown = [tests for tests in sets if tests not in self.results.unchanged]
            self._wait([pool.submit(in_a_copy, self._unchanged, tests) for tests in unknown])
            self._wait([pool.submit(in_a_copy, self._mutant, mutant) for mutant in left])
        finally:
            self._stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for group in list(running):
                kill_group(group)
            pool.shutdown()
            shutil.rmtree(folder, ignore_errors=True)

    @staticmethod
    def _wait(jobs: list[Future[None]]) -> None:
        for job in as_completed(jobs):
            job.result()

    def _unchanged(self, copy: Checkout, tests: tuple[str, ...]) -> None:
        """Run tests against the unchanged code, and note what they cover."""
        reached = copy.folder / "reached"
        reached.mkdir()
        marks: dict[str, dict[str, Position]] = defaultdict(dict)
        for mutant in self.mutants:
            if mutant.tests == tests:
                marks[mutant.path][str(reached / str(mutant.number))] = (mutant.line, mutant.column)
        files = {path: with_marks((self.root / path).read_text(), of_file) for path, of_file in marks.items()}
        with copy.changed(files):
            run = copy.run(_paths(copy.folder, tests), UNCHANGED_S)
        keys = {str(mutant.number): mutant.key for mutant in self.mutants}
        covered = sorted(keys[file.name] for file in reached.iterdir())
        shutil.rmtree(reached)
        if self._stopping.is_set():
            return
        if run.outcome != SURVIVED:
            tail = "\n".join(run.output.splitlines()[-30:])
            said = f"the unchanged code did not pass {' '.join(tests)} ({run.outcome})"
            raise MutationError(f"{tail}\n{said}; mend it first, or the table of areas")
        found = {"tests": list(tests), "seconds": round(run.seconds, 1), "covered": covered}
        self.results.unchanged[tests] = found
        self.results.append(found)
        self.say(f"unchanged code: passed in {run.seconds:.0f} s: {' '.join(tests)}")

    def _mutant(self, copy: Checkout, mutant: Mutant) -> None:
        unchanged = self.results.unchanged[mutant.tests]
        found: dict[str, Any] = {"mutant": mutant.key, "outcome": NOT_COVERED, "seconds": 0.0, "by": ""}
        if mutant.key in unchanged["covered"]:
            code = mutated((self.root / mutant.path).read_text(), mutant.operator, mutant.occurrence)
            assert code is not None  # as it was when it was drawn
            with copy.changed({mutant.path: code}):
                run = copy.run(_paths(copy.folder, mutant.tests), TIMES * unchanged["seconds"] + MORE_S)
            found |= {"outcome": run.outcome, "seconds": round(run.seconds, 1), "by": run.by}
        if self._stopping.is_set():
            return
        self.results.outcomes[mutant.key] = found
        self.results.append(found)
        count = sum(drawn.key in self.results.outcomes for drawn in self.mutants)
        where = f"{mutant.path}:{mutant.line} {mutant.operator.partition('/')[2]}"
        self.say(f"{count}/{len(self.mutants)} {found['outcome']} in {found['seconds']:.0f} s: {where} {found['by']}")


def _paths(folder: Path, tests: Sequence[str]) -> list[str]:
    """Patterns of test files as paths, in order; paths and single tests as they are."""
    found: list[str] = []
    for test in tests:
        path, colons, name = test.partition("::")
        matching = sorted(str(file.relative_to(folder)) for file in folder.glob(path))
        if not matching:
            raise MutationError(f"no test is like {test}; mend the table of areas")
        found += [f"{file}{colons}{name}" for file in matching]
    return list(dict.fromkeys(found))


def run_identity(root: Path, areas: Sequence[Area]) -> dict[str, Any]:
    """What results belong to: the text of every module of the areas, whatever is drawn and whatever tests are run."""
    digest = hashlib.sha256()
    for path in sorted({path for area in areas for path in _modules(root, area)}):
        digest.update((root / path).read_bytes())
    return {"sources": digest.hexdigest()}


def table(mutants: Sequence[Mutant], outcomes: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a line a module, and the share that died (killed or timed out)."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant in mutants:
        for path in (mutant.path, "all"):
            counts[path]["drawn"] += 1
            counts[path][outcomes.get(mutant.key, {"outcome": "not run"})["outcome"]] += 1
    lines = [f"| module | drawn | {' | '.join(OUTCOMES)} |", f"|---{'|---:' * (1 + len(OUTCOMES))}|"]
    for path in [*sorted(counts.keys() - {"all"}), "all"]:
        lines.append(f"| {path} | " + " | ".join(str(counts[path][key]) for key in ("drawn", *OUTCOMES)) + " |")
    every = counts["all"]
    died, run = every[KILLED] + every[TIMED_OUT], every["drawn"] - every["not run"]
    seconds = sum(outcomes[mutant.key]["seconds"] for mutant in mutants if mutant.key in outcomes)
    lines += ["", f"{died} of {run} died ({100 * died / max(1, run):.0f} %); {seconds / max(1, run):.0f} s each."]
    if every["not run"]:
        lines.append(f"{every['not run']} of {every['drawn']} are not run yet.")
    return "\n".join(lines) + "\n"


def survivors(root: Path, mutants: Sequence[Mutant], outcomes: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: the diff of every mutant that no test killed, in the order of the source."""
    parts = []
    for mutant in sorted(mutants, key=lambda m: (m.path, m.line, m.column)):
        outcome = outcomes.get(mutant.key, {"outcome": ""})["outcome"]
        if outcome in (SURVIVED, NOT_COVERED):
            heading = f"## {mutant.number}: {mutant.path}:{mutant.line} ({outcome})"
            parts.append(f"{heading}\n\n```diff\n{difference(mutant, root)}\n```\n")
    return "\n".join(parts)


def chosen(root: Path, areas: Sequence[Area], modules: Sequence[str]) -> list[Area]:
    """The areas, or parts of them, that are named: by an area's name or a pattern of paths."""
    if not modules:
        return list(areas)
    found = []
    for area in areas:
        paths = [p for p in _modules(root, area) if area.name in modules or any(fnmatch.fnmatch(p, m) for m in modules)]
        if paths:
            found.append(Area(area.name, area.weight, tuple(paths), area.tests))
    if not found:
        names = ", ".join(area.name for area in areas)
        raise MutationError(f"--modules {' '.join(modules)}: neither an area ({names}) nor a pattern of their modules")
    return found
