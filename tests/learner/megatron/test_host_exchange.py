"""What hosts exchange arrives in order, or is named when it does not."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vcpo_megatron.learner.megatron import host_exchange, platform
from vcpo_megatron.learner.megatron.host_exchange import ExchangeError, HostExchange

GROUP: Any = object()


class Work:
    """One that is done, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def wait(self, timeout: Any) -> None:
        if self._error is not None:
            raise self._error


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, list[float]]]:
    """What is sent, in order; receives come to nothing."""
    found: list[tuple[str, int, list[float]]] = []

    def isend(message: torch.Tensor, rank: int, group: Any) -> Work:
        assert threading.current_thread().name == "host exchange" and group is GROUP
        found.append(("send", rank, message.tolist()))
        return Work()

    def irecv(message: torch.Tensor, rank: int, group: Any) -> Work:
        return Work(RuntimeError("Timed out waiting 50ms for recv operation to complete"))

    stub = SimpleNamespace(isend=isend, irecv=irecv, Work=dist.Work, ProcessGroup=dist.ProcessGroup)
    monkeypatch.setattr(host_exchange, "dist", SimpleNamespace(**vars(stub), get_world_size=lambda group: 2))
    return found


def test_messages_leave_in_the_order_in_which_they_are_asked_for(posted: list[Any]) -> None:
    values = torch.tensor([1.0, 2.0, 3.0])
    with HostExchange(5.0) as exchange:
        exchange.send(platform.start_read(values), [0, 1], GROUP, "log ratios")
        values.zero_()  # it was copied
        exchange.send(platform.start_read(values), [0], GROUP, "rows", slice(0, 1))
    assert posted == [("send", 0, [1.0, 2.0, 3.0]), ("send", 1, [1.0, 2.0, 3.0]), ("send", 0, [0.0])]


def test_who_has_not_sent_is_named(posted: list[Any]) -> None:
    said = (
        r"log ratios of pack 3: rank 2 \(see logs/learner.2.log\) did not send them within 5 s \(launch.timeout_s\): "
        "Timed out"
    )
    with pytest.raises(ExchangeError, match=said), HostExchange(5.0) as exchange:
        exchange.receive((2,), torch.float64, 2, GROUP, "log ratios of pack 3").wait()


def test_a_device_that_does_not_come_so_far_is_named(posted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the thread, which waits for its event, does not keep the rank from ending."""
    monkeypatch.setattr(host_exchange, "_GRACE_S", 0.05)
    released = threading.Event()
    stuck: Any = SimpleNamespace(wait=released.wait)
    with pytest.raises(ExchangeError, match=r"rows: rank 0 .* 0.05 s .*: this rank's device"):
        with HostExchange(0.05) as exchange:
            exchange.send(stuck, [0], GROUP, "rows")
    assert exchange._thread.is_alive()
    released.set()
    exchange._thread.join(5.0)
    assert not exchange._thread.is_alive()


def test_what_fails_in_the_thread_ends_the_run(posted: list[Any]) -> None:
    def broken() -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access")

    copy: Any = SimpleNamespace(wait=broken)
    with pytest.raises(ExchangeError, match="failed: CUDA error: an illegal"):
        with HostExchange(5.0) as exchange:
            exchange.send(copy, [0], GROUP, "rows")
            while exchange._failure is None:
                pass
            exchange.send(platform.start_read(torch.ones(1)), [0], GROUP, "rows")
    assert not posted and not exchange._thread.is_alive()
    with pytest.raises(ExchangeError, match="rows: rank 0 .*: CUDA error"), HostExchange(5.0) as again:
        again.send(copy, [0], GROUP, "rows")  # nobody asks any more: the end of the run does


def test_an_error_of_the_run_is_not_hidden_by_what_was_not_sent(posted: list[Any]) -> None:
    copy: Any = SimpleNamespace(wait=lambda: 1 / 0)
    with pytest.raises(KeyError), HostExchange(5.0) as exchange:
        exchange.send(copy, [0], GROUP, "rows")
        raise KeyError


def test_a_sum_of_one_rank_is_its_own(lone_group: dist.ProcessGroup) -> None:
    own = torch.tensor([1.5, 2.5], dtype=torch.float64)
    with HostExchange(5.0) as exchange:
        assert exchange.sum(platform.start_read(own), lone_group, "norms").wait().tolist() == [1.5, 2.5]


def test_memory_of_old_messages_is_not_kept(posted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage is never further ahead than that: of 20 messages in a group of two ranks the first 12 have arrived."""
    arrived: list[int] = []
    monkeypatch.setattr(Work, "wait", lambda self, timeout: arrived.append(1))
    with HostExchange(5.0) as exchange:
        for number in range(20):
            exchange.send(platform.start_read(torch.tensor([float(number)])), [0], GROUP, "rows")
        assert len(arrived) == 12
    assert len(arrived) == 20
