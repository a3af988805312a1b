"""The whole loop in bounded lag, against in-process stand-ins."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.messages import assert_names
from tests.orchestrator.fake_run import FakeEnvironment, FakeRun, config, score_of, stopped_while_it_samples
from tests.transport.samples import same
from vcpo_megatron.orchestrator import controller as controller_module
from vcpo_megatron.orchestrator.modes.metrics_log import MetricsLog
from vcpo_megatron.orchestrator.modes.trainer import Trainer
from vcpo_megatron.orchestrator.peers import servers
from vcpo_megatron.orchestrator.store.ledger import Cursor, GroupLedger
from vcpo_megatron.orchestrator.store.recorder import Recorder
from vcpo_megatron.orchestrator.store.store import RolloutStore
from vcpo_megatron.rollout.fleet.fleet import FleetError
from vcpo_megatron.run.directory import RunDirectory
from vcpo_megatron.run.integrity import sealed
from vcpo_megatron.run.tasks import RunError, StopRequest
from vcpo_megatron.transport.messages import ControlError, Heartbeat
from vcpo_megatron.types import Group

pytestmark = pytest.mark.timeout(60)


def check_counters(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        parts = [row[f"rollouts/{name}"] for name in ("queued", "trained", "dropped", "failed")]
        assert sum(parts) == row["rollouts/generated"], row


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_a_run_ends_and_never_trains_beyond_the_bound(tmp_path: Path, lag: int) -> None:
    run = FakeRun(tmp_path, config(staleness={"max_staleness": lag}, train={"steps": 8}))
    assert run.run() == "run ended"
    assert run.learner.stopped == "run ended"
    assert [batch.step for batch in run.learner.batches] == list(range(8))
    assert max(run.staleness()) <= lag
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(8))
    assert [row["policy_version"] for row in rows] == list(range(1, 9))
    check_counters(rows)
    assert rows[-1]["rollouts/trained"] == 8 * 2 * 2 == rows[-1]["rollouts/generated"]
    assert rows[-1]["rollouts/queued"] == 0
    assert all(row["staleness/max"] <= lag for row in rows)
    assert rows[0]["tokens/trained"] == 2 * 2 * 4 and rows[0]["loss"] == 0.5
    assert {"time/step", "time/wait_batch", "time/sync", "time/forward_backward"} <= rows[0].keys()
    assert run.learner.checkpoints == [8]
    trained = [group.prompt_id for batch in run.learner.batches for group in batch.groups]
    assert sorted(trained) == sorted(f"train-{i}" for i in range(16))


@pytest.mark.parametrize(("updates", "lag", "adaptive"), [(2, 1, False), (2, 3, False), (4, 3, False), (2, 3, True)])
def test_a_batch_in_several_updates(tmp_path: Path, updates: int, lag: int, adaptive: bool) -> None:
    """Four groups a batch: servers get the weights of its last step only, later steps count their lag, and every prompt
    is trained once. Held-out versions are among those that servers get."""
    run = FakeRun(
        tmp_path,
        config(
            staleness={"max_staleness": lag, "adaptive": adaptive},
            train={"steps": 12, "groups_per_step": 4, "updates_per_batch": updates, "eval_every": 4},
        ),
    )
    run.learner.ess_ratio = 0.2  # so low that an adaptive run samples as little ahead as it may
    run.learner.first_ess_ratio = 1.0
    assert run.run() == "run ended"
    assert [len(batch.groups) for batch in run.learner.batches] == [4 // updates] * 12
    assert max(run.staleness()) <= lag
    loaded = [event for event in run.clients[0].events if event.startswith("loaded")]
    numbers = [int(event.split(".")[-1]) for event in loaded]
    assert set(numbers) <= set(range(0, 13, updates)) and {0, 4, 8, 12} <= set(numbers)
    rows = run.rows()
    check_counters(rows)
    for row in rows:
        assert row["step"] % updates <= row["staleness/max"] <= lag
    if lag == updates - 1:  # every batch is sampled by the version that its first step trains
        assert all(row["staleness/mean"] == row["step"] % updates for row in rows)
    assert [row["eval/version"] for row in rows if "eval/version" in row] == [0, 4, 8, 12]
    trained = [group.prompt_id for batch in run.learner.batches for group in batch.groups]
    assert sorted(trained) == sorted(f"train-{i}" for i in range(48 // updates))
    if adaptive:
        assert min(row["staleness/admitted"] for row in rows) == updates - 1


@pytest.mark.parametrize(("crash", "every"), [(5, 1), (5, 3), (6, 1), (7, 2)])
def test_resume_between_two_updates_trains_every_prompt_exactly_once(tmp_path: Path, crash: int, every: int) -> None:
    """The learner fails in step ``crash``; the checkpoint that is left may be in the midst of a batch of three."""

    def attempt(number: int, resume_step: int | None) -> FakeRun:
        keys = {"steps": 9, "groups_per_step": 3, "updates_per_batch": 3}
        run = FakeRun(
            tmp_path,
            config(staleness={"max_staleness": 4}, checkpoint={"every": every}, train=keys),
            attempt=number,
            resume_step=resume_step,
        )
        return run

    run = attempt(1, None)
    run.learner.error_at = crash
    with pytest.raises(ControlError):
        run.run()
    kept = RunDirectory(tmp_path).complete_steps()[-1]
    assert kept == crash - crash % every
    again = attempt(2, kept)
    assert again.run() == "run ended"
    batches = run.learner.batches[:kept] + again.learner.batches
    assert [batch.step for batch in batches] == list(range(9))
    trained = [group.prompt_id for batch in batches for group in batch.groups]
    assert sorted(trained) == sorted(f"train-{i}" for i in range(9))
    assert max(again.staleness()) <= 4
    assert [row["step"] for row in again.rows()] == list(range(9))
    check_counters(again.rows())
    loaded = [event.split()[-1] for event in again.clients[0].events if event.startswith("loaded")]
    assert loaded[0] == f"2.{kept}" and all(int(name[2:]) % 3 == 0 for name in loaded[1:])


def test_a_stop_between_two_updates_keeps_the_rest_of_the_batch(tmp_path: Path) -> None:
    def cfg() -> Any:
        return config(staleness={"max_staleness": 2}, train={"steps": 6, "groups_per_step": 3, "updates_per_batch": 3})

    async def stop(run: FakeRun, controller: Any) -> None:
        while not run.learner.batches:
            await asyncio.sleep(0.002)
        controller.request_stop("stopped by signal")

    run = FakeRun(tmp_path, cfg(), during=stop)
    run.learner.step_s = 0.1
    assert run.run() == "stopped by signal"
    (kept,) = run.learner.checkpoints
    assert kept in (1, 2)
    again = FakeRun(tmp_path, cfg(), attempt=2, resume_step=kept)
    assert again.run() == "run ended"
    trained = [g.group_id for batch in run.learner.batches + again.learner.batches for g in batch.groups]
    assert trained[:3] == [0, 1, 2] and len(set(trained)) == 6
    assert again.rows()[-1]["rollouts/dropped"] == 0


def test_lag_is_used_when_it_is_allowed(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, config(staleness={"max_staleness": 2}, train={"steps": 10}))
    run.learner.step_s = 0.05
    run.run()
    assert max(run.staleness()) == 2  # generation went on while the learner was busy, up to the bound


def test_at_lag_zero_every_token_is_sampled_by_the_version_that_trains(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, config(staleness={"max_staleness": 0}))
    run.run()
    for batch in run.learner.batches:
        versions = {v.number for g in batch.groups for t in g.trajectories for v in t.versions}
        assert versions == {batch.step}


def test_two_servers_share_the_groups_and_a_group_stays_on_one(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, config(staleness={"max_staleness": 2}), servers=2)
    run.run()
    places: dict[str, set[int]] = {}
    for client in run.clients:
        for event in client.events:
            if event.startswith("generate"):
                prompt, group, _ = event.split()[1].split("/", 2)
                places.setdefault(f"{prompt}/{group}", set()).add(client.index)
    assert all(len(servers) == 1 for servers in places.values())
    assert {index for servers in places.values() for index in servers} == {0, 1}


def test_a_failing_trajectory_is_counted_and_ends_its_group_only(tmp_path: Path) -> None:
    environment = FakeEnvironment(fails=lambda example: example.data["index"] % 3 == 1)
    run = FakeRun(tmp_path, config(), environment=environment)
    assert run.run() == "run ended"
    rows = run.rows()
    check_counters(rows)
    assert rows[-1]["rollouts/failed"] > 0
    assert rows[-1]["rollouts/failed"] == rows[-1]["rollouts/dropped"]  # groups of two: one fails, one is dropped
    with RolloutStore.open_readonly(tmp_path / "rollouts.sqlite") as store:
        reasons = store.reasons()
    assert any("the judge is down" in reason for reason in reasons), reasons


def test_nothing_but_failures_ends_the_run_with_the_commonest(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, config(train={"steps": 500}), environment=FakeEnvironment(fails=lambda example: True))
    with pytest.raises(RunError, match="^20 groups in a row.*judge is down"):
        run.run()


def test_a_stop_finishes_the_step_and_writes_a_checkpoint(tmp_path: Path) -> None:
    async def stop(run: FakeRun, controller: Any) -> None:
        while len(run.learner.batches) < 3:
            await asyncio.sleep(0.005)
        controller.request_stop("stopped by signal")

    run = FakeRun(tmp_path, config(train={"steps": 1000}), during=stop)
    run.learner.step_s = 0.02
    assert run.run() == "stopped by signal"
    done = len(run.learner.batches)
    assert 3 <= done < 1000
    assert run.learner.checkpoints == [done]
    assert run.learner.stopped == "stopped by signal"
    assert [row["step"] for row in run.rows()] == list(range(done))
    with RolloutStore.open_readonly(tmp_path / "rollouts.sqlite") as store:
        counts = store.counts()
    assert counts.queued == 0 and counts.trained == done * 4


def test_a_stop_during_the_start_ends_without_a_step(tmp_path: Path) -> None:
    async def stop(run: FakeRun, controller: Any) -> None:
        await asyncio.sleep(0.2)
        controller.request_stop("stopped by signal")

    run = FakeRun(tmp_path, config(), during=stop)
    run.learner.sends_weights = False
    assert run.run() == "stopped by signal"
    assert run.learner.checkpoints == []


def test_a_stop_does_not_wait_for_a_slow_environment(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, config())
    assert stopped_while_it_samples(run) < 5.0
    assert run.environment.closed > 0


def test_an_error_of_the_learner_ends_the_run_naming_it(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, config())
    run.learner.error_at = 2
    with pytest.raises(ControlError, match="learner rank 0: CUDA out of memory"):
        run.run()
    assert [row["step"] for row in run.rows()] == [0, 1]
    assert all(server.process is not None and server.process.poll() is not None for server in run.fleet.servers)


def test_a_silent_learner_ends_the_run_at_the_deadline(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, config(launch={"timeout_s": 1.5}))
    run.learner.silent_at = 1
    with pytest.raises(ControlError, match=r"silent for 1.5 s \(launch.timeout_s\).*owed StepDone"):
        run.run()


def test_a_learner_that_keeps_its_weights_ends_the_run_at_the_deadline(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, config(launch={"timeout_s": 1.5}))
    run.learner.sends_weights = False
    with pytest.raises(ControlError, match="owed the weights"):
        run.run()


def test_a_learner_that_keeps_the_weights_of_a_step_ends_the_run_at_the_deadline(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, config(launch={"timeout_s": 1.5}, staleness={"max_staleness": 0}))

    def keep(step: int) -> None:
        run.learner.sends_weights = step < 1

    run.learner.at_step = keep
    with pytest.raises(ControlError, match="owed the weights of its newest version"):
        run.run()
    assert len(run.learner.batches) == 2


def test_a_learner_of_another_version_is_refused(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, config())
    run.learner.version = run.learner.version._replace(number=3)
    with pytest.raises(ControlError, match=r"version 1.3, this attempt starts at 1.0"):
        run.run()


def test_servers_that_disagree_with_the_learner_end_the_run(tmp_path: Path) -> None:
    def setup(run: FakeRun) -> None:
        run.clients[1].score_offset = 0.002

    run = FakeRun(tmp_path, config(), servers=2, setup=setup)
    with pytest.raises(RunError, match=r"server 1 and the learner differ by 0.002"):
        run.run()
    assert not any(event.startswith("generate") for client in run.clients for event in client.events)


def test_a_skipped_step_counts_and_drops_its_trajectories(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, config())
    run.learner.skips = {2}
    run.run()
    rows = run.rows()
    check_counters(rows)
    assert [row["step/skipped"] for row in rows] == [0, 0, 1, 0, 0, 0]
    assert rows[2]["tokens/trained"] == 0 and rows[2]["rollouts/dropped"] == 4
    assert rows[-1]["rollouts/trained"] == 5 * 4


def test_steps_of_vanishing_weights_are_named_and_warned_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FakeRun(tmp_path, config())
    run.learner.vanished = {2, 3}
    run.run()
    assert [row["step/skipped"] for row in run.rows()] == [0, 0, 1, 1, 0, 0]
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "was skipped" in line] == [
        f"step {n} was skipped: vanishing weights" for n in (2, 3)
    ]
    (warning,) = [line for line in said if line.startswith("vcpo: warning: step ")]
    assert_names(warning, "step 2", "weights are 0 on average (weight/mean)")


def test_ten_skipped_steps_in_a_row_end_the_run(tmp_path: Path) -> None:
    """Nine do not, when the tenth is taken; the tenth's row and marks are written before the run ends."""
    run = FakeRun(tmp_path, config(train={"steps": 40}))
    run.learner.skips = {*range(2, 11), *range(12, 40)}
    with pytest.raises(RunError, match=r"^10 steps in a row .*step 21 \(non-finite.*--from-step"):
        run.run()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(22))
    assert rows[-1]["rollouts/dropped"] >= 19 * 4 and rows[-1]["rollouts/trained"] == 3 * 4
    assert "10 steps in a row" in run.learner.errors[-1]


async def kill_server(run: FakeRun, controller: Any) -> None:
    while len(run.learner.batches) < 2:
        await asyncio.sleep(0.005)
    run.clients[0].process.code = -9


def test_a_dead_server_ends_the_run_when_no_restart_is_allowed(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, config(train={"steps": 1000}, rollout={"max_restarts": 0}), during=kill_server)
    with pytest.raises(FleetError, match=r"server 0 died \(exit code -9\).*server.0.log.*max_restarts is 0"):
        run.run()


@pytest.mark.parametrize("servers", [1, 2])
def test_a_dead_server_is_restarted_and_gets_the_weights_before_any_request(tmp_path: Path, servers: int) -> None:
    cfg = config(train={"steps": 30}, rollout={"max_restarts": 1})
    run = FakeRun(tmp_path, cfg, during=kill_server, servers=servers)
    run.learner.step_s = 0.01
    assert run.run() == "run ended"
    events = run.clients[0].events
    again = len(events) - 1 - events[::-1].index("start")
    assert again > 0
    after = [event.split()[0] for event in events[again + 1 :]]
    assert after[0] == "loaded"
    first = int(events[again + 1].split(".")[1])
    assert first >= 2  # not the weights of the start
    assert max(run.staleness()) <= 1
    rows = run.rows()
    check_counters(rows)
    assert rows[-1]["rollouts/failed"] == 0  # its requests were run again


def test_a_group_too_old_is_dropped_and_its_prompt_sampled_again(tmp_path: Path) -> None:
    slow = {"once": True}

    def delay(example: Any) -> float:
        if example.data["index"] == 1 and slow.pop("once", False):
            return 30.0
        return 0.0

    cfg = config(staleness={"max_staleness": 1, "wait_s": 2.0}, environment={"episode_timeout_s": 60.0})
    run = FakeRun(tmp_path, cfg, environment=FakeEnvironment(delay_s=delay))
    assert run.run() == "run ended"
    rows = run.rows()
    check_counters(rows)
    assert rows[-1]["rollouts/dropped"] == 2
    trained = [group.prompt_id for batch in run.learner.batches for group in batch.groups]
    assert sorted(trained) == sorted(f"train-{i}" for i in range(12))  # none is lost


def test_the_watchdog_says_who_waits_for_whom(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = config(observability={"watchdog_s": 0.3, "tensorboard": False}, launch={"timeout_s": 1.5})
    run = FakeRun(tmp_path, cfg)
    run.learner.silent_at = 1
    with pytest.raises(ControlError):
        run.run()
    said = [line for line in capsys.readouterr().out.splitlines() if "nothing moved for 0.3 s" in line]
    assert any("learner asked for BatchReady" in line and "rollout server 0 serving" in line for line in said), said


def test_a_server_that_dies_in_the_probe_is_asked_again_after_its_restart(tmp_path: Path) -> None:
    def setup(run: FakeRun) -> None:
        score = run.clients[0].score

        async def die(tokens: Any) -> Any:
            run.clients[0].score = score  # type: ignore[method-assign]
            assert run.clients[0].process is not None
            run.clients[0].process.code = -9
            return await score(tokens)

        run.clients[0].score = die  # type: ignore[method-assign]

    cfg = config(rollout={"max_restarts": 1}, train={"steps": 1})
    run = FakeRun(tmp_path, cfg, setup=setup)
    assert run.run() == "run ended"
    assert run.clients[0].events.count("start") == 2


def test_a_slow_start_of_the_servers_is_said_and_is_no_alarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "SAY_EVERY_S", 0.4)
    cfg = config(observability={"watchdog_s": 0.3, "tensorboard": False}, train={"steps": 1})
    lines: list[str] = []

    def told(line: str, **how: Any) -> None:
        lines.append(line)
        print(line, **how)

    monkeypatch.setattr(servers, "print", told, raising=False)

    async def slow() -> bool:
        return len(lines) >= 4

    def setup(run: FakeRun) -> None:
        run.clients[1].ready = slow  # type: ignore[method-assign]

    assert FakeRun(tmp_path, cfg, servers=2, setup=setup).run() == "run ended"
    out = capsys.readouterr().out.splitlines()
    said = [number for number, line in enumerate(out) if "waiting for rollout servers" in line]
    assert len(said) >= 4 and re.search(r": 1 of 2 ready \([1-9]\d* of 30 s, ", out[said[-1]])
    assert_names(out[said[-1]], "vcpo: note: waiting for rollout servers", "rollout.start_timeout_s")
    # A busy machine may stand still for so long once they have started.
    assert not [line for line in out[: said[-1]] if "nothing moved" in line]


def test_a_slow_learner_is_waited_for_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_module, "SAY_EVERY_S", 0.1)
    said: list[str] = []
    may_load = threading.Event()

    async def during(run: FakeRun, controller: Any) -> None:
        while not any("(builds the model)" in line for line in said):
            await asyncio.sleep(0.01)
            said.extend(capsys.readouterr().out.splitlines())
        may_load.set()

    def loading(client: Any) -> None:
        client.send(Heartbeat("learner", "builds the model"))
        may_load.wait(30)

    run = FakeRun(tmp_path, config(train={"steps": 1}), servers=2, during=during)
    run.learner.before_loaded = loading
    assert run.run() == "run ended"
    waits = [line for line in said if line.startswith("vcpo: note: waiting for the learner (")]
    assert re.search(r" \(builds the model\), servers \([0-2] of 2 ready\), ", waits[-1])
    assert re.search(r", \d+ s$", waits[-1])
    assert_names(capsys.readouterr().out, "learner and 2 servers hold version 1.0", "first batch")


# --- checkpoints and resume -------------------------------------------------------------------


@pytest.mark.parametrize("crash", [2, 3, 5])
@pytest.mark.parametrize("lag", [0, 2])
def test_resume_trains_every_prompt_exactly_once(tmp_path: Path, crash: int, lag: int) -> None:
    cfg = config(checkpoint={"every": 2}, staleness={"max_staleness": lag}, train={"steps": 7})
    first = FakeRun(tmp_path, cfg)
    first.learner.step_s = 0.01
    first.learner.error_at = crash
    with pytest.raises(ControlError):
        first.run()
    saved = first.context.directory.complete_steps()[-1]
    assert saved == crash // 2 * 2
    second = FakeRun(tmp_path, cfg, attempt=2, resume_step=saved)
    assert second.run() == "run ended"
    assert [batch.step for batch in second.learner.batches] == list(range(saved, 7))
    assert max(second.staleness()) <= lag
    kept = first.learner.batches[:saved] + second.learner.batches
    trained = [group.prompt_id for batch in kept for group in batch.groups]
    assert sorted(trained) == sorted(f"train-{i}" for i in range(14))
    rows = second.rows()
    assert [row["step"] for row in rows] == list(range(7))
    check_counters(rows)
    assert rows[-1]["rollouts/trained"] == 28 and rows[-1]["rollouts/queued"] == 0
    with sqlite3.connect(tmp_path / "rollouts.sqlite") as connection:
        states = dict(connection.execute("SELECT state, COUNT(*) FROM trajectories GROUP BY state").fetchall())
    assert states["trained"] == 28 and set(states) <= {"trained", "dropped"}


def test_resume_before_the_first_checkpoint_starts_again(tmp_path: Path) -> None:
    first = FakeRun(tmp_path, config())
    first.learner.error_at = 2
    with pytest.raises(ControlError):
        first.run()
    second = FakeRun(tmp_path, config(), attempt=2)
    assert second.run() == "run ended"
    rows = second.rows()
    assert [row["step"] for row in rows] == list(range(6))
    check_counters(rows)


def test_resume_of_a_finished_run_does_nothing(tmp_path: Path) -> None:
    cfg = config(train={"eval_every": 2})
    FakeRun(tmp_path, cfg).run()
    before = (tmp_path / "metrics.jsonl").read_text()
    second = FakeRun(tmp_path, cfg, attempt=2, resume_step=6)
    assert second.run() == "run ended"
    assert second.learner.batches == [] and second.learner.checkpoints == []
    assert not any(event.startswith("generate") for event in second.clients[0].events)
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_resume_with_other_data_is_refused(tmp_path: Path) -> None:
    FakeRun(tmp_path, config()).run()
    second = FakeRun(tmp_path, config(train={"steps": 9}), attempt=2, resume_step=6)
    second.environment.fingerprint = "other"
    with pytest.raises(RunError, match=r"checkpoint step_6 \(fingerprint f, now other\).*the tokenizer"):
        second.run()


def test_a_prompt_that_waited_to_be_sampled_again_is_carried_by_the_checkpoint(tmp_path: Path) -> None:
    """Group 1 expires while the learner takes a step; its prompt is in the list when the checkpoint is taken."""
    first = FakeRun(tmp_path, config(train={"steps": 2}, checkpoint={"every": 1}))
    first.run()
    path = first.context.directory.checkpoint(2) / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["orchestrator"]["requeue"] == []
    manifest["orchestrator"]["requeue"] = [70]
    del manifest["crc32"]  # of the text before
    path.write_text(sealed(manifest))
    second = FakeRun(tmp_path, config(train={"steps": 3}), attempt=2, resume_step=2)
    second.run()
    assert [group.prompt_id for group in second.learner.batches[0].groups] == ["train-70", "train-4"]

    class Link:
        async def checkpoint(self, step: int, state: dict[str, Any]) -> Any:
            assert step == 3 and state["requeue"] == [5, 8] and state["environment"] == "f"
            return asyncio.sleep(0, 0.0)

    async def main() -> None:
        recorder = Recorder(lambda: RolloutStore(tmp_path / "other.sqlite"))
        await recorder.open()
        ledger = GroupLedger(recorder, Cursor(requeue=[5, 8]), version=2)
        trainer = Trainer(
            config(),
            Link(),  # type: ignore[arg-type]
            ledger,
            recorder,
            MetricsLog([], [], 9),
            RunDirectory(tmp_path),
            fingerprint="f",
            stop=StopRequest(),
        )
        ledger.version = 3
        await trainer.checkpoint()
        await recorder.finish("run ended")

    asyncio.run(asyncio.wait_for(main(), 10))


# --- what the learner records -------------------------------------------------------------------


def recording(**sections: Any) -> Any:
    return config(algorithm={"mismatch": "recorded"}, **sections)


def check_recorded(run: FakeRun, *, first_attempt_until: int = 0) -> None:
    """Every trained trajectory has what the learner gave it by a version between that of its newest token and the one
    that was trained; by one of an earlier attempt only up to its checkpoint."""
    for batch in run.learner.batches:
        for group in batch.groups:
            assert group.recorded
            for one in group.trajectories:
                version = one.recorded.version
                assert one.newest_version <= version.number <= batch.step
                assert version.attempt == run.attempt or version.number <= first_attempt_until
                bare = Group(group.group_id, group.prompt_id, (one,))
                np.testing.assert_array_equal(one.recorded.logprobs, score_of([bare], version))


@pytest.mark.parametrize("lag", [0, 2])
def test_a_group_is_scored_by_the_learner_before_it_is_trained(tmp_path: Path, lag: int) -> None:
    run = FakeRun(tmp_path, recording(staleness={"max_staleness": lag}, train={"steps": 8}))
    run.learner.step_s = 0.02
    assert run.run() == "run ended"
    check_recorded(run)
    trained = [group.group_id for batch in run.learner.batches for group in batch.groups]
    assert sorted(run.learner.scored) == sorted(trained)  # once, and nothing else
    assert max(run.learner.asked_for) == 2  # groups of a batch, however many wait
    ages = [row["mismatch/versions"] for row in run.rows()]
    assert all(0 <= age <= row["staleness/token_mean"] for age, row in zip(ages, run.rows(), strict=True))
    assert lag > 0 or set(ages) == {0.0}
    with RolloutStore(tmp_path / "rollouts.sqlite") as store:
        for batch in run.learner.batches:
            assert same(store.groups_trained_at(batch.step), list(batch.groups))
    assert all(0 <= row["time/score"] <= row["time/wait_batch"] for row in run.rows())
    assert lag == 0 or max(run.staleness()) > 0


def test_a_batch_is_scored_as_a_whole_before_the_first_of_its_updates(tmp_path: Path) -> None:
    """So a later update's lag holds what the earlier ones have moved; scored is a step's worth at a time."""
    train = {"steps": 8, "groups_per_step": 4, "updates_per_batch": 2, "eval_every": 0}
    run = FakeRun(tmp_path, recording(staleness={"max_staleness": 3}, train=train))
    run.learner.step_s = 0.02
    assert run.run() == "run ended"
    check_recorded(run)
    assert max(run.learner.asked_for) == 2
    for batch in run.learner.batches:
        versions = [one.recorded.version.number for group in batch.groups for one in group.trajectories]
        assert max(versions) <= batch.step - batch.step % 2
    trained = [group.group_id for batch in run.learner.batches for group in batch.groups]
    assert sorted(run.learner.scored) == sorted(trained)


@pytest.mark.parametrize("crash", ["score", "step"])
def test_what_was_not_scored_at_a_crash_is_scored_after_it(tmp_path: Path, crash: str) -> None:
    """And so is what a version has scored that the resume undoes; every prompt is trained once."""
    cfg = recording(checkpoint={"every": 2}, staleness={"max_staleness": 2}, train={"steps": 7})
    first = FakeRun(tmp_path, cfg)
    first.learner.step_s = 0.02
    first.learner.error_at, first.learner.score_error_from = (3, None) if crash == "step" else (None, 3)
    with pytest.raises(ControlError):
        first.run()
    second = FakeRun(tmp_path, cfg, attempt=2, resume_step=2)
    assert second.run() == "run ended"
    check_recorded(second, first_attempt_until=2)
    kept = first.learner.batches[:2] + second.learner.batches
    trained = [group.prompt_id for batch in kept for group in batch.groups]
    assert sorted(trained) == sorted(f"train-{i}" for i in range(14))
    check_counters(second.rows())


def test_a_stop_while_groups_are_scored_ends_with_a_checkpoint(tmp_path: Path) -> None:
    """The answer comes after nobody waits for it any more."""
    scoring = threading.Event()

    async def stop(run: FakeRun, controller: Any) -> None:
        while not scoring.is_set():
            await asyncio.sleep(0.002)
        controller.request_stop("stopped by signal")

    run = FakeRun(tmp_path, recording(staleness={"max_staleness": 0}), during=stop)

    def slow(groups: list[int]) -> None:
        if run.learner.version.number == 2:
            scoring.set()
            time.sleep(0.2)

    run.learner.at_score = slow
    assert run.run() == "stopped by signal"
    assert run.learner.checkpoints == [2] and len(run.learner.batches) == 2


def test_groups_without_variance_that_are_dropped_are_not_scored(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, recording(train={"steps": 4, "drop_zero_variance": True}))
    assert run.run() == "run ended"
    trained = {group.group_id for batch in run.learner.batches for group in batch.groups}
    assert run.rows()[-1]["rollouts/dropped"] > 0
    assert set(run.learner.scored) >= trained and len(set(run.learner.scored)) == len(run.learner.scored)
    with RolloutStore(tmp_path / "rollouts.sqlite") as store:
        dropped = {row["group_id"] for row in store.history() if row["reason"] == "zero variance"}
    assert dropped and not dropped & set(run.learner.scored)
