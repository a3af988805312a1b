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
import datetime
import errno
import math
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..config.load import dump_resolved
from ..config.process import ProcessContext
from ..config.schema import RunConfig
from ..observability.progress import Progress
from ..observability.sinks import JsonlFollower, read_rows
from ..run.directory import RunDirectory, write_atomically
from ..run.errors import ConfigError
from ..run.output import surviving
from ..transport.child import start_child
from . import workspace
from .devices import visible_gpus
from .placement import MODULES, PlacementError, Plan, Process, plan_local
from .ports import PortError, Ports, choose_ports
from .reach import foreign_variables, foreign_variables_note
from .resume_command import resume_command
from .start import settled
from .supervision import Child, Ending, Supervisor, caught_signals, no_orphans
from .terminal import Terminal
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
    Whatever happens to standard output and standard error meanwhile, the run goes on.
    """
    directory, terminal = RunDirectory(directory.path.resolve()), Terminal()
    with surviving(terminal.lost):
        try:
            plan = plan_local(config, gpus=visible_gpus(), host=HOST)
            ports = choose_ports(plan)  # before anything is written: a port in use leaves no trace
            workspace.prepare(directory)
            with workspace.locked(directory):
                return _run_locked(config, directory, options, command, plan, ports, terminal)
        except (workspace.RunDirectoryError, PortError, PlacementError, ConfigError) as error:
            terminal.complain(str(error))
        except OSError as error:
            terminal.complain(_explained(error, directory))
        return 1


def _run_locked(
    config: RunConfig,
    directory: RunDirectory,
    options: LaunchOptions,
    command: Command,
    plan: Plan,
    ports: Ports,
    terminal: Terminal,
) -> int:
    if not options.resume:
        workspace.refuse_used(directory)
        config = settled(config, datetime.date.today())
    terminal.keep_in(directory.log("supervisor", 0))
    context = _context(directory, plan, ports, options, terminal)
    directory.proposed.unlink(missing_ok=True)
    write_atomically(directory.proposed if options.resume else directory.resolved, dump_resolved(config))
    progress = Progress(config.train.steps, first_step=context.resume_step or 0)
    follower = JsonlFollower(directory.metrics)
    follower.poll()  # rows of an earlier attempt: the orchestrator is about to cut them back

    logs = [LogWarnings(directory.path / process.log) for process in (plan.orchestrator, plan.learners[0])]
    disk = workspace.DiskWatch(directory)

    def watch() -> None:
        progress.tick()
        for row in follower.poll():
            progress.show(row)
        for log in logs:
            for line in log.poll():
                terminal.say(line)
        if (news := disk.look()) is not None:
            terminal.say(news)

    with (
        caught_signals() as signals,
        no_orphans(),
        _guarded(context.token),
        contextlib.closing(progress),
        terminal.shown_by(progress.say),
    ):
        children = [_start(process, plan, ports, context, command) for process in (plan.orchestrator, *plan.learners)]
        supervisor = Supervisor(
            children,
            signals,
            timeout_s=config.launch.timeout_s,
            max_hours=options.max_hours,
            watch=watch,
            say=terminal.say,
        )
        ending = supervisor.run()
        watch()
    directory.mark_ended(context.attempt, _state(ending))
    _report(ending, config, directory, terminal)
    return ending.exit_code


def _context(
    directory: RunDirectory, plan: Plan, ports: Ports, options: LaunchOptions, terminal: Terminal
) -> ProcessContext:
    step = workspace.chosen_checkpoint(directory, options.from_step) if options.resume else None
    attempt = workspace.next_attempt(directory)
    if (note := foreign_variables_note()) is not None:
        terminal.say(note)
    if not options.resume:
        terminal.say(f"{directory.path}: starting at step 0; what every process says is in logs/")
    else:
        where = "no complete checkpoint yet: starting at step 0" if step is None else f"resuming from step_{step}"
        terminal.say(f"{directory.path}: {where}")
    if step is not None and (newer := directory.newer_than(step)):
        names = ", ".join(f"step_{other}" for other in newer)
        terminal.say(f"newer checkpoints move to checkpoints/abandoned/attempt_{attempt} when the run goes on: {names}")
    return ProcessContext(
        run_dir=directory.path,
        attempt=attempt,
        resume_step=step,
        token=secrets.token_hex(16),
        control=f"tcp://{HOST}:{ports.control}",
        server_ports=ports.servers,
        server_devices=tuple(device for server in plan.servers for device in server.devices),
        run=workspace.run_identity(directory),
        learner_devices=tuple(device for rank in plan.learners for device in rank.devices),
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
    servers, which it starts, likewise. A user's own choice for torch's allocator and for CUDA's queues is kept.
    """
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    env = {name: environ.get(name, value) for name, value in defaults.items()}
    partition = plan.learners if process.role == "learner" else plan.servers
    if devices := [device for member in partition for device in member.devices]:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if devices and process.role == "learner":
        if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environ.keys():
            # packs differ in length: blocks that can grow are reused, where others would leave holes
            env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        if plan.cuts_matrices:
            # one queue: a reduction starts before the product behind it that it is to overlap with
            env["CUDA_DEVICE_MAX_CONNECTIONS"] = environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
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


def _explained(error: OSError, directory: RunDirectory) -> str:
    """What a user can do about it. An error that names no file is the run directory's only where a disk is full."""
    if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return f"the run cannot go on: {error.strerror or error}"
    where = error.filename or directory.path
    return f"{where}: {error.strerror}; free space, or choose another with --run-dir"


def _state(ending: Ending) -> str:
    """How the run ended, in a word or two."""
    return "failed" if ending.error else f"stopped by {ending.stopped_by}" if ending.stopped_by else "done"


def _report(ending: Ending, config: RunConfig, directory: RunDirectory, terminal: Terminal) -> None:
    """The last lines of a run: what happened, what was reached, how to go on."""
    for warning in ending.warnings:
        terminal.warn(warning)
    if ending.error is not None:
        terminal.complain(ending.error + workspace.full_disk(directory))
    rows = read_rows(directory.metrics)
    done = int(rows[-1]["step"]) + 1 if rows else 0
    newest = workspace.newest_checkpoint(directory) or 0
    if ending.exit_code == 0 and done < newest:
        terminal.warn(
            f"{directory.metrics} holds {done} of {newest} steps: it was removed or changed while the run wrote it"
        )
    parts = [f"{done} of {config.train.steps} steps"]
    evaluated = [row for row in rows if math.isfinite(row.get("eval/accuracy", math.nan))]
    if evaluated:
        last = evaluated[-1]
        failed = f" ({last['eval/failed']} of {last['eval/samples']} samples failed)" if last.get("eval/failed") else ""
        parts.append(f"last eval accuracy {last['eval/accuracy']:.4f}{failed}")
    terminal.say(f"{_state(ending)}: {', '.join(parts)}; run directory: {directory.path}")
    if ending.exit_code != 0:
        step = workspace.newest_checkpoint(directory)
        saved = "no complete checkpoint" if step is None else f"newest complete checkpoint: step_{step}"
        terminal.say(f"{saved}; {_what_next(ending, config, directory)}")


def _what_next(ending: Ending, config: RunConfig, directory: RunDirectory) -> str:
    """A run that had begun goes on with --resume; a refusal would only come again."""
    if ending.error is not None and directory.proposed.exists():
        return "the resume has not begun: see to the error first"
    if ending.exit_code == 2:  # see the module
        return "the configuration was refused: see to the error first"
    try:
        workspace.chosen_checkpoint(directory, None)
    except workspace.RunDirectoryError as error:  # a resume would say the same
        return f"it cannot simply go on: {error}"
    return f"continue with: {resume_command(directory, config)}"
