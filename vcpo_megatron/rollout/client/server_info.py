"""What a server tells of itself (``/server_info``): how many ranks share its model, and what they run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: Splits that a server must not have -> why.
_REFUSED = {
    "dp_size": "its replicas share one address; start each as a server of its own",
    "pp_size": "weights are broadcast to tensor-parallel ranks, by which SGLang numbers its members of a group",
}


class UnsupportedServer(RuntimeError):
    """The server answers, but cannot do what training needs; one line for the user."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """``ranks``: tensor-parallel ones, each a member of a group for weights. ``on_gpus``: parameters lie on GPUs, where
    SGLang hashes them in another way."""

    ranks: int = 1
    on_gpus: bool = False

    @classmethod
    def parse(cls, reply: Mapping[str, object], where: str) -> ServerInfo:
        """What it does not say is the default; UnsupportedServer for a split that is not taken."""
        sizes = {name: reply.get(name, 1) for name in ("tp_size", *_REFUSED)}
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UnsupportedServer(f"{where} says {name} = {size!r}: expected a positive number")
            if size > 1 and name in _REFUSED:
                raise UnsupportedServer(f"{where} has {name} = {size}: {_REFUSED[name]}")
        ranks = sizes["tp_size"]
        assert isinstance(ranks, int)
        return cls(ranks, reply.get("device", "cpu") != "cpu")


def router_workers(reply: object) -> dict[str, str] | None:
    """Address -> id of the workers of an sglang-router, from what it answers to ``/workers``; None for no router."""
    workers = reply.get("workers") if isinstance(reply, Mapping) else None
    if not isinstance(workers, list):
        return None
    found = [worker for worker in workers if isinstance(worker, Mapping)]
    return {str(worker.get("url")).rstrip("/"): str(worker.get("id")) for worker in found}
