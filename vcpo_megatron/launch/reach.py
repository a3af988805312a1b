"""Where servers on other hosts find this one, and which of a launcher's variables a run does not take over."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from ..config.schema import RunConfig
from ..config.weight_transport import weight_transport

#: What torchrun and its kin tell their own ranks. A run has ranks of its own; with TORCHELASTIC_USE_AGENT_STORE they
#: would wait for a store that an agent hosts, and none does.
_LAUNCHER = frozenset(
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME "
    "NODE_RANK MASTER_ADDR MASTER_PORT".split()
)
_LAUNCHER_PREFIX = "TORCHELASTIC_"


def foreign_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Names of a launcher's variables that are set around the run; they are not for its processes."""
    return sorted(name for name in environ if name in _LAUNCHER or name.startswith(_LAUNCHER_PREFIX))


def foreign_variables_note(environ: Mapping[str, str] = os.environ) -> str | None:
    """One line on them for the user, who may have meant something by them; None where there are none."""
    if not (names := foreign_variables(environ)):
        return None
    note = f"not passed on to the run, whose ranks have their own: {', '.join(names)}"
    if "MASTER_ADDR" in names:
        note += f" (MASTER_ADDR={environ['MASTER_ADDR']}: set launch.address to where other hosts reach the learner)"
    return note


def reach_problems(config: RunConfig, gpus: Sequence[str]) -> Iterator[str]:
    """Why joined servers could not find the learner that broadcasts weights to them, a line; the learner is on
    ``gpus``, or on CPUs where there are none."""
    rollout, address = config.rollout, config.launch.address
    if weight_transport(rollout, learner_on_gpus=bool(gpus)).name != "distributed":
        return  # the orchestrator, or a disk, brings them
    remote = [server for server in rollout.addresses if not is_here(_host(server))]
    if not remote or (address is not None and not is_loopback(address)):
        return
    what = "is not set" if address is None else f'= "{address}"'
    yield (
        f"launch.address {what}: {', '.join(remote)} would look for the learner at {address or '127.0.0.1'}, their own "
        'host; set it to an address of this host that they reach, or rollout.sync = "tensor"'
    )


def _host(server: str) -> str:
    try:
        return urlsplit(server).hostname or ""
    except ValueError:
        return ""  # no address: another check says so


def is_loopback(host: str) -> bool:
    """Whether ``host`` names whatever host it is asked on."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() in ("", "localhost", "localhost.localdomain")
    return address.is_loopback or address.is_unspecified


def is_here(host: str) -> bool:
    """Whether ``host`` is this one, as far as that is known without asking a name server."""
    own = socket.gethostname().lower()
    if is_loopback(host) or host.lower() in (own, own.partition(".")[0]):
        return True
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((host, 0))
    except (ValueError, OSError):
        return False
    return True
