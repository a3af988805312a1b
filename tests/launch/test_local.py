"""The supervisor with small stand-ins for the roles: every way a run can end, and nothing left alive after it.

Each stand-in starts two processes of its own: one in its group, and one that escapes into a session and an
environment of its own, as the worst library would. Every pid is recorded in RUN_DIR/pids and must be gone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.messages import assert_names, assert_said
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.launch import workspace
from vcpo_megatron.launch.local import _explained
from vcpo_megatron.launch.resume_command import resume_command
from vcpo_megatron.run.directory import RunDirectory
from vcpo_megatron.run.integrity import sealed

PATIENCE_S = 60.0
ROOT = Path(__file__).parents[2]


def manifest(step: int = 0, attempt: int = 1) -> str:
    """The smallest text that counts as the manifest of a complete checkpoint."""
    counts = {"step": step, "attempt": attempt, "version_number": step}
    return sealed({**counts, "learner": {}, "orchestrator": {}})


MANIFEST = manifest()

#: Runs ``local.run`` in a process of its own, so that signals, kill -9 and exit codes are the real ones.
DRIVER = """
import json, signal, sys
from pathlib import Path
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.run.directory import RunDirectory
from vcpo_megatron.launch.local import LaunchOptions, run

order = json.loads(sys.argv[1])

def command(process):
    name = f"{process.role}.{process.rank}"
    code = order["codes"].get(name, order["codes"][process.role])
    return (sys.executable, "-S", "-c", order["preamble"] + code, name)

config = RunConfig.model_validate(order["config"])
signal.pthread_sigmask(signal.SIG_BLOCK, order["blocked"])
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the suite runs under nohup, and then left so
sys.exit(run(config, RunDirectory(Path(order["directory"])), LaunchOptions(**order["options"]), command=command))
"""

PREAMBLE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
name, home = sys.argv[1], Path(os.environ["VCPO_RUN_DIR"])
(home / "pids").mkdir(exist_ok=True)
def record(name, pid):
    (home / f"{name}.tmp").write_text(f"{pid}\\n")
    (home / f"{name}.tmp").rename(home / "pids" / name)  # whole, or not there
def wait(path, limit=100):
    end = time.monotonic() + limit
    while not (home / path).exists():
        if time.monotonic() > end:
            sys.exit(f"stand-in waited for {path}")
        time.sleep(0.01)
def wait_for_end(name):
    wait(f"pids/{name}")
    stat = Path("/proc", (home / "pids" / name).read_text().strip(), "stat")
    try:
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
    except OSError:
        pass  # it is reaped
def fail(message, code=1):
    print("vcpo: error: " + message, file=sys.stderr, flush=True)
    os._exit(code)
def row(**values):
    with open(home / "metrics.jsonl", "a") as file:
        file.write(json.dumps(values) + "\\n")
record(name + "-member", subprocess.Popen(["sleep", "120"]).pid)
ESCAPE
record(name, os.getpid())
"""
ESCAPE = 'record(name + "-escaped", subprocess.Popen(["sleep", "120"], start_new_session=True, env={}).pid)'

#: Learner ranks that do as they should: they end when the orchestrator tells them to.
GOOD_LEARNER = "wait('stop')"
GOOD_ORCHESTRATOR = """
for step in range(3):
    row(**{"step": step, "eval/accuracy": 0.25 * step, "time/step": 0.1})
(home / "stop").touch()
"""
#: Ends as asked by SIGTERM, after a checkpoint of step 2. A SIGTERM that is blocked (``started``) waits for it.
STOPPABLE_ORCHESTRATOR = """
def stop(*args):
    folder = home / "checkpoints" / "step_2"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(MANIFEST)
    (home / "stop").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
(home / "listening").touch()
time.sleep(100)
"""
#: Does not end when it is asked to.
STUBBORN_ORCHESTRATOR = """
signal.signal(signal.SIGTERM, lambda *args: (home / "asked").touch())
(home / "listening").touch()
time.sleep(100)
"""
SLEEP = "time.sleep(100)"


@dataclass
class Run:
    process: subprocess.Popen[str]
    directory: Path

    def wait(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err

    def pid(self, name: str) -> int:
        wait_for(lambda: (self.directory / "pids" / name).exists(), f"{name} to start")
        return int((self.directory / "pids" / name).read_text())

    def pids(self) -> dict[str, int]:
        return {path.name: int(path.read_text()) for path in (self.directory / "pids").iterdir()}

    def all_started(self) -> None:
        for name in ("orchestrator.0", "learner.0", "learner.1"):
            self.pid(name)

    def nothing_left(self, limit_s: float = 5.0) -> None:
        """Also members and escaped ones."""
        wait_for(lambda: not self._alive(), f"these to be gone: {self._alive()}", limit_s)

    def _alive(self) -> list[str]:
        return [name for name, pid in self.pids().items() if not is_gone(pid)]


def wait_for(condition, what: str, limit_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {limit_s:g} s for {what}")
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def config(**sections: dict) -> dict:
    base: dict = {
        "model": {"path": "/model"},
        "train": {"steps": 3},
        "environment": {"name": "countdown"},
        "launch": {"learner_ranks": 2},
        "rollout": {"servers": 2},
    }
    for name, values in sections.items():
        base[name] = base.get(name, {}) | values
    return base


@contextlib.contextmanager
def started(
    directory: Path,
    *,
    resume: bool = False,
    from_step: int | None = None,
    max_hours: float | None = None,
    escape: bool = True,
    sections: dict | None = None,
    blocked: tuple[int, ...] = (),
    redirection: str = "",
    **codes: str,
) -> Iterator[Run]:
    """``codes``: role, or role_rank for one rank, to the code of its stand-in. ``blocked``: signals that wait in every
    process until it lets them in. ``redirection``: of the supervisor's output, as a shell has it."""
    codes = {"orchestrator": GOOD_ORCHESTRATOR, "learner": GOOD_LEARNER} | codes
    order = {
        "directory": str(directory),
        "options": {"resume": resume, "from_step": from_step, "max_hours": max_hours},
        "config": config(**(sections or {})),
        "preamble": PREAMBLE.replace("ESCAPE", ESCAPE if escape else "") + f"MANIFEST = {MANIFEST!r}\n",
        "blocked": blocked,
        "codes": {name.replace("_", "."): code for name, code in codes.items()},
    }
    process = subprocess.Popen(
        ["bash", "-c", f'set -o pipefail; "$@" {redirection}', "sh", sys.executable, "-c", DRIVER, json.dumps(order)]
        if redirection
        else [sys.executable, "-c", DRIVER, json.dumps(order)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    run = Run(process, directory)
    try:
        yield run
    finally:
        process.kill()
        process.wait(timeout=PATIENCE_S)
        for pid in run.pids().values() if (directory / "pids").exists() else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


# --- orderly ends -----------------------------------------------------------------------------


def test_normal_end(tmp_path: Path) -> None:
    with started(tmp_path / "run") as run:
        code, out, err = run.wait()
        assert (code, err) == (0, "")
        assert_said("lines of a run", "done", out.splitlines()[-1], run=tmp_path / "run")
        assert any(line.startswith("step 3/3  0:00 left  accuracy 0.5000") for line in out.splitlines())
        run.nothing_left()
        assert len(run.pids()) == 9
    assert RunDirectory(tmp_path / "run").how_it_ended() == "done"


def test_every_process_gets_its_context_and_the_torch_variables(tmp_path: Path) -> None:
    dump = "(home / f'{name}.json').write_text(json.dumps(dict(os.environ)))\n"
    with started(
        tmp_path,
        orchestrator=dump + "wait('learner.0.json'); wait('learner.1.json')\n" + GOOD_ORCHESTRATOR,
        learner=dump + GOOD_LEARNER,
    ) as run:
        assert run.wait()[0] == 0
    from vcpo_megatron.config.process import ProcessContext

    environments = {
        n: json.loads((tmp_path / f"{n}.json").read_text()) for n in ("orchestrator.0", "learner.0", "learner.1")
    }
    contexts = {name: ProcessContext.from_environment(environment) for name, environment in environments.items()}
    context = contexts["orchestrator.0"]
    assert contexts["learner.0"] == contexts["learner.1"] == context
    assert (context.run_dir, context.attempt, context.resume_step) == (tmp_path, 1, None)
    assert len(context.token) >= 32 and len(context.server_ports) == 2
    assert context.run == (tmp_path / "identity").read_text().split()[0] and len(context.run) == 8
    assert context.config().launch.learner_ranks == 2
    ports = {int(context.control.rpartition(":")[2]), int(environments["learner.0"]["MASTER_PORT"])}
    assert len(ports | set(context.server_ports)) == 4
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    assert [environments["learner.1"][name] for name in names[:4]] == ["1", "1", "2", "127.0.0.1"]
    assert environments["learner.0"]["MASTER_PORT"] == environments["learner.1"]["MASTER_PORT"]
    assert "RANK" not in environments["orchestrator.0"]
    assert environments["learner.0"]["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")


def test_a_launcher_around_the_run_says_nothing_to_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the agent's store, learner rank 0 would wait for one that nobody hosts."""
    theirs = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "10.1.2.3"}
    theirs |= {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8", "ROLE_RANK": "5"}
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    dump = "(home / f'{name}.json').write_text(json.dumps(dict(os.environ)))\n"
    orchestrator = dump + "wait('learner.0.json')\n" + GOOD_ORCHESTRATOR
    with started(tmp_path, orchestrator=orchestrator, learner=dump + GOOD_LEARNER) as run:
        code, out, _ = run.wait()
    assert code == 0
    found = {role: json.loads((tmp_path / f"{role}.0.json").read_text()) for role in ("orchestrator", "learner")}
    assert not theirs.keys() & found["orchestrator"].keys()
    known = {name: found["learner"].get(name) for name in theirs}
    expected = {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert known == dict.fromkeys(theirs) | expected
    (said,) = [line for line in out.splitlines() if "not passed on" in line]
    assert "TORCHELASTIC_RUN_ID" in said and "MASTER_ADDR=10.1.2.3: set launch.address" in said


def test_each_partition_sees_its_own_gpus(tmp_path: Path) -> None:
    from vcpo_megatron.config.schema import RunConfig
    from vcpo_megatron.launch import workspace
    from vcpo_megatron.launch.local import LaunchOptions, _context, role_environment
    from vcpo_megatron.launch.placement import plan_local
    from vcpo_megatron.launch.ports import Ports
    from vcpo_megatron.launch.terminal import Terminal

    settings = config()
    settings["rollout"] |= {"engine": "sglang", "python": "/p"}
    plan = plan_local(RunConfig.model_validate(settings), gpus=("4", "5", "6", "GPU-ab", "8"))
    assert role_environment(plan.orchestrator, plan, 29500, {}) == {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "6,GPU-ab",
    }
    assert role_environment(plan.learners[1], plan, 29500, {"OMP_NUM_THREADS": "3"}) == {
        "OMP_NUM_THREADS": "3",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "4,5",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    cpus = plan_local(RunConfig.model_validate(config()))
    assert "CUDA_VISIBLE_DEVICES" not in role_environment(cpus.learners[0], cpus, 29500, {})
    for_gpus = {"PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"}
    assert not for_gpus & role_environment(cpus.learners[0], cpus, 29500, {}).keys()
    shared = RunConfig.model_validate({**config(), "parallel": {"tensor": 2}})
    cut = plan_local(shared, gpus=("4", "5", "6", "7"))
    assert role_environment(cut.learners[0], cut, 29500, {})["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    own = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    chosen = role_environment(cut.learners[0], cut, 29500, own)
    assert "PYTORCH_ALLOC_CONF" not in chosen and chosen["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    directory = RunDirectory(tmp_path)
    workspace.prepare(directory)
    context = _context(directory, plan, Ports(1, 2, (3, 4)), LaunchOptions(), Terminal())
    assert (context.learner_devices, context.server_devices) == (("4", "5"), ("6", "GPU-ab"))


def test_learner_that_outlives_the_orchestrator_is_killed(tmp_path: Path) -> None:
    with started(tmp_path, learner_1=SLEEP, sections={"launch": {"timeout_s": 3.0}}) as run:
        code, out, err = run.wait()
        assert code == 0 and out.splitlines()[-1].startswith("done: ")
        assert_said("lines of a run", "learner rank outlives the orchestrator", err)
        run.nothing_left()


def test_learner_that_fails_in_its_teardown_is_a_warning(tmp_path: Path) -> None:
    orchestrator = "(home / 'stop').touch()"
    learner = "wait_for_end('orchestrator.0'); time.sleep(0.5); fail('teardown')"
    with started(tmp_path, orchestrator=orchestrator, learner_1=learner) as run:
        code, _, err = run.wait()
        assert code == 0
        assert_names(err, "vcpo: warning", "learner rank 1", "exit code 1")


# --- deaths -----------------------------------------------------------------------------------


def error_line(code: int, err: str, expected_code: int = 1) -> str:
    """The one line that a failed run puts on standard error."""
    assert code == expected_code and err.count("\n") == 1 and err.startswith("vcpo: error: "), err
    return err.removeprefix("vcpo: error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("name", "says"),
    [("orchestrator.0", "orchestrator"), ("learner.0", "learner rank 0"), ("learner.1", "learner rank 1")],
)
@pytest.mark.parametrize("how", ["error", "kill -9"])
def test_a_death_ends_the_run_with_one_line(tmp_path: Path, name: str, says: str, how: str) -> None:
    codes = {"orchestrator": SLEEP, "learner": SLEEP}
    if how == "error":
        codes[name.replace(".", "_")] = "wait('go'); fail('no such thing: x = 3')"
    with started(tmp_path, **codes) as run:
        run.all_started()
        start = time.monotonic()
        (tmp_path / "go").touch() if how == "error" else os.kill(run.pid(name), signal.SIGKILL)
        code, out, err = run.wait()
        assert time.monotonic() - start < 10
        line = error_line(code, err)
        log = tmp_path / "logs" / f"{name}.log"
        if how == "error":
            assert_said("lines of a run", "process ended", line, log=log, process=says)
        else:
            assert line == f"{says} ended with signal SIGKILL; log: {log}"
        assert "failed: 0 of 3 steps" in out and "--resume" in out.splitlines()[-1]
        assert RunDirectory(tmp_path).how_it_ended() == "failed"
        run.nothing_left()


def test_configuration_refused_by_a_process_is_exit_code_2(tmp_path: Path) -> None:
    with started(tmp_path, orchestrator="fail('environment.name: unknown', 2)", learner=SLEEP) as run:
        code, out, err = run.wait()
        assert_said("lines of a run", "configuration was refused", out.splitlines()[-1])
        assert "environment.name: unknown" in error_line(code, err, expected_code=2)


@pytest.mark.parametrize("consequence", ["fail('gloo: connection closed by peer')", "os.abort()"])
def test_the_cause_is_named_and_not_its_consequence(tmp_path: Path, consequence: str) -> None:
    """Rank 0 notices the death of rank 1 within the same poll; the orchestrator follows."""
    watch = (
        "import pathlib\npeer = (home / 'pids' / 'learner.1')\nwait('pids/learner.1')\n"
        "stat = pathlib.Path(f'/proc/{int(peer.read_text())}/stat')\n"
        "while stat.exists() and stat.read_text().rpartition(')')[2].split()[0] != 'Z': pass\n"
    )
    with started(
        tmp_path,
        orchestrator=watch + "fail('learner rank 0 is silent')",
        learner_0=watch + consequence,
        learner_1=SLEEP,
    ) as run:
        run.all_started()
        time.sleep(0.3)
        os.kill(run.pid("learner.1"), signal.SIGKILL)
        code, _, err = run.wait()
        assert error_line(code, err).startswith("learner rank 1 ended with signal SIGKILL; log: ")


def test_a_kill_is_named_even_when_its_consequence_is_seen_first(tmp_path: Path) -> None:
    """The kernel closes a killed process's sockets before it tells the parent of its end."""
    killed = "wait('go'); time.sleep(0.3); os.kill(os.getpid(), 9)"
    with started(tmp_path, orchestrator=SLEEP, learner_0="wait('go'); fail('gloo')", learner_1=killed) as run:
        run.all_started()
        (tmp_path / "go").touch()
        code, _, err = run.wait()
        assert error_line(code, err).startswith("learner rank 1 ended with signal SIGKILL; log: ")


def test_the_orchestrator_is_named_when_it_ended_the_run(tmp_path: Path) -> None:
    """It tells the ranks first and stops its servers then: it dies last."""
    told = "wait('go'); fail('learner rank 0: ControlError: orchestrator ended the run: FleetError: rollout server 0')"
    own = "wait('go'); time.sleep(2.5); fail('rollout server 0 died (exit code -9), see server.0.log')"
    with started(tmp_path, orchestrator=own, learner=told) as run:
        run.all_started()
        (tmp_path / "go").touch()
        code, _, err = run.wait()
        line = error_line(code, err)
        assert line.startswith(f"orchestrator ended with exit code 1; log: {tmp_path}/logs/orchestrator.0.log; ")
        assert_names(line, "rollout server 0", "exit code -9", "server.0.log")


def test_of_two_errors_the_earliest_is_named(tmp_path: Path) -> None:
    with started(
        tmp_path,
        orchestrator="wait_for_end('learner.1'); time.sleep(0.3); fail('late')",
        learner=SLEEP,
        learner_1="wait('go'); fail('early')",
    ) as run:
        run.all_started()
        (tmp_path / "go").touch()
        code, _, err = run.wait()
        assert error_line(code, err).endswith("last message: early")


def test_orchestrator_that_hangs_after_the_learner_ended(tmp_path: Path) -> None:
    with started(tmp_path, orchestrator=SLEEP, learner="", sections={"launch": {"timeout_s": 1.0}}) as run:
        code, _, err = run.wait()
        line = error_line(code, err)
        assert_names(line, "orchestrator", "1 s (launch.timeout_s)", "learner rank")
        run.nothing_left()


def test_kill_9_of_the_supervisor_leaves_nothing(tmp_path: Path) -> None:
    """Children die with it; the members of their groups, which did not ask to, are killed by the guard."""
    with started(tmp_path, escape=False, orchestrator=SLEEP, learner=SLEEP) as run:
        run.all_started()
        run.process.kill()
        run.nothing_left(limit_s=10.0)
        assert len(run.pids()) == 6


# --- signals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_first_signal_stops_after_a_checkpoint(tmp_path: Path, signum: int, expected: int) -> None:
    with started(tmp_path, orchestrator=STOPPABLE_ORCHESTRATOR) as run:
        run.all_started()
        wait_for(lambda: (tmp_path / "listening").exists(), "the orchestrator")
        run.process.send_signal(signum)
        code, out, err = run.wait()
        assert (code, err) == (expected, "")
        name = signal.Signals(signum).name
        lines = out.splitlines()
        assert_said("lines of a run", "start", lines[0], run=tmp_path)
        assert lines[1].startswith(f"{name}: stopping after the current step")
        assert_said("lines of a run", "stopped by a signal", lines[-2], run=tmp_path, signal=name)
        assert lines[-1] == "newest complete checkpoint: step_2; continue with: " + continued(directory=str(tmp_path))
        assert RunDirectory(tmp_path).how_it_ended() == f"stopped by {name}"
        run.nothing_left()


def continued(environment: str = "modular_sum", directory: str = "/r") -> str:
    sections = config(environment={"name": environment})
    return resume_command(RunDirectory(Path(directory)), RunConfig.model_validate(sections))


def test_the_command_to_continue_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "a venv" / "vcpo"
    script.parent.mkdir()
    script.touch(mode=0o755)
    rest = " train --resume --run-dir /r"
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert continued() == f"'{script}'{rest}"
    monkeypatch.setattr(sys, "argv", ["/somewhere/__main__.py"])
    monkeypatch.setattr(sys, "executable", "/opt/python")
    assert continued() == f"/opt/python -m vcpo_megatron{rest}"
    monkeypatch.setenv("PATH", str(script.parent))
    assert continued() == f"vcpo{rest}"
    assert continued(directory="/a b").endswith(" --run-dir '/a b'")


def test_the_command_to_continue_says_where_python_finds_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any folder: entries of PYTHONPATH are from the root, and those that nothing needs are left out."""
    tasks, other = tmp_path / "my tasks", tmp_path / "other"
    for folder in (tasks, other):
        folder.mkdir()
    (tasks / "mine.py").touch()
    (other / "pack").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "argv", ["/bin/vcpo"])
    monkeypatch.setenv("PYTHONPATH", f"{tasks.name}{os.pathsep}{other}")
    assert continued() == "/bin/vcpo train --resume --run-dir /r"
    assert continued("mine:Task") == f"PYTHONPATH='{tasks}' /bin/vcpo train --resume --run-dir /r"
    assert continued("pack.task:Task") == f"PYTHONPATH={other} /bin/vcpo train --resume --run-dir /r"
    monkeypatch.setattr(sys, "executable", "/opt/python")
    monkeypatch.setattr(sys, "argv", ["/somewhere/__main__.py"])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tasks)  # which ``python -m`` searches
    assert continued("mine:Task") == (
        f"PYTHONPATH='{ROOT}:{tasks}' /opt/python -m vcpo_megatron train --resume --run-dir /r"
    )


def test_a_run_whose_checkpoints_are_lost_is_not_told_to_simply_continue(tmp_path: Path) -> None:
    lose = (
        "(home / 'checkpoints').mkdir(); (home / 'checkpoints' / 'latest').write_text('step_2')\n"
        "fail('the judge is down')\n"
    )
    with started(tmp_path, orchestrator=lose) as run:
        code, out, _ = run.wait()
    last = out.splitlines()[-1]
    assert code == 1 and "continue with" not in last
    assert "it cannot simply go on: " in last and "latest names step_2" in last


def test_signal_before_the_orchestrator_listens(tmp_path: Path) -> None:
    with started(tmp_path, orchestrator=SLEEP, learner=SLEEP) as run:
        run.all_started()
        run.process.terminate()
        code, out, err = run.wait()
        assert (code, err) == (143, "")
        assert "no complete checkpoint; continue with" in out
        run.nothing_left()


def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    with started(tmp_path, orchestrator=STUBBORN_ORCHESTRATOR, learner=SLEEP) as run:
        run.all_started()
        wait_for(lambda: (tmp_path / "listening").exists(), "the orchestrator")
        run.process.send_signal(signal.SIGINT)
        wait_for(lambda: (tmp_path / "asked").exists(), "the orchestrator to be asked")
        time.sleep(0.5)
        assert run.process.poll() is None  # the first one waits
        start = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        code, out, err = run.wait()
        assert (code, err) == (130, "") and time.monotonic() - start < 3
        run.nothing_left()


def test_orchestrator_that_hangs_after_a_signal(tmp_path: Path) -> None:
    short = {"launch": {"timeout_s": 1.0}}
    with started(tmp_path, orchestrator=STUBBORN_ORCHESTRATOR, learner=SLEEP, sections=short) as run:
        run.all_started()
        wait_for(lambda: (tmp_path / "listening").exists(), "the orchestrator")
        run.process.terminate()
        code, _, err = run.wait()
        assert_names(error_line(code, err), "orchestrator", "1 s (launch.timeout_s)", "SIGTERM")
        run.nothing_left()


def test_death_while_stopping_is_still_a_failure(tmp_path: Path) -> None:
    orchestrator = (
        "signal.signal(signal.SIGTERM, lambda *a: (home / 'go').touch()); (home / 'listening').touch()\n"
        "for _ in range(600): time.sleep(0.1)"
    )
    failing = "wait('go'); fail('disk full')"
    with started(tmp_path, orchestrator=orchestrator, learner_0=SLEEP, learner_1=failing) as run:
        run.all_started()
        wait_for(lambda: (tmp_path / "listening").exists(), "the orchestrator")
        run.process.terminate()
        code, _, err = run.wait()
        assert error_line(code, err).endswith("last message: disk full")


# --- the run directory ------------------------------------------------------------------------


def test_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    with started(tmp_path, orchestrator=SLEEP, learner=SLEEP) as first:
        first.all_started()
        with started(tmp_path, resume=True) as second:
            code, _, err = second.wait()
            line = error_line(code, err)
            assert_said("lines of a run", "run directory in use", line, run=tmp_path, pid=first.process.pid)
        assert first.process.poll() is None
    assert (tmp_path / "attempts").read_text() == "1\n"


def test_directory_with_results_needs_resume(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with started(tmp_path) as run:
        code, _, err = run.wait()
        assert_said("lines of a run", "run directory holds a run", error_line(code, err), run=tmp_path)
    assert not (tmp_path / "attempts").exists()


@pytest.mark.parametrize(
    ("checkpoints", "step", "says"),
    [
        ({}, "", "no complete checkpoint yet: starting at step 0"),
        ({2: True, 3: True, 12: False}, "3", "resuming from step_3"),
    ],
)
def test_resume_takes_the_newest_complete_checkpoint(
    tmp_path: Path, checkpoints: dict[int, bool], step: str, says: str
) -> None:
    (tmp_path / "attempts").write_text("4\n")
    for number, complete in checkpoints.items():
        folder = tmp_path / "checkpoints" / f"step_{number}"
        folder.mkdir(parents=True)
        (folder / ("manifest.json" if complete else "data")).write_text(MANIFEST)
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {row}}}\n' for row in range(14)))
    tell = (
        "(home / 'metrics.jsonl').unlink()\n"
        "(home / 'told').write_text(os.environ['VCPO_RESUME_STEP'] + ' ' + os.environ['VCPO_ATTEMPT'])\n"
    )
    with started(tmp_path, resume=True, orchestrator=tell + GOOD_ORCHESTRATOR) as run:
        code, out, err = run.wait()
        assert (code, err) == (0, "") and out.splitlines()[0] == f"{tmp_path}: {says}"
        assert "step 14/" not in out  # a row of the attempt before, which the orchestrator cuts off
    assert (tmp_path / "told").read_text() == f"{step} 5"


def test_a_lost_count_of_attempts_goes_on_after_that_of_the_checkpoints(tmp_path: Path) -> None:
    from vcpo_megatron.launch import workspace

    for step, attempt in ((2, 7), (4, 6)):
        folder = tmp_path / "checkpoints" / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(manifest(attempt=attempt))
    assert [workspace.next_attempt(RunDirectory(tmp_path)) for _ in range(2)] == [8, 9]


def checkpoints(home: Path, **texts: str) -> RunDirectory:
    """Checkpoints step_N by the texts of their manifests, "" for none; ``latest`` names the last."""
    for name, text in texts.items():
        folder = home / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / ("manifest.json" if text else "data")).write_text(text)
        (home / "checkpoints" / "latest").write_text(f"{name}\n")
    return RunDirectory(home)


def test_what_a_resume_goes_on_from_is_never_an_earlier_one_unasked(tmp_path: Path) -> None:
    """Damaged, its manifest lost, or gone: a checkpoint that was complete once is not passed over."""
    cases = {
        "damaged": ({"step_1": MANIFEST, "step_2": MANIFEST[:40]}, "", "step_2 is damaged (manifest.json cannot "),
        "no manifest": ({"step_1": MANIFEST, "step_2": ""}, "", "latest names step_2, and this is no complete"),
        "gone": ({"step_1": MANIFEST, "step_2": MANIFEST}, "step_2", "latest names step_2, and this is no complete"),
        "only damaged": ({"step_2": MANIFEST[:40]}, "", "step_2 is damaged (manifest.json cannot be read)"),
        "all gone": ({"step_2": MANIFEST}, "step_2", "latest names step_2, and this is no complete"),
    }
    from vcpo_megatron.launch.workspace import RunDirectoryError, chosen_checkpoint

    for name, (texts, lost, says) in cases.items():
        directory = checkpoints(tmp_path / name, **texts)
        if lost:
            shutil.rmtree(directory.checkpoints / lost)
        with pytest.raises(RunDirectoryError) as caught:
            chosen_checkpoint(directory, None)
        earlier = "step_1" in texts
        back = "go back with --resume --from-step 1" if earlier else "start a new run in another --run-dir"
        assert says in str(caught.value) and str(caught.value).endswith(f": put its files back, or {back}"), name
        if earlier:
            assert chosen_checkpoint(directory, 1) == 1


def test_a_save_that_never_completed_is_passed_over(tmp_path: Path) -> None:
    from vcpo_megatron.launch.workspace import chosen_checkpoint

    directory = checkpoints(tmp_path / "begun", step_2="")
    (directory.checkpoints / "latest").unlink()  # which nothing but a complete checkpoint writes
    assert chosen_checkpoint(directory, None) is None
    directory = checkpoints(tmp_path / "later", step_4="", step_1=MANIFEST[:40], step_2=MANIFEST)
    assert chosen_checkpoint(directory, None) == 2  # nor is an older one that is damaged in the way


@pytest.mark.parametrize("lost", ["all", "by a file"])
def test_a_run_that_lost_its_checkpoints_is_not_begun_anew(tmp_path: Path, lost: str) -> None:
    folder = checkpoints(tmp_path, step_2=MANIFEST).checkpoints
    rows = '{"step": 0}\n{"step": 1}\n'
    (tmp_path / "metrics.jsonl").write_text(rows)
    shutil.rmtree(folder / "step_2")
    if lost == "by a file":
        shutil.rmtree(folder)
        folder.touch()
    with started(tmp_path, resume=True) as run:
        code, _, err = run.wait()
    says = {
        "all": f"{folder}/latest names step_2, and this is no complete checkpoint any more: put its files back, or "
        "start a new run in another --run-dir",
        "by a file": f"{folder} is a file; put the folder of the checkpoints back",
    }[lost]
    assert error_line(code, err) == says
    assert (tmp_path / "metrics.jsonl").read_text() == rows and not (tmp_path / "attempts").exists()


def test_a_full_disk_at_the_start_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "orchestrator.0.log").symlink_to("/dev/full")
    with started(tmp_path) as run:
        code, _, err = run.wait()
    assert_said("lines of a run", "full disk at the start", error_line(code, err), run=tmp_path)


def test_a_full_disk_is_named_when_the_logs_cannot_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert workspace.full_disk(RunDirectory(tmp_path)) == ""
    monkeypatch.setattr(workspace.shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    assert_said("lines of a run", "full disk at a death", workspace.full_disk(RunDirectory(tmp_path)), run=tmp_path)


def test_a_disk_that_fills_up_is_told_with_what_waits_and_again_when_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, now = [10**9], [0.0]
    monkeypatch.setattr(workspace.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    monkeypatch.setattr(workspace.time, "monotonic", lambda: now[0])
    watch = workspace.DiskWatch(RunDirectory(tmp_path))

    def looks(bytes_free: int) -> list[str]:
        free[0] = bytes_free
        found = []
        for _ in range(20):
            now[0] += 0.5
            found.append(watch.look())
        return [line for line in found if line is not None]

    assert looks(10**9) == []
    (line,) = looks(4096)
    assert_names(line, f"vcpo: warning: {tmp_path}", "no space left", "generation pauses")
    assert looks(10**9) == [f"{tmp_path}: its disk has space again"]


@pytest.mark.parametrize(
    ("redirection", "out", "err"),
    [
        ("| head -1", "starting at step 0", "standard output cannot be written (Broken pipe)"),
        ("2>&1 | head -1", "starting at step 0", ""),
        (">&- 2>&-", "", ""),
        ("> /dev/full", "", "standard output cannot be written (No space left on device)"),
    ],
)
def test_a_terminal_that_is_gone_costs_nothing(tmp_path: Path, redirection: str, out: str, err: str) -> None:
    rows = "\nfor step in range(3):\n    time.sleep(0.1); row(step=step)\n(home / 'stop').touch()\n"
    with started(tmp_path / "run", orchestrator=rows, redirection=redirection) as run:
        code, said, errors = run.wait()
        run.nothing_left()
    assert code == 0
    assert out in said and len(said.splitlines()) == (1 if out else 0)
    assert err in errors and len(errors.splitlines()) == (1 if err else 0)
    assert "--run-dir" not in errors and "Traceback" not in errors
    log = (tmp_path / "run" / "logs" / "supervisor.0.log").read_text().splitlines()
    assert "starting at step 0" in log[0]
    assert log[-1].endswith(f"done: 3 of 3 steps; run directory: {tmp_path / 'run'}")


def test_why_a_run_failed_is_in_the_log_when_the_terminal_is_gone(tmp_path: Path) -> None:
    with started(tmp_path, orchestrator="fail('the judge is down')", redirection="> /dev/full 2>&1") as run:
        code, said, errors = run.wait()
    assert (code, said, errors) == (1, "", "")
    log = (tmp_path / "logs" / "supervisor.0.log").read_text()
    assert "vcpo: error: orchestrator ended with exit code 1" in log and "the judge is down" in log
    assert "continue with: " in log


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "the run cannot go on: Too many open files"),
        (OSError(errno.ENOSPC, "No space left on device"), "/r: No space left on device; free space, or choose"),
        (PermissionError(errno.EACCES, "Permission denied", "/r/x"), "/r/x: Permission denied; free space, or choose"),
    ],
)
def test_the_run_directory_is_blamed_for_what_it_did(error: OSError, says: str) -> None:
    assert _explained(error, RunDirectory(Path("/r"))).startswith(says)


def test_failed_held_out_samples_are_said_at_the_end(tmp_path: Path) -> None:
    failed = GOOD_ORCHESTRATOR.replace("0.25 * step,", '0.25 * step, "eval/failed": 2, "eval/samples": 8,')
    with started(tmp_path, orchestrator=failed) as run:
        code, out, _ = run.wait()
    assert code == 0
    assert_names(out.splitlines()[-1], "3 of 3 steps", "accuracy 0.5000", "2 of 8 samples")


def test_metrics_that_were_removed_are_noticed_at_the_end(tmp_path: Path) -> None:
    save = (
        "folder = home / 'checkpoints' / 'step_3'; folder.mkdir(parents=True)\n"
        "(folder / 'manifest.json').write_text(MANIFEST); (home / 'metrics.jsonl').unlink()\n"
    )
    with started(tmp_path, orchestrator=GOOD_ORCHESTRATOR + save) as run:
        code, _, err = run.wait()
    assert code == 0
    assert_said("lines of a run", "metrics were removed", err, run=tmp_path)


def test_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with started(tmp_path / "file" / "run") as run:
        code, _, err = run.wait()
        assert_said("lines of a run", "run directory cannot be written", error_line(code, err), folder=tmp_path)


@contextlib.contextmanager
def busy_port(free_before: int) -> Iterator[int]:
    """A port that is listened on; the ``free_before`` ports before it are free, whatever else the machine runs."""
    while True:
        with socket.socket() as other, contextlib.ExitStack() as before:
            other.bind(("127.0.0.1", 0))
            port = int(other.getsockname()[1])
            try:
                for i in range(1, free_before + 1):
                    before.enter_context(socket.socket()).bind(("127.0.0.1", port - i))
            except OSError:
                continue
            before.close()
            other.listen()
            yield port
            return


@pytest.mark.parametrize(
    ("key", "offset"), [("rollout.port", 1), ("launch.control_port", 0), ("launch.master_port", 0)]
)
def test_port_in_use_is_named_with_its_key(tmp_path: Path, key: str, offset: int) -> None:
    with busy_port(free_before=offset) as port:
        section, _, name = key.partition(".")
        with started(tmp_path, sections={section: {name: port - offset}}) as run:
            code, _, err = run.wait()
        assert_said("lines of a run", "port in use", error_line(code, err), number=port, key=key)
    assert list(tmp_path.iterdir()) == []  # nothing is in the way of the next try


# --- time limits --------------------------------------------------------------------------------

#: Takes a second to write its checkpoint after the signal.
SLOW_TO_STOP = STOPPABLE_ORCHESTRATOR.replace("def stop(*args):\n", "def stop(*args):\n    time.sleep(1)\n")


def test_a_warning_stops_with_a_checkpoint_and_the_signal_after_it_does_not_cut_it_short(tmp_path: Path) -> None:
    with started(tmp_path, orchestrator=SLOW_TO_STOP, learner=GOOD_LEARNER) as run:
        run.all_started()
        wait_for(lambda: (tmp_path / "listening").exists(), "the orchestrator to listen")
        for name in ("orchestrator.0", "learner.0"):
            os.kill(run.pid(name), signal.SIGUSR1)  # a batch system warns every process
        run.process.send_signal(signal.SIGUSR1)
        time.sleep(0.4)
        run.process.send_signal(signal.SIGUSR1)
        run.process.send_signal(signal.SIGTERM)
        code, out, err = run.wait()
    assert code == 128 + signal.SIGUSR1 == 138
    assert "SIGUSR1: stopping after the current step" in out + err
    assert "newest complete checkpoint: step_2; continue with: " in out and "train " in out


def test_the_time_limit_stops_with_a_checkpoint(tmp_path: Path) -> None:
    """A stand-in that has just started when the time is over is asked all the same."""
    roles = {"orchestrator": STOPPABLE_ORCHESTRATOR, "learner": GOOD_LEARNER}
    with started(tmp_path, max_hours=2 / 3600, blocked=(signal.SIGTERM,), **roles) as run:
        code, out, _ = run.wait()
    assert code == 138
    assert "stopped by --max-hours 0.000555556" in out and "newest complete checkpoint: step_2" in out


def test_what_the_orchestrator_notes_is_told(tmp_path: Path) -> None:
    note = "print('vcpo: note: waiting for rollout servers: 0 of 2 ready', flush=True)\n"
    with started(tmp_path, orchestrator=note + "print('not this', flush=True)\n" + GOOD_ORCHESTRATOR) as run:
        code, out, _ = run.wait()
    assert code == 0 and "waiting for rollout servers: 0 of 2 ready" in out.splitlines() and "not this" not in out


def test_what_a_dead_server_leaves_is_reaped_while_the_run_goes_on(tmp_path: Path) -> None:
    """A member of its session that ends after it is no child of the orchestrator any more."""
    server = """
member = "import os, subprocess; print(subprocess.Popen(['sleep', '0.5']).pid, flush=True)"
server = subprocess.Popen([sys.executable, "-c", member], start_new_session=True, stdout=subprocess.PIPE)
record("left", int(server.stdout.readline()))
server.wait()
wait("stop")
"""
    with started(tmp_path, orchestrator=server) as run:
        left = run.pid("left")
        wait_for(lambda: not psutil.pid_exists(left), "what the dead server left to be reaped", 20)
        (tmp_path / "stop").touch()
        code, _, _ = run.wait()
    assert code == 0


def test_warnings_of_the_processes_reach_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "learner.0.log").write_text("vcpo: warning: of the attempt before\n")
    warn = "print('vcpo: warning: {}', flush=True)\n"
    roles = {
        "orchestrator": warn.format("rows are missing") + GOOD_ORCHESTRATOR,
        "learner_0": warn.format("no checksums") + GOOD_LEARNER,
    }
    with started(tmp_path / "run", **roles) as run:
        code, out, _ = run.wait()
    told = [line for line in out.splitlines() if line.startswith("vcpo: warning: ")]
    assert code == 0 and sorted(told) == ["vcpo: warning: no checksums", "vcpo: warning: rows are missing"]


def test_a_user_goes_back_to_an_older_checkpoint(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        folder = tmp_path / "checkpoints" / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(manifest(step))
    with started(tmp_path, resume=True, from_step=3) as run:
        code, _, err = run.wait()
    assert code == 1
    assert_names(err, "step_3", "step_2, step_4, step_6")
    tell = "(home / 'told').write_text(os.environ['VCPO_RESUME_STEP'])\n"
    roles = {"orchestrator": tell + GOOD_ORCHESTRATOR, "learner": GOOD_LEARNER}
    with started(tmp_path, resume=True, from_step=2, **roles) as run:
        code, out, _ = run.wait()
    assert code == 0 and (tmp_path / "told").read_text() == "2"
    assert_names(out, "checkpoints/abandoned/attempt_2", "step_4, step_6")
    assert RunDirectory(tmp_path).complete_steps() == [2, 4, 6]  # which these stand-ins never say


def test_a_refused_resume_changes_neither_checkpoints_nor_the_configuration(tmp_path: Path) -> None:
    for step in (2, 4):
        folder = tmp_path / "checkpoints" / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(MANIFEST)
    (tmp_path / "resolved.toml").write_text("that of the run")
    with started(tmp_path, resume=True, from_step=2, orchestrator="fail('other data', 1)") as run:
        code, out, err = run.wait()
    assert code == 1 and "last message: other data" in err
    assert_said("lines of a run", "resume was refused", out.splitlines()[-1])
    assert RunDirectory(tmp_path).complete_steps() == [2, 4]
    assert (tmp_path / "resolved.toml").read_text() == "that of the run"
    assert "[train]" in (tmp_path / "resolved.next.toml").read_text()
