"""The staleness bound, fixed and adaptive: literal answers, and simulated asynchronous runs in virtual time."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.orchestrator.fake_run import FakeRun, config
from vcpo_megatron.orchestrator.modes.staleness import Candidate, Decision, Pacer, StalenessBound

pytestmark = pytest.mark.timeout(120)

# --- literal answers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "active", "loaded", "admitted"),
    [
        (0, 3, 0, True),  # G = 4: the fourth group of the first batch
        (0, 4, 0, False),
        (0, 4, 1, True),
        (2, 11, 0, True),  # (0 + 2 + 1) * 4 = 12
        (2, 12, 0, False),
        (2, 12, 1, True),
        (2, 40, 7, False),  # a server that lags behind at 7 may not start what would be used at step 10
        (2, 39, 7, True),
    ],
)
def test_admission(k: int, active: int, loaded: int, admitted: bool) -> None:
    assert StalenessBound(k, 4).may_admit(active, loaded) is admitted


def test_age_at_use() -> None:
    bound = StalenessBound(2, 4)
    assert [bound.expired(5, version) for version in (5, 6, 7, 8)] == [False, False, False, True]
    assert [StalenessBound(0, 4).expired(5, version) for version in (5, 6)] == [False, True]


def test_first_steps_without_lag() -> None:
    bound = StalenessBound(3, 2, on_policy_steps=2)
    assert [bound.deadline(version) for version in range(4)] == [0, 1, 5, 6]
    assert [bound.may_admit(active, 0) for active in (1, 2)] == [True, False]
    assert [bound.may_admit(active, 1) for active in (3, 4)] == [True, False]
    assert [bound.may_admit(active, 2) for active in (11, 12)] == [True, False]


@pytest.mark.parametrize(
    ("k", "size", "first", "updates"), [(-1, 1, 0, 1), (0, 0, 0, 1), (0, 1, -1, 1), (0, 1, 0, 0), (2, 1, 0, 4)]
)
def test_senseless_bounds_are_refused(k: int, size: int, first: int, updates: int) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        StalenessBound(k, size, first, updates_per_batch=updates)


def _groups(text: str) -> list[Candidate]:
    """ "3! 3 4" : group 0 complete at version 3, group 1 unfinished at 3, group 2 unfinished at 4."""
    return [Candidate(i, int(word.rstrip("!")), word.endswith("!")) for i, word in enumerate(text.split())]


@pytest.mark.parametrize(
    ("k", "size", "version", "groups", "decision"),
    [
        # Too few are complete: everything unfinished is waited for.
        (1, 2, 4, "4! 4 4", ((), (1, 2))),
        (1, 2, 4, "4!", ((), ())),
        # The oldest complete ones, by version, then by group id.
        (1, 2, 4, "4! 3! 3! 4!", ((1, 2), ())),
        (1, 2, 4, "4! 4! 3!", ((2, 0), ())),
        # j = -1: group 0 is due at step 4 and cannot be left over.
        (1, 2, 4, "3 4! 4! 4!", ((), (0,))),
        # j = 0: three unfinished groups are due by step 5, which has room for two.
        (1, 2, 4, "4 4 4 5! 5!", ((), (0, 1, 2))),
        (1, 2, 4, "4 4 5! 5!", ((2, 3), ())),
        # j = 1 with k = 2: five due by step 6, room for four.
        (2, 2, 4, "4 4 4 4 4 5! 5!", ((), (0, 1, 2, 3, 4))),
        (2, 2, 4, "4 4 4 4 5! 5!", ((4, 5), ())),
        # Waiting cannot help: too many complete ones are due. The oldest are taken.
        (0, 1, 4, "4! 4! 4!", ((0,), ())),
        # Nor does waiting for group 2 help, since all that is taken is due as soon as it.
        (0, 2, 4, "4! 4! 4", ((0, 1), ())),
    ],
)
def test_choice(
    k: int, size: int, version: int, groups: str, decision: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    answer = StalenessBound(k, size).choose(_groups(groups), version)
    assert (answer.take, answer.waits_for) == decision
    assert bool(answer.why) is not bool(answer.take)


@pytest.mark.parametrize(
    ("k", "version", "groups", "decision"),
    [
        # G = 2 groups a step, U = 3 steps a batch: steps 6, 7, 8. From step 6 on six groups, the oldest first.
        (2, 6, "6! 6! 6! 6! 6!", ((), ())),
        (3, 6, "6! 5! 6! 6! 6! 6! 6", ((1, 0, 2, 3, 4, 5), ())),
        # Whoever is left over can be trained at step 9 at the earliest: one of version 6 with k = 2 cannot.
        (2, 6, "6! 6! 6! 6! 6! 6 6!", ((0, 1, 2, 3, 4, 6), ())),  # nobody taken has more time: waiting cannot help
        (4, 6, "4 6! 6! 6! 6! 6! 6!", ((), (0,))),  # due at step 8
        (4, 6, "5 5 6! 6! 6! 6! 6! 6!", ((2, 3, 4, 5, 6, 7), ())),  # due at step 9, which has room for two
        (4, 6, "5 5 5 6! 6! 6! 6! 6! 6!", ((), (0, 1, 2))),
        # After a resume between two updates: what is left of the batch, steps 7 and 8, or 8 alone.
        (4, 7, "6! 6! 6! 6! 6!", ((0, 1, 2, 3), ())),
        (4, 8, "6! 6! 6! 6! 6!", ((0, 1), ())),
    ],
)
def test_choice_of_a_batch_of_several_updates(
    k: int, version: int, groups: str, decision: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    answer = StalenessBound(k, 2, updates_per_batch=3).choose(_groups(groups), version)
    assert (answer.take, answer.waits_for) == decision


def test_admission_counts_the_lag_of_later_updates() -> None:
    """G = 2, U = 3, k = 2: a server of version 6 samples the six groups of steps 6, 7 and 8 and no other."""
    bound = StalenessBound(2, 2, updates_per_batch=3)
    assert [bound.may_admit(active, 6) for active in (12, 17, 18)] == [True, True, False]


def _by_every_step(bound: StalenessBound, groups: Sequence[Candidate], version: int) -> tuple[tuple[int, ...], ...]:
    """(take, waits for) by the rule as the module states it: one look at every j from -1 to k."""
    updates = bound.updates_per_batch - version % bound.updates_per_batch
    size, end = updates * bound.groups_per_step, version + updates - 1
    ordered = sorted(groups, key=lambda group: (bound.deadline(group.version), group.version, group.group_id))
    batch = [group for group in ordered if group.complete][:size]
    if len(batch) < size:
        return (), tuple(group.group_id for group in ordered if not group.complete)
    left = [group for group in ordered if group not in batch]
    for j in range(-1, bound.max_staleness + 1):
        late = [group for group in left if bound.deadline(group.version) <= end + 1 + j]
        if len(late) > (j + 1) * bound.groups_per_step and bound.deadline(batch[-1].version) > end + 1 + j:
            return (), tuple(group.group_id for group in late)
    return tuple(group.group_id for group in batch), ()


def test_choices_are_those_of_a_look_at_every_step() -> None:
    rng = random.Random(5)
    kinds = {"too few": 0, "held back": 0, "taken": 0}
    for _ in range(4000):
        updates = rng.choice((1, 1, 1, 2, 3))
        bound = StalenessBound(rng.randrange(updates - 1, 6), rng.randrange(1, 4), rng.choice((0, 0, 3)), updates)
        version = rng.randrange(9)
        oldest = max(0, version - bound.max_staleness - 1)  # one too old, as after a change of k
        done = rng.random()
        groups = [Candidate(i, rng.randint(oldest, version + 1), rng.random() < done) for i in range(rng.randrange(20))]
        decision = bound.choose(groups, version)
        assert (decision.take, decision.waits_for) == _by_every_step(bound, groups, version)
        few = sum(group.complete for group in groups) < (updates - version % updates) * bound.groups_per_step
        kinds["too few" if few else "taken" if decision.take else "held back"] += 1
    assert min(kinds.values()) > 100


@pytest.mark.parametrize("k", [10**9, 10**17, 2**63 - 1])
def test_a_bound_that_no_run_reaches_costs_no_time(tmp_path: Path, k: int) -> None:
    assert StalenessBound(k, 2).choose(_groups("4 4 4! 5! 5"), 4).take == (2, 3)
    run = FakeRun(tmp_path, config(staleness={"max_staleness": k}, train={"steps": 2}))
    assert run.run() == "run ended"


# --- a run in virtual time ---------------------------------------------------------------------


@dataclass
class _Group:
    version: int
    duration: float
    server: int
    complete: bool = False


@dataclass
class _Run:
    """Servers with slots, a learner, delays of weight updates, failures, crashes with a resume."""

    bound: StalenessBound
    rng: random.Random
    servers: int
    slots: int
    tail: float
    fail: float = 0.0
    crash: float = 0.0
    version: int = 0
    now: float = 0.0
    next_id: int = 0
    attempt: int = 0
    in_training: dict[int, _Group] = field(default_factory=dict)
    live: dict[int, _Group] = field(default_factory=dict)
    trained: list[tuple[int, int, _Group]] = field(default_factory=list)
    generated: dict[int, float] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    expired: list[int] = field(default_factory=list)
    chosen: tuple[int, ...] = ()  # of the steps that are left of the batch
    events: list[tuple[float, int, str, tuple[int, ...]]] = field(default_factory=list)
    sequence: int = 0

    def __post_init__(self) -> None:
        self.loaded = [0] * self.servers

    def at(self, delay: float, kind: str, *what: int) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (self.now + delay, self.sequence, kind, (self.attempt, *what)))

    def active(self) -> int:
        return self.version * self.bound.groups_per_step + len(self.in_training) + len(self.live)

    def admit(self) -> None:
        used = [0] * self.servers
        for group in self.live.values():
            used[group.server] += not group.complete
        for server in sorted(range(self.servers), key=used.__getitem__):
            while used[server] < self.slots and self.bound.may_admit(self.active(), self.loaded[server]):
                group = _Group(self.loaded[server], self.rng.lognormvariate(0.0, self.tail), server)
                self.live[self.next_id] = group
                self.generated[self.next_id] = group.duration
                self.at(group.duration, "fail" if self.rng.random() < self.fail else "finish", self.next_id)
                self.next_id += 1
                used[server] += 1

    def train(self) -> None:
        if self.in_training:
            return
        for group_id in [i for i, g in self.live.items() if self.bound.expired(g.version, self.version)]:
            self.expired.append(group_id)
            del self.live[group_id]
        candidates = [Candidate(i, g.version, g.complete) for i, g in self.live.items()]
        self.rng.shuffle(candidates)
        decision = Decision(self.chosen) if self.chosen else self.bound.choose(candidates, self.version)
        if not decision.take:
            unfinished = {i for i, g in self.live.items() if not g.complete}
            assert set(decision.waits_for) <= unfinished
            return
        updates, size = self.bound.updates_per_batch, self.bound.groups_per_step
        assert len(decision.take) == (updates - self.version % updates) * size
        self.in_training = {group_id: self.live.pop(group_id) for group_id in decision.take[:size]}
        self.chosen = decision.take[size:]
        for group_id, group in self.in_training.items():
            assert group.complete
            assert 0 <= self.version - group.version <= self.bound.max_staleness
            self.trained.append((self.version, group_id, group))
        self.at(self.rng.expovariate(1.0 / self.step_time), "step")

    def resume(self) -> None:
        """The learner dies in its step: the batch goes back to the buffer, unfinished groups are lost."""
        self.attempt += 1
        self.trained = [row for row in self.trained if row[0] < self.version]
        self.live.update(self.in_training)
        self.in_training, self.chosen = {}, ()
        self.lost |= {i for i, g in self.live.items() if not g.complete}
        self.live = {i: g for i, g in self.live.items() if g.complete}
        self.loaded = [self.version] * self.servers

    def handle(self, kind: str, what: Sequence[int]) -> None:
        if kind == "step":
            self.in_training = {}
            self.version += 1
            for server in range(self.servers if self.version % self.bound.updates_per_batch == 0 else 0):
                self.at(self.rng.expovariate(4.0), "load", server, self.version)
        elif kind == "load":
            self.loaded[what[0]] = max(self.loaded[what[0]], what[1])
        elif what[0] in self.live and kind == "finish":
            self.live[what[0]].complete = True
        elif what[0] in self.live:
            self.lost.add(what[0])
            del self.live[what[0]]

    def until(self, steps: int) -> None:
        self.step_time = self.rng.choice([0.05, 0.5, 3.0])
        most = 400 * steps * (self.bound.groups_per_step + self.servers)
        for _ in range(most):
            if self.version >= steps:
                return
            self.train()
            self.admit()
            lag = self.bound.deadline(self.version) - self.version
            free = (lag + 1) * self.bound.groups_per_step - len(self.live) - len(self.in_training)
            places = sum(self.bound.may_admit(self.active() + extra, self.version) for extra in range(free + 3))
            assert places == free, "capacity is lost or gained"
            assert self.events, f"deadlock at step {self.version}"
            self.now, _, kind, (attempt, *what) = heapq.heappop(self.events)
            if attempt == self.attempt:
                self.handle(kind, what)
            if self.rng.random() < self.crash:
                self.resume()
        raise AssertionError(f"only {self.version} of {steps} steps in {most} events")


def _run(
    seed: int, k: int, *, crash: float = 0.0, bound: StalenessBound | None = None, steps: int = 60, updates: int = 1
) -> _Run:
    rng = random.Random(seed)
    size = rng.choice([1, 2, 5, 8])
    run = _Run(
        bound or StalenessBound(k, size, updates_per_batch=updates),
        rng,
        servers=rng.choice([1, 2, 4]),
        slots=rng.choice([1, size, 4 * size]),
        tail=rng.choice([0.2, 1.0, 2.0]),
        fail=rng.choice([0.0, 0.1]),
        crash=crash,
    )
    run.until(steps)
    return run


@pytest.mark.parametrize(
    ("k", "updates"), [(0, 1), (1, 1), (2, 1), (4, 1), (16, 1), (1, 2), (3, 4), (4, 2), (5, 4), (16, 8)]
)
@pytest.mark.parametrize("crash", [0.0, 0.003])
def test_simulated_runs_keep_the_bound_and_waste_nothing(k: int, updates: int, crash: float) -> None:
    for seed in range(25 if updates == 1 else 12):
        run = _run(seed, k, crash=crash, updates=updates, steps=60 if updates == 1 else 64)
        assert run.expired == []
        # Whatever was started was trained, unless it failed, or is still there at the end: no length is preferred.
        trained = [group_id for _, group_id, _ in run.trained]
        assert len(set(trained)) == len(trained)
        assert set(trained) | run.lost | set(run.live) | set(run.in_training) == set(run.generated)
        assert len(run.live) <= (run.bound.max_staleness + 1) * run.bound.groups_per_step
        if k == 0:
            assert all(step == group.version for step, _, group in run.trained)


def test_updates_of_a_batch_have_answers_of_one_length() -> None:
    """A batch is chosen whole, in the order of admission: its first update has not the short answers, its last one not
    the long ones. With k = U - 1, where every batch is sampled by one version, the j-th update is j versions old."""
    run = _Run(StalenessBound(3, 4, updates_per_batch=4), random.Random(1), servers=2, slots=32, tail=1.5)
    run.until(400)
    assert all(step - group.version == step % 4 for step, _, group in run.trained)
    ids = [group_id for _, group_id, _ in run.trained]
    assert ids == sorted(ids)


def test_trained_lengths_have_the_distribution_of_the_generated_ones() -> None:
    run = _Run(StalenessBound(4, 8), random.Random(1), servers=2, slots=32, tail=1.5)
    run.until(400)
    trained = sorted(group.duration for _, _, group in run.trained)
    generated = sorted(run.generated.values())
    for quantile in (0.1, 0.5, 0.9, 0.99):
        a, b = trained[int(quantile * len(trained))], generated[int(quantile * len(generated))]
        assert a == pytest.approx(b, rel=0.1)


def test_the_lag_is_used() -> None:
    """With slow servers and k = 4 the learner trains on old groups; a bound that is never reached is no test."""
    run = _Run(StalenessBound(4, 4), random.Random(3), servers=2, slots=20, tail=1.0)
    run.until(100)
    assert max(step - group.version for step, _, group in run.trained) == 4


def test_first_steps_without_lag_in_a_run() -> None:
    run = _run(5, 4, bound=StalenessBound(4, 4, on_policy_steps=5))
    assert run.expired == []
    assert all(step == group.version for step, _, group in run.trained if step < 5)
    assert any(step > group.version for step, _, group in run.trained)


class _Greedy(StalenessBound):
    """The bound without the rule of dequeueing: takes what is complete."""

    def choose(self, groups: Sequence[Candidate], version: int) -> Decision:
        return super().choose([group for group in groups if group.complete], version)


def test_without_the_rule_of_dequeueing_groups_expire() -> None:
    """The simulation can tell a good rule from a bad one, and the bad one prefers the short."""
    run = _Run(_Greedy(2, 4), random.Random(2), servers=2, slots=12, tail=2.0)
    run.until(150)
    assert len(run.expired) > 50
    trained = [group.duration for _, _, group in run.trained]
    assert sum(trained) / len(trained) < 0.7 * sum(run.generated.values()) / len(run.generated)


# --- adaptive staleness ------------------------------------------------------------------------


def lags(pacer: Pacer, ratios: list[float]) -> list[int]:
    """Of steps on stale batches."""
    found = []
    for ratio in ratios:
        pacer.observe(ratio, on_policy=None)
        found.append(pacer.lag)
    return found


def test_it_halves_at_once_and_then_waits_for_the_effect() -> None:
    # 8 -> 4, then 9 steps until groups admitted under 8 are trained; 4 -> 2, then 5; 2 -> 1, then 3; 1 -> 0
    assert lags(Pacer(8, 0.5), [0.1] * 19) == [4] * 9 + [2] * 5 + [1] * 3 + [0, 0]


def test_it_grows_by_one_after_a_recovery() -> None:
    pacer = Pacer(4, 0.5)
    pacer.restore({"lag": 0, "on_policy": 1.0, "average": 0.9, "until_change": 0})
    assert lags(pacer, [0.9] * 16) == [1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4]


@pytest.mark.parametrize(("ratio", "lag"), [(0.5, 2), (0.54, 2), (0.56, 3), (0.49, 1)])
def test_it_rests_between_target_and_margin(ratio: float, lag: int) -> None:
    pacer = Pacer(4, 0.5)
    pacer.restore({"lag": 2, "on_policy": None, "average": ratio, "until_change": 0})
    pacer.observe(ratio, on_policy=None)
    assert pacer.lag == lag


def test_a_target_near_one_can_still_be_reached() -> None:
    """No ratio is above 1, whatever the margin over the target is."""
    pacer = Pacer(4, 0.95)
    pacer.restore({"lag": 2, "on_policy": None, "average": 1.0, "until_change": 0})
    pacer.observe(1.0, on_policy=None)
    assert pacer.lag == 3


def test_a_ratio_above_the_on_policy_one_is_not_saved_up() -> None:
    pacer = Pacer(4, 0.5)
    pacer.observe(0.25, on_policy=0.25)
    pacer.observe(1.0, on_policy=None)
    assert pacer.state()["average"] == 1.0


def test_what_is_not_finite_counts_as_none_and_the_state_comes_back() -> None:
    pacer = Pacer(6, 0.9)
    pacer.observe(math.nan, on_policy=1.0)
    assert pacer.lag == 3
    other = Pacer(6, 0.9)
    other.restore(pacer.state())
    assert lags(other, [1.0] * 60) == lags(pacer, [1.0] * 60) and other.lag == 6
    smaller = Pacer(2, 0.9)
    smaller.restore({"lag": 5, "on_policy": 0.9, "average": 1.0, "until_change": 0})
    assert smaller.lag == 2
    for target in (1.5, 1.0, 0.0, -0.5):
        with pytest.raises(ValueError, match=f"target = {target}"):
            Pacer(2, target)
    with pytest.raises(ValueError, match="max_lag = -1"):
        Pacer(-1, 0.5)


@pytest.mark.parametrize(("mismatch", "target"), [(0.9, 0.9), (0.9, 0.95), (0.4, 0.5), (0.05, 0.6)])
def test_a_constant_mismatch_of_engine_and_learner_costs_no_lag(mismatch: float, target: float) -> None:
    """The on-policy ratio is ``mismatch``, and staleness adds nothing to it."""
    pacer = Pacer(8, target)
    pacer.observe(mismatch, on_policy=mismatch)  # a run's first batch
    assert lags(pacer, [mismatch] * 40) == [8] * 40
    # staleness that takes more than the target allows is met as before, and the lag comes back
    assert lags(pacer, [mismatch * target * 0.8] * 60)[-1] == 0
    for _ in range(80):
        pacer.observe(mismatch, on_policy=mismatch if pacer.lag == 0 else None)
    assert pacer.lag == 8


def test_what_is_on_policy_is_followed() -> None:
    """Answers grow, and the mismatch with them: that is no reason for a smaller lag, where the learner says so."""
    pacer = Pacer(4, 0.8)
    for ratio in (1.0, 0.6, 0.1):
        for _ in range(20):
            pacer.observe(ratio, on_policy=ratio)
            assert pacer.lag == 4


def test_what_is_on_policy_is_known_anew_where_the_lag_is_0() -> None:
    """The same, but no token of a lag is young enough to say so: it falls for it once, and comes back."""
    pacer = Pacer(4, 0.8)
    pacer.observe(1.0, on_policy=1.0)
    found = lags(pacer, [0.6] * 20)
    assert found[-1] == 0
    for _ in range(40):
        pacer.observe(0.6, on_policy=0.6 if pacer.lag == 0 else None)
    assert pacer.lag == 4 and lags(pacer, [0.6] * 40) == [4] * 40


@pytest.mark.parametrize("target", [0.5, 0.9, 0.97])
def test_an_on_policy_run_is_never_kept_at_0_by_its_noise(target: float) -> None:
    rng = random.Random(5)
    pacer = Pacer(1, target)
    pacer.restore({"lag": 0, "on_policy": 0.8, "average": 0.3, "until_change": 0})
    for _ in range(60):
        pacer.observe(0.8 * rng.uniform(0.97, 1.03), on_policy=0.8)
    assert pacer.lag == 1


class _PacedRun(_Run):
    """The simulated run, admission paced by ratios that fall with the lag of what is trained."""

    pacer: Pacer
    gain: float = 0.3
    mismatch: float = 1.0

    def admit(self) -> None:
        promised = self.bound
        self.bound = replace(promised, max_staleness=self.pacer.lag)
        try:
            super().admit()
        finally:
            self.bound = promised

    def handle(self, kind: str, what: object) -> None:
        if kind == "step":
            lag = max(self.version - group.version for group in self.in_training.values())
            ratio = self.mismatch * math.exp(-self.gain * lag) * self.rng.uniform(0.9, 1.0)
            self.pacer.observe(ratio, on_policy=0.95 * self.mismatch if lag == 0 else None)
        super().handle(kind, what)  # type: ignore[arg-type]


@pytest.mark.parametrize(("k", "updates"), [(0, 1), (1, 1), (4, 1), (16, 1), (4, 4), (9, 2)])
@pytest.mark.parametrize("crash", [0.0, 0.003])
def test_paced_runs_keep_the_bound_waste_nothing_and_never_stop(k: int, updates: int, crash: float) -> None:
    for seed in range(15 if updates == 1 else 6):
        rng = random.Random(seed)
        run = _PacedRun(
            StalenessBound(k, rng.choice([1, 3, 8]), updates_per_batch=updates),
            rng,
            servers=rng.choice([1, 3]),
            slots=24,
            tail=rng.choice([0.2, 1.5]),
            fail=rng.choice([0.0, 0.1]),
            crash=crash,
        )
        run.pacer = Pacer(k, 0.5, updates - 1)
        run.gain = rng.choice([0.02, 0.3, 3.0])
        run.until(60)
        assert run.expired == []  # pacing throws nothing away
        trained = [group_id for _, group_id, _ in run.trained]
        assert len(set(trained)) == len(trained)
        assert set(trained) | run.lost | set(run.live) | set(run.in_training) == set(run.generated)
        assert updates - 1 <= run.pacer.lag <= k


@pytest.mark.parametrize("mismatch", [1.0, 0.6])
def test_the_lag_settles_where_the_ratio_is_kept(mismatch: float) -> None:
    """A ratio of exp(-0.1 lag) times the on-policy one is half of it at a lag of 7: far from both 0 and 16."""
    run = _PacedRun(StalenessBound(16, 4), random.Random(0), servers=2, slots=64, tail=0.5)
    run.pacer, run.gain, run.mismatch = Pacer(16, 0.5), 0.1, mismatch
    run.until(600)
    late = [step - group.version for step, _, group in run.trained if step > 200]
    assert 3 <= sum(late) / len(late) <= 8


def test_a_run_with_adaptive_staleness_logs_the_lag_and_keeps_it_over_a_resume(tmp_path: object) -> None:
    cfg = config(
        staleness={"max_staleness": 4, "adaptive": True, "adaptive_ess": 0.6},
        train={"steps": 8},
        checkpoint={"every": 4},
    )
    run = FakeRun(tmp_path, cfg)  # type: ignore[arg-type]
    run.learner.ess_ratio = 0.02
    run.learner.first_ess_ratio = 0.2  # of the first batch, which is on-policy
    run.learner.on_policy_ratio = 0.2
    assert run.run() == "run ended"
    assert [row["staleness/admitted"] for row in run.rows()] == [4] + [2] * 5 + [1] * 2
    kept = run.context.directory.manifest(8).orchestrator["pacer"]
    assert kept["lag"] == 1 and kept["on_policy"] == 0.2
    again = FakeRun(
        tmp_path,
        cfg.model_copy(update={"train": config(train={"steps": 10}).train}),
        attempt=2,  # type: ignore[arg-type]
        resume_step=8,
    )
    again.learner.ess_ratio = 0.2  # all that the mismatch, which the checkpoint knows, leaves
    again.run()
    assert [row["staleness/admitted"] for row in again.rows()][8:] == [1, 2]
