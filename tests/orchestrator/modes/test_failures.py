"""Failed trajectories in a run, replaced or dropped; prompts set aside; groups of equal rewards; a full disk."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.messages import assert_names
from tests.orchestrator.fake_run import FakeEnvironment, FakeEpisode, FakeRun, config
from tests.orchestrator.ledgers import NoStore, now
from tests.orchestrator.modes.test_batcher import trajectory
from vcpo_megatron.environments.base import Example, Outcome
from vcpo_megatron.orchestrator.modes.failures import FailureWindow, PromptFailures
from vcpo_megatron.orchestrator.store.ledger import Cursor, GroupLedger
from vcpo_megatron.orchestrator.store.schema import StoreFullError
from vcpo_megatron.orchestrator.store.store import RolloutStore
from vcpo_megatron.rollout.client.protocol import Span
from vcpo_megatron.run.tasks import RunError
from vcpo_megatron.types import Group, PolicyVersion

pytestmark = pytest.mark.timeout(120)


def states(run_dir: Path) -> Counter[tuple[str, str, str]]:
    """(prompt, state, reason) of every trajectory."""
    with closing(sqlite3.connect(run_dir / "rollouts.sqlite")) as connection:
        return Counter(
            connection.execute(
                "SELECT prompt_id, t.state, t.reason FROM trajectories t JOIN groups g USING (group_id)"
            ).fetchall()
        )


def trained(run: FakeRun) -> list[str]:
    return sorted(group.prompt_id for batch in run.learner.batches for group in batch.groups)


class FailsFirst:
    """``fails``: the first ``times`` steps on the prompt of ``index`` fail."""

    def __init__(self, index: int, times: int) -> None:
        self.index, self.left = index, times

    def __call__(self, example: Any) -> bool:
        if example.data["index"] != self.index or self.left == 0:
            return False
        self.left -= 1
        return True


def test_a_failed_member_is_replaced_by_another_sample(tmp_path: Path) -> None:
    cfg = config(rollout={"on_failure": "resample"})
    run = FakeRun(tmp_path, cfg, environment=FakeEnvironment(fails=FailsFirst(3, 2)))
    assert run.run() == "run ended"
    assert trained(run) == sorted(f"train-{i}" for i in range(12))
    found = {key[1:]: count for key, count in states(tmp_path).items() if key[0] == "train-3"}
    assert found.pop(("trained", "")) == 2 and sum(found.values()) == 2
    assert all(state == "failed" and "the judge is down" in reason for state, reason in found)
    (group,) = [g for b in run.learner.batches for g in b.groups if g.prompt_id == "train-3"]
    assert len({t.sample_index for t in group.trajectories}) == 2
    assert max(t.sample_index for t in group.trajectories) >= 2  # a new sample, not the failed one's number
    row = run.rows()[-1]
    assert row["rollouts/generated"] == 24 + 2 and row["rollouts/failed"] == 2 and row["rollouts/dropped"] == 0


def test_a_dropped_group_is_sampled_again(tmp_path: Path) -> None:
    class Environment(FakeEnvironment):
        made = 0

        def episode(self, example: Example) -> FakeEpisode:
            self.made += example.data["index"] == 3
            return super().episode(example)

    environment = Environment()
    environment.fails = lambda example: example.data["index"] == 3 and environment.made <= 4  # of the first two groups
    run = FakeRun(tmp_path, config(), environment=environment)
    assert run.run() == "run ended"
    assert trained(run) == sorted(f"train-{i}" for i in range(12))
    row = run.rows()[-1]
    assert row["rollouts/failed"] == row["rollouts/dropped"] == 2 and row["rollouts/trained"] == 24


@pytest.mark.parametrize("policy", ["drop", "resample"])
def test_a_poisoned_prompt_is_set_aside_by_name(
    tmp_path: Path, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = FakeEnvironment(fails=lambda example: example.data["index"] == 3)
    cfg = config(rollout={"on_failure": policy, "max_prompt_failures": 3})
    run = FakeRun(tmp_path, cfg, environment=environment)
    assert run.run() == "run ended"
    assert trained(run) == sorted(f"train-{i}" for i in range(13) if i != 3)  # the next prompt took its place
    said = capsys.readouterr().out
    assert said.count("prompt train-3 is set aside") == 1
    assert_names(said, "prompt train-3 is set aside", "3 failures", "environment fake")
    failed = Counter({key[0]: n for key, n in states(tmp_path).items() if key[1] == "failed"})
    assert failed.keys() == {"train-3"}
    assert run.rows()[-1]["rollouts/failed"] == 3


def test_a_prompt_stays_set_aside_after_a_resume() -> None:
    prompts = PromptFailures(2, {"a": 2, "b": 1})
    assert prompts.is_set_aside("a") and not prompts.is_set_aside("b")
    assert not prompts.failure("b", ValueError("x")) and prompts.failure("c", ValueError("x"))
    assert [prompts.is_set_aside(name) for name in "abc"] == [True, True, False]


def test_the_window_counts_failures_among_outcomes() -> None:
    window = FailureWindow(10, 0.5)
    for _ in range(20):  # half of the outcomes: not too many
        window.success()
        window.failure(ValueError("common"), 0)
    with pytest.raises(RunError) as caught:
        window.failure(ValueError("rare"), 0)
    assert_names(caught.value, "6 of the last 10 outcomes", "max_failure_ratio = 0.5", "5 of them: common")


class Groups:
    """Groups of one trajectory that end one after the other, in a ledger with a window on it."""

    def __init__(self, *groups: int, ratio: float = 0.5) -> None:
        self.window = FailureWindow(1000, ratio)
        self.ledger = GroupLedger(NoStore(), Cursor())
        for group in groups:
            self.ledger.admit(group, "p", group, 1, PolicyVersion(1, 0))

    def success(self, group: int) -> None:
        self.window.success()
        live = now(self.ledger.finish(trajectory(group, 0, 0)))
        assert live.complete

    def failure(self, error: Exception, group: int | None = None) -> None:
        """``group``: the one that ends with it."""
        if group is not None:
            now(self.ledger.fail(group, 0, str(error), requeue=False))
        self.window.failure(error, self.ledger.failed_in_a_row)

    def failing(self, groups: Iterable[int], says: str = "gone {}") -> int:
        """How many of ``groups``, which fail in this order, it takes to end the run; 0: it goes on."""
        for number, group in enumerate(groups, 1):
            try:
                self.failure(ValueError(says.format(group)), group)
            except RunError as error:
                assert "groups in a row" in str(error)
                return number
        return 0


def test_so_many_groups_in_a_row_end_a_run_whatever_the_window_early_and_late() -> None:
    assert Groups(*range(30)).failing(range(30)) == 20
    late = Groups(*range(130))
    for group in range(100):
        late.success(group)
    assert late.failing(range(100, 130)) == 20
    # 0.9 ^ 132 is the first power below one in a million
    assert Groups(*range(200), ratio=0.9).failing(range(200)) == 132
    assert Groups(*range(200), ratio=0.01).failing(range(200)) == 20
    groups = Groups(*range(21))
    groups.success(0)
    groups.failure(ValueError("other"))  # of a group that goes on
    with pytest.raises(RunError) as caught:
        for group in range(1, 21):
            groups.failure(ValueError(f"gone -{group}.5" if group < 20 else "gone -7.5"), group)
    assert_names(caught.value, "20 groups in a row", "21 of the last 22 outcomes", "20 of them: gone -7.5")
    assert_names(caught.value, "(rollout.max_failure_ratio = 0.5)")


def complete(group: int) -> Group:
    return Group(group, "p", (trajectory(group, 0, 0),))


def test_what_counts_is_the_order_of_admission() -> None:
    """Quick failures of other groups come before a slow success: they end nothing."""
    groups = Groups(*range(150))
    assert groups.failing([*range(100, 119), *range(1, 100)]) == 0  # group 0 has not ended
    groups.success(0)
    slow = Groups(*range(60))
    assert slow.failing([g for g in range(60) if g % 15]) == 0
    for group in (0, 15, 30, 45):
        slow.success(group)
    now(slow.ledger.admit_whole({group: complete(group) for group in range(100, 119)}))
    assert slow.failing(range(100, 119)) == 0  # never sampled here: of the attempt before


def test_a_group_that_is_dropped_holds_nothing_up() -> None:
    groups = Groups(*range(30))
    assert groups.failing(range(1, 25)) == 0
    groups.ledger.expire(0)
    assert groups.failing([25]) == 1  # 25 in a row by now
    for group in (26, 27):
        groups.ledger.expire(group)
    groups.success(28)
    assert groups.failing([29]) == 0


@pytest.mark.parametrize("policy", ["drop", "resample"])
def test_a_policy_that_has_diverged_ends_the_run_soon(tmp_path: Path, policy: str) -> None:
    cfg = config(
        train={"steps": 500, "groups_per_step": 8}, staleness={"max_staleness": 16}, rollout={"on_failure": policy}
    )
    run = FakeRun(tmp_path, cfg, environment=FakeEnvironment(fails=lambda example: True))
    with pytest.raises(RunError, match="^20 groups in a row.*judge is down"):
        run.run()
    failed = sum(count for key, count in states(tmp_path).items() if key[1] == "failed")
    # Which groups have failed by then is a matter of timing; the window alone takes 1,360 failures.
    assert failed < 1360 / 2


@pytest.mark.parametrize(
    ("reward", "info"),
    [
        (float("nan"), {}),
        (float("inf"), {}),
        (None, {}),
        (1.0, {"x": "text"}),
        (1.0, {"x": float("nan")}),
        (1.0, {"x": None}),
    ],
)
def test_what_cannot_be_trained_on_is_a_counted_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: Any, info: dict[str, Any]
) -> None:
    whole = FakeEpisode.step

    async def step(self: Any, action: Any) -> Any:
        outcome = await whole(self, action)
        return Outcome(reward, info) if self._example.data["index"] == 2 else outcome

    monkeypatch.setattr(FakeEpisode, "step", step)
    run = FakeRun(tmp_path, config())
    assert run.run() == "run ended"
    assert run.rows()[-1]["rollouts/failed"] == 3 and "train-2" not in trained(run)


def test_groups_of_equal_rewards_are_replaced_by_choice(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, config(train={"drop_zero_variance": True, "steps": 8}))
    assert run.run() == "run ended"
    for batch in run.learner.batches:
        assert all(len({t.reward for t in group.trajectories}) == 2 for group in batch.groups)
    with RolloutStore.open_readonly(tmp_path / "rollouts.sqlite") as store:
        reasons = store.reasons()
        counts = store.counts()
    assert reasons["dropped: zero variance"] > 0
    assert counts.trained == 8 * 4 and set(reasons) <= {"dropped: zero variance", "dropped: run ended"}
    assert max(run.staleness()) <= 1


@pytest.mark.parametrize("rewards", [(1.0,), (0.3, 0.1 + 0.2)], ids=str)
def test_nothing_but_equal_rewards_ends_the_run(
    rewards: tuple[float, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_turns = itertools.cycle(rewards)

    async def step(self: Any, action: Any) -> Any:
        return Outcome(next(by_turns))

    monkeypatch.setattr(FakeEpisode, "step", step)
    run = FakeRun(tmp_path, config(train={"drop_zero_variance": True}))
    with pytest.raises(RunError, match=r"10\d groups in a row had equal rewards"):
        run.run()


# --- a full disk ------------------------------------------------------------------------------


def limited(monkeypatch: pytest.MonkeyPatch, pages: int) -> dict[str, Any]:
    """The run's store may not grow by more than ``pages``; SQLite then says that its disk is full."""
    made: dict[str, Any] = {}

    class Limited(RolloutStore):
        def __init__(self, path: Path, *, create: bool = True) -> None:
            super().__init__(path, create=create)
            now = self._connection.execute("PRAGMA page_count").fetchone()[0]
            self._connection.execute(f"PRAGMA max_page_count = {now + pages}")
            made["store"] = self

    monkeypatch.setattr("vcpo_megatron.orchestrator.controller.RolloutStore", Limited)
    return made


def test_a_full_disk_pauses_generation_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = limited(monkeypatch, 0)
    admitted: list[int] = []
    paused: list[int] = []

    class Environment(FakeEnvironment):
        def train_example(self, index: int) -> Example:
            admitted.append(index)
            return super().train_example(index)

    async def free(run: FakeRun, controller: Any) -> None:
        controller._recorder._retry_s = 0.05
        while controller._recorder.paused is None:
            await asyncio.sleep(0.001)
        paused.append(len(admitted))
        await asyncio.sleep(0.5)
        paused.append(len(admitted))
        made["store"]._connection.execute("PRAGMA max_page_count = 1000000")

    def setup(run: FakeRun) -> None:
        run.clients[0].latency_s = 0.02  # else all are admitted while a slow disk takes the first ones

    cfg = config(train={"steps": 30}, staleness={"max_staleness": 30}, rollout={"max_running_requests": 4})
    run = FakeRun(tmp_path, cfg, environment=Environment(), during=free, setup=setup)
    assert run.run(timeout_s=60) == "run ended"
    assert paused[0] == paused[1]  # no group was admitted meanwhile, and the bound has room for all
    said = capsys.readouterr().out
    assert said.count("generation pauses: rollout store") == 1 and "cannot grow (database or disk is full)" in said
    told = [line for line in said.splitlines() if line.startswith(("vcpo: warning: ", "vcpo: note: the disk"))]
    assert [line.split(":")[2].strip() for line in told] == ["generation pauses", "the disk takes writes again"]
    assert trained(run) == sorted(f"train-{i}" for i in range(60))
    assert run.rows()[-1]["rollouts/trained"] == 120 and run.rows()[-1]["rollouts/dropped"] == 0


def test_a_stop_does_not_wait_for_a_full_disk_and_a_resume_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions = 0

    class Full(RolloutStore):
        @contextmanager
        def transaction(self) -> Iterator[None]:
            nonlocal transactions
            transactions += not self._in_transaction
            if transactions > 20:
                raise StoreFullError(f"{self._path} cannot grow; free space on its disk")
            with super().transaction():
                yield

    monkeypatch.setattr("vcpo_megatron.orchestrator.controller.RolloutStore", Full)

    async def stop(run: FakeRun, controller: Any) -> None:
        controller._recorder._retry_s = 0.05
        while controller._recorder.paused is None:
            await asyncio.sleep(0.005)
        controller.request_stop("stopped by signal")

    first = FakeRun(tmp_path, config(train={"steps": 30}, checkpoint={"every": 2}), during=stop)
    with suppress(StoreFullError):  # raised where the end of the run itself had to write
        assert first.run(timeout_s=30) == "stopped by signal"
    assert transactions > 20
    monkeypatch.undo()
    steps = first.context.directory.complete_steps()
    second = FakeRun(tmp_path, config(train={"steps": 30}), attempt=2, resume_step=steps[-1] if steps else None)
    assert second.run(timeout_s=60) == "run ended"
    kept = first.learner.batches[: steps[-1] if steps else 0] + second.learner.batches
    assert sorted(g.prompt_id for b in kept for g in b.groups) == sorted(f"train-{i}" for i in range(60))


# --- servers that are doubted -------------------------------------------------------------------


@pytest.mark.parametrize("label", ["default", "1.99"])
def test_what_a_server_says_wrong_of_its_weights_is_counted_against_no_prompt(tmp_path: Path, label: str) -> None:
    """It loses them now and then; a prompt that fails is set aside at once here, and ends its group."""

    def setup(run: FakeRun) -> None:
        client, asked = run.clients[0], 0
        answer = client.generate

        async def generate(*request: Any) -> Any:
            nonlocal asked
            asked, result = asked + 1, await answer(*request)
            return result if asked not in (20, 60) else replace(result, spans=(Span(0, len(result.output_ids), label),))

        client.generate = generate  # type: ignore[method-assign]

    cfg = config(train={"steps": 20}, rollout={"max_prompt_failures": 1})
    run = FakeRun(tmp_path, cfg, setup=setup)
    assert run.run() == "run ended"
    last = run.rows()[-1]
    assert (last["rollouts/trained"], last["rollouts/failed"], last["rollouts/dropped"]) == (80, 0, 0)
    assert all(
        version.attempt == 1
        for b in run.learner.batches
        for g in b.groups
        for t in g.trajectories
        for version in t.versions
    )
