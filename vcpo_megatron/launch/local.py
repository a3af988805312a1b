"""``vcpo train`` on one host: the supervisor, which starts the processes of a run and outlives none of them.

    supervisor ──┬── orchestrator ──── rollout servers (the orchestrator's children)
                 ├── learner rank 0..R-1
                 └── guard (acts only when the supervisor was killed with SIGKILL)

Exit codes: 0 done; 1 failed, with one line on standard error; 2 a process refused the configuration; 128 + N
stopped by signal N (SIGINT 130, SIGTERM 143, SIGHUP 129): after a checkpoint on the first signal, at once on the
second. 138: stopped by SIGUSR1, a batch system's warning, or by ``LaunchOptions.max_hours``, after a checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..config.load import dump_resolved
from ..config.process import ERROR_PREFIX, WARNING_PREFIX, ProcessContext
from ..config.schema import RunConfig
from ..observability.progress import Progress
from ..observability.sinks import JsonlFollower, read_rows
from ..run.directory import RunDirectory, write_atomically
from ..transport.child import start_child
from . import workspace
from .devices import visible_gpus
from .placement import MODULES, PlacementError, Plan, Process, plan_local
from .ports import PortError, Ports, choose_ports
from .reach import foreign_variables, foreign_variables_note
from .supervision import Child, Ending, Supervisor, caught_signals, no_orphans
from .warnings import LogWarnings

HOST = "127.0.0.1"

Command = Callable[[Process], Sequence[str]]


def module_command(process: Process) -> Sequence[str]:
    """The command of a process of the run: its role's module under this interpreter."""
    return (sys.executable, "-m", MODULES[process.role])


@dataclass(frozen=True)
class LaunchOptions:
    """``resume`` continues from the complete checkpoint ``from_step``, by default the newest one, or from the start
    when there is none. ``max_hours``: the run is stopped after so long, with a checkpoint."""

    resume: bool = False
    from_step: int | None = None
    max_hours: float | None = None


def run(
    config: RunConfig,
    directory: RunDirectory,
    options: LaunchOptions = LaunchOptions(),
    *,
    command: Command = module_command,
) -> int:
    """Run ``config`` in ``directory`` to its end and return the exit code for the shell; see the module.

    Call it from the main thread. ``command`` makes the command line of a process (tests start small stand-ins).
    """
    directory = RunDirectory(directory.path.resolve())
    try:
        plan = plan_local(config, gpus=visible_gpus(), host=HOST)
        ports = choose_ports(plan)  # before anything is written: a port in use leaves no trace
        workspace.prepare(directory)
        with workspace.locked(directory):
            return _run_locked(config, directory, options, command, plan, ports)
    except (workspace.RunDirectoryError, PortError, PlacementError) as error:
        _complain(str(error))
        return 1
    except BrokenPipeError:
        raise  # of whoever reads our output
    except OSError as error:
        _complain(f"{error.filename or directory.path}: {error.strerror}; free space, or choose another with --run-dir")
        return 1


def _run_locked(
    config: RunConfig, directory: RunDirectory, options: LaunchOptions, command: Command, plan: Plan, ports: Ports
) -> int:
    if not options.resume:
        workspace.refuse_used(directory)
    context = _context(directory, plan, ports, options)
    directory.proposed.unlink(missing_ok=True)
    write_atomically(directory.proposed if options.resume else directory.resolved, dump_resolved(config))
    progress = Progress(config.train.steps, first_step=context.resume_step or 0)
    follower = JsonlFollower(directory.metrics)
    follower.poll()  # rows of an earlier attempt: the orchestrator is about to cut them back

    logs = [LogWarnings(directory.path / process.log) for process in (plan.orchestrator, plan.learners[0])]

    def watch() -> None:
        for row in follower.poll():
            progress.show(row)
        for log in logs:
            for line in log.poll():
                progress.say(line)

    with caught_signals() as signals, no_orphans(), _guarded(context.token), contextlib.closing(progress):
        children = [_start(process, plan, ports, context, command) for process in (plan.orchestrator, *plan.learners)]
        supervisor = Supervisor(
            children,
            signals,
            timeout_s=config.launch.timeout_s,
            max_hours=options.max_hours,
            watch=watch,
            say=progress.say,
        )
        ending = supervisor.run()
        watch()
    _report(ending, config, directory)
    return ending.exit_code


def _context(directory: RunDirectory, plan: Plan, ports: Ports, options: LaunchOptions) -> ProcessContext:
    step = workspace.chosen_checkpoint(directory, options.from_step) if options.resume else None
    attempt = workspace.next_attempt(directory)
    if (note := foreign_variables_note()) is not None:
        print(note, flush=True)
    if not options.resume:
        print(f"{directory.path}: starting at step 0; what every process says is in logs/", flush=True)
    else:
        where = "no complete checkpoint yet: starting at step 0" if step is None else f"resuming from step_{step}"
        print(f"{directory.path}: {where}", flush=True)
    if step is not None and (newer := directory.newer_than(step)):
        names = ", ".join(f"step_{other}" for other in newer)
        print(
            f"newer checkpoints move to checkpoints/abandoned/attempt_{attempt} when the run goes on: {names}",
            flush=True,
        )
    return ProcessContext(
        run_dir=directory.path,
        attempt=attempt,
        resume_step=step,
        token=secrets.token_hex(16),
        control=f"tcp://{HOST}:{ports.control}",
        server_ports=ports.servers,
        server_devices=tuple(device for server in plan.servers for device in server.devices),
        run=workspace.run_identity(directory),
    )


def _start(process: Process, plan: Plan, ports: Ports, context: ProcessContext, command: Command) -> Child:
    """Start one process of the plan; its output goes to its log."""
    log = context.run_dir / process.log
    env = role_environment(process, plan, ports.master) | context.environment()
    child = start_child(command(process), env=env, log=log, without=foreign_variables())
    return Child(process.role, process.rank, child, log)


def role_environment(
    process: Process, plan: Plan, master_port: int, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables that the orchestrator or a learner rank gets by its place in ``plan``.

    One thread a process unless the user says otherwise: ranks and servers share the cores. On GPUs the learner ranks
    see those of all learner ranks, in order of rank, and take number LOCAL_RANK; the orchestrator sees those of the
    servers, which it starts, likewise.
    """
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    env = {name: environ.get(name, value) for name, value in defaults.items()}
    partition = plan.learners if process.role == "learner" else plan.servers
    if devices := [device for member in partition for device in member.devices]:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if process.role == "learner":
        env |= {
            "RANK": str(process.rank),
            "LOCAL_RANK": str(process.rank),
            "WORLD_SIZE": str(len(plan.learners)),
            "MASTER_ADDR": process.host,
            "MASTER_PORT": str(master_port),
        }
    return env


@contextlib.contextmanager
def _guarded(token: str) -> Iterator[None]:
    """A guard lives meanwhile: see ``guard``. The token goes through a pipe: command lines are public."""
    environment = {name: value for name, value in os.environ.items() if name != "VCPO_RUN_TOKEN"}
    guard = subprocess.Popen(
        (sys.executable, "-m", "vcpo_megatron.launch.guard"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
    )
    assert guard.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the guard itself was killed: the run goes on without
        guard.stdin.write(f"VCPO_RUN_TOKEN={token}\n".encode())
        guard.stdin.flush()
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            guard.stdin.write(b"done\n")
            guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(timeout=5.0)


def _complain(message: str) -> None:
    print(f"{ERROR_PREFIX}{message}", file=sys.stderr, flush=True)


def _warn(message: str) -> None:
    print(f"{WARNING_PREFIX}{message}", file=sys.stderr, flush=True)


def _report(ending: Ending, config: RunConfig, directory: RunDirectory) -> None:
    """The last lines of a run: what happened, what was reached, how to go on."""
    for warning in ending.warnings:
        _warn(warning)
    if ending.error is not None:
        _complain(ending.error + workspace.full_disk(directory))
    rows = read_rows(directory.metrics)
    done = int(rows[-1]["step"]) + 1 if rows else 0
    newest = workspace.newest_checkpoint(directory) or 0
    if ending.exit_code == 0 and done < newest:
        _warn(f"{directory.metrics} holds {done} of {newest} steps: it was removed or changed while the run wrote it")
    parts = [f"{done} of {config.train.steps} steps"]
    evaluated = [row for row in rows if math.isfinite(row.get("eval/accuracy", math.nan))]
    if evaluated:
        parts.append(f"last eval accuracy {evaluated[-1]['eval/accuracy']:.4f}")
    state = "failed" if ending.error else f"stopped by {ending.stopped_by}" if ending.stopped_by else "done"
    print(f"{state}: {', '.join(parts)}; run directory: {directory.path}")
    if ending.exit_code != 0:
        step = workspace.newest_checkpoint(directory)
        saved = "no complete checkpoint" if step is None else f"newest complete checkpoint: step_{step}"
        print(f"{saved}; {_what_next(ending, directory)}", flush=True)


def _what_next(ending: Ending, directory: RunDirectory) -> str:
    """A run that had begun goes on with --resume; a refusal would only come again."""
    if ending.error is not None and directory.proposed.exists():
        return "the resume has not begun: see to the error first"
    if ending.exit_code == 2:  # see the module
        return "the configuration was refused: see to the error first"
    return f"continue with: {workspace.resume_command(directory)}"
