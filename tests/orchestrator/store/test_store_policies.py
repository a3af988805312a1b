"""What the store does by policy: replaces failed members, prunes tokens, keeps what groups in flight have."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from tests.messages import assert_names
from tests.orchestrator.fake_run import FakeRun, config
from tests.orchestrator.store.test_store import V0, check_invariant, sample_group, trajectory
from vcpo_megatron.cli import main as cli
from vcpo_megatron.config.load import dump_resolved
from vcpo_megatron.orchestrator.store.schema import StoreError, StoreFullError
from vcpo_megatron.orchestrator.store.store import RolloutStore
from vcpo_megatron.transport.messages import ControlError
from vcpo_megatron.types import PolicyVersion, Trajectory, TrajectoryResult, Turn, VersionSpan

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rollouts.sqlite"


def train(store: RolloutStore, step: int, *groups: int) -> None:
    results = [TrajectoryResult(group, sample, -0.5, 0.6, 1.5, 0.125) for group in groups for sample in (0, 1)]
    store.mark_trained(step, results, groups, [0] * len(groups))


def test_a_replaced_member_is_counted_and_its_group_completes(path: Path) -> None:
    with RolloutStore(path) as store:
        store.admit(0, "p0", 0, 2, V0)
        store.add_trajectory(trajectory(0, 1, V0))
        assert store.replace(0, 0, "tool crashed", 2)
        check_invariant(store)
        assert store.complete_groups() == [] and store.counts().failed == 1 and store.counts().generated == 3
        with pytest.raises(StoreError, match="0/0 has ended before"):
            store.replace(0, 0, "again", 3)
        store.add_trajectory(trajectory(0, 2, V0))
        (group,) = store.complete_groups()
        assert [member.sample_index for member in group.trajectories] == [1, 2]
        store.mark_trained(0, [], [0], [0])
        check_invariant(store)
        assert (store.counts().trained, store.counts().failed) == (2, 1)
        assert not store.replace(0, 1, "late", 3)
        assert store.failures_by_prompt() == {"p0": 1}
        assert [g.group_id for g in store.resume(0).buffer] == [0]  # the failed one stays failed
        check_invariant(store)


def test_tokens_of_old_steps_are_pruned_and_those_of_failures_kept(path: Path) -> None:
    with RolloutStore(path) as store:
        for group in range(6):
            sample_group(store, group)
        for step in range(4):
            train(store, step, step)
        store.drop(4, "expired")
        store.fail(5, 0, "tool crashed")
        assert store.prune_samples(2) == 4  # groups 0 and 1, two samples each
        assert [len(store.groups_trained_at(step)) for step in range(4)] == [0, 0, 1, 1]
        kept = [row[0] for row in store._rows("SELECT DISTINCT group_id FROM samples ORDER BY group_id")]
        assert kept == [2, 3, 4, 5]
        assert store.prune_samples(99) == 6
        assert [row[0] for row in store._rows("SELECT DISTINCT group_id FROM samples")] == [5]
        rows = list(store.history(step=0))  # what happened is known all the same
        assert [(row["prompt_id"], row["weight"], row["state"]) for row in rows] == [("p0", 0.6, "trained")] * 2
        check_invariant(store)
        # Going back beyond what was pruned samples these prompts again.
        plan = store.resume(1)
        assert plan.buffer == () and plan.requeue == (1, 2, 3, 4, 5)


def test_a_run_prunes_only_what_no_checkpoint_needs(tmp_path: Path) -> None:
    cfg = config(train={"steps": 10}, checkpoint={"every": 2, "keep_last": 2, "keep_rollouts": 1})
    run = FakeRun(tmp_path, cfg)
    run.learner.error_at = 9
    with pytest.raises(ControlError):
        run.run()
    assert run.context.directory.complete_steps() == [6, 8]
    with RolloutStore.open_readonly(tmp_path / "rollouts.sqlite") as store:
        assert [step for step in store.trained_steps() if store.groups_trained_at(step)] == [6, 7, 8]
    again = FakeRun(tmp_path, cfg, attempt=2, resume_step=6)
    assert again.run() == "run ended"
    trained = [g.prompt_id for b in run.learner.batches[:6] + again.learner.batches for g in b.groups]
    assert sorted(trained) == sorted(f"train-{i}" for i in range(20))


def test_groups_in_flight_go_on_with_what_they_have(path: Path) -> None:
    with RolloutStore(path) as store:
        sample_group(store, 0)
        for group in (1, 2, 3, 4):
            store.admit(group, f"p{group}", group, 3, V0)
        store.add_trajectory(trajectory(1, 0, V0))
        store.add_trajectory(trajectory(1, 2, V0))
        store.add_trajectory(trajectory(2, 1, PolicyVersion(1, 5)))  # sampled by a version of the future
        store.add_trajectory(trajectory(4, 1, V0))
        store.replace(1, 1, "tool crashed", 3)
        store.drop(4, "expired")
        store.end_run()
        plan = store.resume(0, keep_partial=True)
        check_invariant(store)
        (partial,) = plan.partial
        assert (partial.group_id, partial.prompt_id, partial.version, partial.missing) == (1, "p1", 0, (3,))
        assert [member.sample_index for member in partial.trajectories] == [0, 2]
        assert [group.group_id for group in plan.buffer] == [0] and plan.requeue == (2, 3, 4)
        assert plan.cursors == {0: 0, 1: 1}
        store.add_trajectory(trajectory(1, 3, V0))
        assert [group.group_id for group in store.complete_groups()] == [0, 1]
        again = store.resume(0)
        assert again.partial == () and [group.group_id for group in again.buffer] == [0, 1]


@pytest.mark.parametrize("keep", [True, False])
def test_a_resumed_run_finishes_groups_in_flight_or_samples_them_anew(tmp_path: Path, keep: bool) -> None:
    """The first attempt left two groups with one of two members each."""
    cfg = config(train={"steps": 2}, checkpoint={"every": 1, "resume_partial": keep}, staleness={"max_staleness": 0})
    with RolloutStore(tmp_path / "rollouts.sqlite") as store:
        for group in range(2):
            store.admit(group, f"train-{group}", group, 2, V0)
            store.add_trajectory(trajectory(group, 0, V0, prompt_id=f"train-{group}"))
    run = FakeRun(tmp_path, cfg, attempt=2)
    assert run.run() == "run ended"
    first = {t.uid for group in run.learner.batches[0].groups for t in group.trajectories}
    assert first == ({"0/0", "0/1", "1/0", "1/1"} if keep else {"2/0", "2/1", "3/0", "3/1"})
    row = run.rows()[-1]
    assert row["rollouts/trained"] == 8 and row["rollouts/dropped"] == (0 if keep else 4)
    sent = [event.split()[1] for event in run.clients[0].events if event.startswith("generate")]
    assert any(name.startswith("train-0/0/1/") for name in sent) is keep
    assert not any(name.startswith("train-0/0/0/") for name in sent)


def test_a_crash_before_a_group_without_variance_was_dropped(tmp_path: Path) -> None:
    with RolloutStore(tmp_path / "rollouts.sqlite") as store:
        store.admit(0, "train-0", 0, 2, V0)
        for sample in (0, 1):
            store.add_trajectory(replace(trajectory(0, sample, V0, prompt_id="train-0"), reward=1.0))
    run = FakeRun(tmp_path, config(train={"steps": 2, "drop_zero_variance": True}), attempt=2)
    assert run.run() == "run ended"
    assert all(group.group_id for batch in run.learner.batches for group in batch.groups)
    with RolloutStore.open_readonly(tmp_path / "rollouts.sqlite") as store:
        assert [row["reason"] for row in store.history(prompt_id="train-0")] == ["zero variance"] * 2


def test_the_history_answers_from_the_store_alone(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RolloutStore(path) as store:
        sample_group(store, 0)
        sample_group(store, 1)
        train(store, 0, 1)
        store.drop(0, "expired")
    assert cli.main(["report", str(path.parent), "--json"]) == 0
    *rows, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == {
        "step": 0,
        "prompt_id": "p1",
        "group_id": 1,
        "sample_index": 1,
        "state": "trained",
        "reason": "",
        "staleness": 0,
        "oldest_version": 0,
        "newest_version": 0,
        "reward": 0.25,
        "weight": 0.6,
        "log_ratio": -0.5,
        "baseline": 0.125,
        "grad_norm": 1.5,
    }
    assert [(row["prompt_id"], row["step"], row["reason"]) for row in rows[2:]] == [("p0", None, "expired")] * 2
    assert last == {
        "totals": {
            "generated": 4,
            "queued": 0,
            "trained": 2,
            "dropped": 2,
            "failed": 0,
            "reasons": {"dropped: expired": 2},
        }
    }
    assert cli.main(["report", str(path.parent), "--prompt", "p1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[1].split() == ["0", "p1", "0", "trained", "0", "0", "0.6", "0.125"]
    assert "generated 4, queued 0, trained 2, dropped 2, failed 0" in lines[3]
    assert cli.main(["report", str(path.parent / "none")]) == 1
    assert "no rollout store at" in capsys.readouterr().err


def report(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> tuple[int, list[str]]:
    """Exit code and lines of ``vcpo report`` on both streams."""
    code = cli.main(["report", str(path.parent), *options])
    said = capsys.readouterr()
    return code, (said.out + said.err).splitlines()


def test_a_selection_of_nothing_is_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RolloutStore(path) as store:
        sample_group(store, 0)
        sample_group(store, 1)
    code, (line,) = report(capsys, path, "--step", "0")
    assert code == 1
    assert_names(line, "vcpo: error: no step 0", "none has been trained")
    with RolloutStore(path) as store:
        train(store, 0, 0)
        train(store, 1, 1)
    assert report(capsys, path, "--step", "2") == (1, ["vcpo: error: no step 2 (0 ... 1)"])
    named = "(prompts are named like p0)"
    assert report(capsys, path, "--prompt", "nope") == (1, [f"vcpo: error: no prompt nope {named}"])
    code, (line,) = report(capsys, path, "--prompt", "p0", "--step", "1")
    assert code == 1
    assert_names(line, "vcpo: error: no prompt p0 in step 1", named)


def test_failures_are_counted_by_error(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors = [
        "step raised ValueError: no judge",
        "step raised ValueError: no judge",
        "the server answered log-prob nan at token 3 of its answer",
        "the server answered log-prob nan at token 17 of its answer",
    ]
    with RolloutStore(path) as store:
        for group, error in enumerate(errors):
            store.admit(group, f"p {group}", group, 1, V0)
            store.fail(group, 0, f"environment my own, prompt p {group}, sample {group}/0: {error}")
        store.admit(4, "p4", 4, 1, V0)
        store.fail(4, 0, "HTTP 503")
        store.admit(5, "p5", 5, 1, V0)
        store.drop(5, "expired")
    code, lines = report(capsys, path)
    assert code == 0
    assert sorted(line.strip() for line in lines[-4:]) == [
        "1  dropped: expired",
        "1  failed: HTTP 503",
        "2  failed: step raised ValueError: no judge",
        f"2  failed: {errors[2].replace('3', '#')}",
    ]
    _, lines = report(capsys, path, "--trajectories")
    assert "environment my own, prompt p 3, sample 3/0: " in "".join(lines)


def test_the_text_of_trajectories(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = {char: 10 + number for number, char in enumerate("abc\x1b\n")}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path.with_name("tokenizer.json")))
    settings = config(model={"path": path.parent}, checkpoint={"keep_rollouts": 1})
    path.with_name("resolved.toml").write_text(dump_resolved(settings))

    def spoken(group: int, text: str, *turns: tuple[int, int]) -> Trajectory:
        mask = [any(a <= at < b for a, b in turns) for at in range(len(text))]
        return Trajectory(
            group,
            0,
            f"p{group}",
            2,
            np.array([ids[char] for char in text], np.int32),
            np.array(mask),
            np.zeros(len(text), np.float32),
            tuple(Turn(a, b, "stop", (VersionSpan(a, b, V0),)) for a, b in turns),
            1.0,
        )

    with RolloutStore(path) as store:
        for group, trajectory in enumerate([spoken(0, "abc", (2, 3)), spoken(1, "aba\nccb\x1b", (2, 5), (7, 8))]):
            store.admit(group, f"p{group}", group, 1, V0)
            store.add_trajectory(trajectory)
            store.mark_trained(group, [], [group], [0])
        store.admit(2, "p2", 2, 1, V0)
        store.fail(2, 0, "tool crashed")
        assert store.prune_samples(1) == 1
    code, lines = report(capsys, path, "--text", "--step", "1")
    assert code == 0 and lines[2:7] == [
        "    prompt:           ab",
        "    answer (stop):    a",
        "                      c",
        "    observation:      cb",
        "    answer (stop):    \\x1b",
    ]
    code, lines = report(capsys, path, "--text", "--json")
    first, second, third = map(json.loads, lines[:3])
    assert (first["text"], first["no_text"]) == (None, "its tokens are pruned: checkpoint.keep_rollouts = 1 steps")
    assert second["text"] == [
        {"of": "prompt", "text": "ab"},
        {"of": "answer", "text": "a\nc", "finish_reason": "stop"},
        {"of": "observation", "text": "cb"},
        {"of": "answer", "text": "\x1b", "finish_reason": "stop"},
    ]
    assert third["text"] is None
    assert_names(third["no_text"], "no tokens are stored", "not sampled to its end")
    path.with_name("tokenizer.json").unlink()
    code, lines = report(capsys, path, "--text")
    assert code == 1 and len(lines) == 1 and "tokenizer.json: no such file" in lines[0]


def test_a_limit_on_file_sizes_is_a_full_disk_and_loses_nothing(
    path: Path, file_size_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    """The kernel refuses the write, in the middle of a transaction; with the limit gone the same store goes on."""
    with RolloutStore(path) as store:
        sample_group(store, 0)
        kept = store.counts()
        room = path.with_name(path.name + "-wal").stat().st_size + 6000
        with (
            pytest.raises(StoreFullError, match="cannot grow .*free space on its disk"),
            file_size_limit(room),
            store.transaction(),
        ):
            for group in range(1, 50):
                sample_group(store, group)
        assert store.counts() == kept
        sample_group(store, 1)
        check_invariant(store)
    with RolloutStore(path) as store:
        assert [group.group_id for group in store.complete_groups()] == [0, 1]
