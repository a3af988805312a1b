"""Ports of a run on this host: given ones are checked, the others are chosen."""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .placement import Plan

#: Chosen ports lie below the range from which the kernel takes ports of outgoing connections, so that no other
#: program's connection sits on one between the choice and its use.
_FIRST_CHOSEN = 10000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class PortError(RuntimeError):
    """A port cannot be had; the message names it, its configuration key and the remedy."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Control socket of the orchestrator, rendezvous of the learner ranks, HTTP port of each server."""

    control: int
    master: int
    servers: tuple[int, ...]


def choose_ports(plan: Plan) -> Ports:
    """Ports for every process of ``plan`` that listens; 0 in the plan becomes a free one, all are distinct.

    Every one could be bound a moment ago. Raises PortError.
    """
    asked = [
        (plan.orchestrator.port, "launch.control_port"),
        (plan.learners[0].port, "launch.master_port"),
        *((server.port, "rollout.port") for server in plan.servers),
    ]
    taken: list[int] = []
    for port, key in asked:
        if port:
            check_port(port, key)
            taken.append(port)
    chosen = [port or _free_port(taken) for port, _ in asked]
    return Ports(control=chosen[0], master=chosen[1], servers=tuple(chosen[2:]))


def check_port(port: int, key: str) -> None:
    """Bind ``port`` on all interfaces for a moment; PortError says why it cannot be, naming the key ``key``."""
    code = _bind(port)
    if code == errno.EADDRINUSE:
        raise PortError(f"port {port} ({key}) is in use; free it or set {key}")
    if code:
        raise PortError(f"port {port} ({key}) cannot be bound: {os.strerror(code)}; set {key}")


def _bind(port: int) -> int:
    """0, or the error number of binding to ``port``.

    With SO_REUSEADDR a connection of an earlier run that waits out its time does not count as use; a listening
    socket does.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno or errno.EINVAL
    return 0


def _free_port(taken: list[int]) -> int:
    """A random port that can be bound and is not in ``taken``, to which it is added."""
    for port in _candidates():
        if port not in taken and _bind(port) == 0:
            taken.append(port)
            return port
    raise PortError("no free port found in 2000 tries; set launch.control_port, launch.master_port and rollout.port")


def _candidates() -> Sequence[int]:
    try:
        end = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        end = 32768  # Linux's default
    if end - _FIRST_CHOSEN < 2000:
        end = 65536  # an unusual range that leaves no room below it
    return random.sample(range(_FIRST_CHOSEN, end), 2000)
