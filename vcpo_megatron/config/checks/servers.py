"""Checks of the rollout servers' keys, and what can be seen of a rollout environment without running it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from ..schema import RunConfig

#: The SGLang that the tests run with, and the NCCL that comes with it on GPUs (by the torch that it asks for).
TESTED_SGLANG = "0.5.23"
TESTED_NCCL = "2.30.7"
#: Flags that the run sets itself, or that would break what it relies on -> why they are refused in ``rollout.args``.
_OWN = "the run sets it itself"
_RESERVED: dict[str, str] = {
    "--model-path": _OWN,
    "--model": _OWN,
    "--host": _OWN,
    "--port": _OWN,
    "--dtype": _OWN,
    "--device": _OWN,
    "--enable-fp32-lm-head": "set model.fp32_lm_head, which is the learner's too",
    "--tensor-parallel-size": "set rollout.tensor_parallel",
    "--tp-size": "set rollout.tensor_parallel",
    "--tp": "set rollout.tensor_parallel",
    "--max-running-requests": "set rollout.max_running_requests",
    "--context-length": "set rollout.context_length",
    "--api-key": "the run sends no key",
    "--incremental-streaming-output": "answers are not streamed",
    "--weight-version": _OWN,
    "--data-parallel-size": "use rollout.servers",
    "--dp-size": "use rollout.servers",
    "--dp": "use rollout.servers",
    "--speculative-algorithm": "the log-probs of drafted tokens are not those that training needs",
}
#: Flags that change NCCL in the servers alone -> what they set there.
_NCCL_FLAGS = {
    "--enable-symm-mem": "NCCL_CUMEM_ENABLE and NCCL_NVLS_ENABLE",
    "--enable-nccl-nvls": "NCCL_NVLS_ENABLE",
}


def server_problems(config: RunConfig) -> Iterator[str]:
    """What keeps the rollout servers from being started or joined, a line each."""
    rollout = config.rollout
    if config.launch.address is not None:
        yield from _own_address(config, config.launch.address)
    if rollout.engine != "sglang":
        unset_values = {"python": None, "addresses": (), "router": None, "tensor_parallel": 1, "args": ()}
        for name, unset in unset_values.items():
            if (value := getattr(rollout, name)) != unset:
                shown = list(value) if isinstance(value, tuple) else value
                yield f'rollout.{name} = {shown}: only used with rollout.engine = "sglang"; set that or remove it'
        return
    if config.staleness.lag == "exact":
        yield (
            'rollout.engine = "sglang": staleness.lag = "exact" repeats a run bit for bit, which is tested with the '
            'embedded engine only; use lag = "bounded" or engine = "embedded"'
        )
    if rollout.router is not None:
        yield from _router(config, rollout.router)
    if rollout.addresses:
        yield from _joined(config)
    elif rollout.python is None:
        yield (
            'rollout.engine = "sglang": needs rollout.python, the interpreter of the environment that SGLang is '
            "installed in (tools/make_rollout_env.sh makes one), or rollout.addresses of servers that run"
        )
    else:
        yield from _interpreter(rollout.python)
    for arg in rollout.args:
        if (flag := arg.split("=", 1)[0]) in _RESERVED:
            yield f"rollout.args: {flag} is not taken: {_RESERVED[flag]}"
        elif flag in _NCCL_FLAGS and rollout.sync not in ("tensor", "disk"):
            yield (
                f"rollout.args: {flag} sets {_NCCL_FLAGS[flag]} in the servers alone, and both ends of a broadcast of "
                'weights need them alike; set the variables around vcpo train instead, or rollout.sync = "disk"'
            )


def _joined(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    for name, unset in (("python", None), ("tensor_parallel", 1), ("args", ()), ("port", 0)):
        if getattr(rollout, name) != unset:
            yield f"rollout.{name}: the servers of rollout.addresses run already; remove one of the two"
    for address in rollout.addresses:
        if not _is_address(address):
            yield f"rollout.addresses = {list(rollout.addresses)}: {address!r} is not http://HOST:PORT"
    if len(set(rollout.addresses)) < len(rollout.addresses):
        yield f"rollout.addresses = {list(rollout.addresses)}: a server is named twice"


def _own_address(config: RunConfig, address: str) -> Iterator[str]:
    named = f'launch.address = "{address}"'
    if not _is_host(address):
        yield f"{named}: is no host name or IP address; write it without http:// and port"
    if not config.rollout.addresses:
        yield f"{named}: only used with rollout.addresses, the servers on other hosts; remove it"


def _is_host(address: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(address)
        return True
    labels = address.rstrip(".").split(".")
    numbers = all(label.isdecimal() for label in labels)  # such a name would be a broken IP address
    return not numbers and all(re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?", label) for label in labels)


def _is_address(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return bool(parts.scheme == "http" and parts.hostname and parts.port and parts.path in ("", "/"))
    except ValueError:
        return False


def _router(config: RunConfig, address: str) -> Iterator[str]:
    """What sglang-router 0.3.2 leaves out of requests, and what needs to know the server that a request goes to."""
    rollout = config.rollout
    named = f'rollout.router = "{address}"'
    if not _is_address(address):
        yield f"{named}: is not http://HOST:PORT"
    if not rollout.addresses:
        yield f"{named}: needs rollout.addresses, the servers behind it, which get their weights from the run itself"
    elif address.rstrip("/") in {server.rstrip("/") for server in rollout.addresses}:
        yield f"{named}: is one of rollout.addresses too, which are the servers behind it"
    if rollout.routing_replay:
        yield f"{named}: drops return_routed_experts, which rollout.routing_replay = true needs; remove one of the two"
    if rollout.pause_mode == "in_place":
        yield (
            f'{named}: rollout.pause_mode = "in_place" keeps caches, and a request cannot name the weights whose cache '
            'it may read where the router chooses its server; use "retract" or "abort"'
        )


def _interpreter(python: Path) -> Iterator[str]:
    if not python.is_file() or not os.access(python, os.X_OK):
        yield f"rollout.python = {python}: {'not an executable file' if python.exists() else 'no such file'}"
    elif installed_sglang(python) is None:
        yield (
            f"rollout.python = {python}: SGLang is not installed in its environment; tools/make_rollout_env.sh makes "
            "one that has it"
        )


def installed_sglang(python: Path) -> str | None:
    """Version of SGLang beside the interpreter ``python``, by package metadata; None when there is none.

    The interpreter is not run: it would cost a second. Folders that .pth files add are looked at, as it would.
    """
    for site in sorted(python.parent.parent.glob("lib/python3*/site-packages")):
        for folder in (site, *(folder for file in sorted(site.glob("*.pth")) for folder in _added(file))):
            for found in folder.glob("sglang-*.dist-info"):
                if match := re.fullmatch(r"sglang-(.+)\.dist-info", found.name):
                    return match.group(1)
    return None


def _added(pth: Path) -> Iterator[Path]:
    """Folders that a .pth file adds to the path."""
    for line in pth.read_text(errors="replace").splitlines():
        if line.startswith("/") and Path(line).is_dir():
            yield Path(line)
