"""Whether a configuration can run at all, before anything starts: its own checks and its environment's, together; and
whether the ports that it names can be had here."""

from __future__ import annotations

from ..config.checks.problems import problems
from ..config.schema import RunConfig
from ..launch.devices import visible_gpus
from ..launch.libraries import library_problems
from ..launch.placement import Plan
from ..launch.ports import PortError, choose_ports
from ..launch.reach import reach_problems
from ..launch.supervision import no_orphans
from ..models.tokenizer import TokenizerError
from ..orchestrator.modes.environment_check import Examination, check_environment
from ..run.errors import ConfigError

#: The environment is made and asked for prompts, none is played.
NOTHING_PLAYED = Examination()


def config_problems(config: RunConfig, examination: Examination = NOTHING_PLAYED, *, begins: bool = True) -> list[str]:
    """Everything that keeps ``config`` from running here, but for what a start takes (its ports, its run directory),
    after an ``examination`` of its environment; from the main thread, see ``check_environment``. ``begins``: it runs
    from its start, not from a checkpoint of its own."""
    gpus = visible_gpus()
    found = [*problems(config, begins=begins), *reach_problems(config, gpus), *library_problems(config, gpus)]
    try:
        with no_orphans():  # a user's code may start processes that leave its worker's group
            of_environment = check_environment(config, examination)
    except (ConfigError, TokenizerError):
        return found  # already among them
    # A file that is missing or broken was named once already, with its key.
    files = (config.environment.data, config.environment.heldout, config.model.path / "tokenizer.json")
    named = [str(file) for file in files if file and any(str(file) in problem for problem in found)]
    return found + [line for line in of_environment if not any(file in line for file in named)]


def port_problems(plan: Plan) -> list[str]:
    """Why the processes of ``plan`` cannot listen where they should on this machine, at this moment."""
    try:
        choose_ports(plan)
    except PortError as error:
        return [str(error)]
    return []
