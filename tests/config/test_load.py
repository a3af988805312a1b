"""Reading TOML and overrides: what comes out, and what a user is told."""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.messages import assert_names
from vcpo_megatron.config.load import dump_resolved, flatten, load_config, load_resolved, with_overrides
from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.run.errors import ConfigError

MINIMAL = '[model]\npath = "m"\n[train]\nsteps = 3\n[environment]\nname = "e"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "here" / "run.toml"
    path.parent.mkdir()
    path.write_text(MINIMAL)
    return path


def problems_of(path: Path, text: str, *overrides: str) -> list[str]:
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def test_defaults_are_filled_in(file: Path) -> None:
    config = load_config(file)
    assert config.train.steps == 3
    assert config.algorithm.is_threshold == 8.0
    assert config.optimizer.betas == (0.9, 0.999)


def test_relative_paths_are_taken_from_the_folder_of_the_file(file: Path) -> None:
    file.write_text(MINIMAL.replace('"m"', '"../m"') + 'data = "d.jsonl"\n[rollout]\nreplay = "/abs/run"\n')
    config = load_config(file)
    assert config.model.path == file.parent.parent / "m"
    assert config.environment.data == file.parent / "d.jsonl"
    assert config.rollout.replay == Path("/abs/run")


def test_relative_paths_of_overrides_are_taken_from_the_working_directory(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(file, ["model.path=other", "environment.data=./x/../d.jsonl"])
    assert config.model.path == tmp_path / "other"
    assert config.environment.data == tmp_path / "d.jsonl"


def test_a_path_that_looks_like_a_home_directory_is_expanded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert load_config(file, ["model.path=~/m"]).model.path == Path("/home/someone/m")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.steps=7", 7),
        (" train.steps = 7 ", 7),
        ("optimizer.lr=2", 2.0),
        ("optimizer.lr=1e-6", 1e-6),
        ("optimizer.betas=[0.5, 0.25]", (0.5, 0.25)),
        ("parallel.sequence_parallel=true", True),
        ("model.dtype=bfloat16", "bfloat16"),
        ('model.dtype="bfloat16"', "bfloat16"),
        ("algorithm.is_threshold=inf", math.inf),
        ("algorithm.base_ess_ratio=auto", "auto"),
        ("algorithm.base_ess_ratio=0.5", 0.5),
        ("environment.options={a = 1}", {"a": 1}),
        ("environment.name=a=b", "a=b"),
    ],
)
def test_override_values(file: Path, override: str, value: Any) -> None:
    key = override.partition("=")[0].strip()
    assert flatten(load_config(file, [override]))[key] == value


def test_overrides_reach_below_a_key_and_the_last_one_wins(file: Path) -> None:
    config = load_config(file, ["environment.options.a.b=1", "environment.options.c=x", "environment.options.a.b=2"])
    assert config.environment.options == {"a": {"b": 2}, "c": "x"}


def test_an_override_cannot_smuggle_in_another_key(file: Path) -> None:
    assert load_config(file, ["environment.name=1\nseed = 2"]).environment.name == "1\nseed = 2"


@pytest.mark.parametrize("override", ["steps=3", "train.steps", "train.=3", ".steps=3", "=3"])
def test_malformed_override(file: Path, override: str) -> None:
    (problem,) = problems_of(file, MINIMAL, override)
    assert_names(problem, f"--set {override}:", "section.key=value", "--set train.steps=100")


def test_override_below_a_value(file: Path) -> None:
    (problem,) = problems_of(file, MINIMAL, "train.steps.x=3")
    assert_names(problem, "--set train.steps.x=3:", "train.steps is a value")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[train]\nstep = 3", "train.step: unknown key; did you mean train.steps?"),
        ("[optimizer]\nclip_gradd = 3", "optimizer.clip_gradd: unknown key; did you mean optimizer.clip_grad?"),
        ("[train]\nlr = 3", "train.lr: unknown key; did you mean optimizer.lr?"),
        (
            "[parallel]\ndata = 2",
            "parallel.data: unknown key; data parallel is what tensor x pipeline x context leave of "
            "launch.learner_ranks",
        ),
        ("[rolout]\nservers = 1", "rolout: unknown section; did you mean [rollout]?"),
        (
            "[checkpoint]\nzzz = 1",
            "checkpoint.zzz: unknown key; keys of [checkpoint] are every, keep_last, "
            "keep_rollouts, resume_partial, keep_best, export_hf_every",
        ),
        ("[train]\ngroup_size = 0", "train.group_size = 0: must be greater than 0"),
        ("[staleness]\nmax_staleness = -1", "staleness.max_staleness = -1: must be at least 0"),
        ("[staleness]\nadaptive_ess = 1.0", "staleness.adaptive_ess = 1.0: must be less than 1.0"),
        ("[rollout]\nport = 65536", "rollout.port = 65536: must be at most 65535"),
        ('[train]\nseed = "1"', 'train.seed = "1": must be an integer'),
        ("[train]\nseed = 1.5", "train.seed = 1.5: must be an integer"),
        ("[train]\nseed = 18446744073709551616", "train.seed = 18446744073709551616: must be less than 2^63 in size"),
        (
            "[rollout]\nbucket_bytes = 9223372036854775808",
            "rollout.bucket_bytes = 9223372036854775808: must be less than 2^63 in size",
        ),
        (
            "[optimizer]\neps = 1e-300",
            "optimizer.eps = 1e-300: must be 0 or between 1e-38 and 1e38 in size, as float32 is",
        ),
        ("[launch]\ntimeout_s = 1e37", "launch.timeout_s = 1e+37: must be at most 1000000.0"),
        ("[rollout]\ntemperature = 1e-30", "rollout.temperature = 1e-30: must be at least 0.001"),
        ("[algorithm]\nglobal_aux_loss = 1e30", "algorithm.global_aux_loss = 1e+30: must be at most 1000000.0"),
        ("[train]\nseed = true", "train.seed = true: must be an integer"),
        ("[optimizer]\nlr = true", "optimizer.lr = true: must be a number"),
        ("[optimizer]\nlr = inf", "optimizer.lr = inf: must be a finite number"),
        ("[algorithm]\nis_threshold = nan", "algorithm.is_threshold = nan: must be greater than 0.0"),
        ("[optimizer]\nbetas = [0.9]", "optimizer.betas: must be a list of two numbers"),
        ("[optimizer]\nbetas = [0.9, 0.9, 0.9]", "optimizer.betas: must be a list of two numbers"),
        ("[algorithm]\nbase_ess_ratio = []", "algorithm.base_ess_ratio: must be a number or one of 'auto'"),
        ("[parallel]\nsequence_parallel = 1", "parallel.sequence_parallel = 1: must be true or false"),
    ],
)
def test_one_line_names_key_value_and_remedy(file: Path, text: str, problem: str) -> None:
    section, _, rest = text.partition("\n")
    complete = MINIMAL.replace(section + "\n", text + "\n") if section in MINIMAL else f"{MINIMAL}{section}\n{rest}\n"
    assert problems_of(file, complete) == [problem]


def test_every_deadline_has_an_end() -> None:
    """Timers overflow: timedelta at 1e14 s, ZeroMQ and gloo count milliseconds in integers."""
    sections = (field.annotation for field in RunConfig.model_fields.values())
    deadlines = {key: field for section in sections for key, field in section.model_fields.items() if key[-2:] == "_s"}
    assert len(deadlines) >= 9
    for key, field in deadlines.items():
        assert [item.le for item in field.metadata if hasattr(item, "le")] == [1e6], key


def test_a_misspelt_choice_names_the_nearest(file: Path) -> None:
    (problem,) = problems_of(file, MINIMAL + '[algorithm]\nbaseline = "opop"\n')
    assert problem.startswith('algorithm.baseline = "opop": must be one of ')
    assert problem.endswith('did you mean "opob"?')


def test_a_wrong_override_is_shown_as_it_was_typed(file: Path) -> None:
    (problem,) = problems_of(file, MINIMAL, "train.seed=abc")
    assert_names(problem, 'train.seed = "abc"', "--set train.seed=abc", "an integer")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.steps=" + "9" * 5000, "train.steps = "),
        ("train.steps=" + "[" * 3000, "train.steps = "),
        ("train.steps=" + "[" * 3000 + "]" * 3000, "train.steps = "),
        (
            "train.steps=" + "[" * 300 + "]" * 300,
            "train.steps: must have at most 100 tables and lists within each other",
        ),
        (f"environment.options.x={'{a=' * 300}1{'}' * 300}", "environment.options: must have at most 100 tables"),
        ("environment.options" + ".a" * 3000 + "=1", "environment.options: must have at most 100 tables"),
        ("train.start_from=\udcff", r'\udcff": must be text in UTF-8; write it so'),
        ("environment.options.x=[1, {y='\udcff'}]", "environment.options: must be text in UTF-8"),
        ("environment.options.\udcff=1", "environment.options: must be text in UTF-8"),
        ("train.\udcff=1", "train.\udcff: must be text in UTF-8"),
        ("\udcff.steps=1", "\udcff.steps: must be text in UTF-8"),
    ],
)
def test_a_value_that_nothing_can_write_down_is_one_line(file: Path, override: str, says: str) -> None:
    (problem,) = problems_of(file, MINIMAL, override)
    assert says in problem and len(problem.splitlines()) == 1 and len(problem) < 800


def test_values_as_deep_as_anybody_writes_them_are_read(file: Path) -> None:
    config = load_config(file, [f"environment.options.x={'[' * 90}'ü'{']' * 90}"])
    assert load_config(file, [f"environment.options={dump_resolved(config).split('options = ')[1].splitlines()[0]}"])


def test_missing_sections_and_keys(file: Path) -> None:
    problems = problems_of(file, "[train]\n")
    assert problems == [
        "model: missing; add the section [model]",
        "train.steps: missing; add `steps = ...` to [train]",
        "environment: missing; add the section [environment]",
    ]


def test_all_problems_are_reported_together(file: Path) -> None:
    problems = problems_of(file, MINIMAL + "[optimizer]\nlr = -1\nx = 1\n[nope]\n", "foo", "train.steps=0")
    assert len(problems) == 5


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[model\n", "not valid TOML"),
        (b"\xff", "cannot be read"),
        (b"x = " + b"9" * 5000, "not valid TOML"),
        (b"x = " + b"[" * 5000, "not valid TOML"),
    ],
)
def test_a_file_that_is_no_toml(file: Path, content: bytes, expected: str) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=expected) as caught:
        load_config(file)
    assert caught.value.problems[0].startswith(f"{file}: ")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


# --- round trip -------------------------------------------------------------------------------


def round_trip(config: RunConfig, folder: Path) -> RunConfig:
    path = folder / "resolved.toml"
    path.write_text(dump_resolved(config), encoding="utf-8")
    return load_resolved(path)


def test_resolved_text_of_a_section(file: Path) -> None:
    config = load_config(file, ["optimizer.lr=1e-6", "environment.fields={question = 'the \"q\"'}"])
    text = dump_resolved(config)
    assert (
        "[optimizer]\nlr = 1e-06\nmin_lr = 0.0\nweight_decay = 0.1\nbetas = [0.9, 0.999]\neps = 1e-08\n"
        'distributed = false\noverlap_grad_reduce = false\nclip_grad = 1.0\nschedule = "constant"\n'
    ) in text
    assert 'fields = { question = "the \\"q\\"" }' in text
    assert "opob_accumulators" not in text  # None


def test_round_trip_of_every_kind_of_value(file: Path) -> None:
    config = load_config(
        file,
        [
            "environment.options={when = 1979-05-27, at = 1979-05-27T07:32:00Z, 'odd key' = {}}",
            "environment.options.é=[[1, 2.5], [true]]",
            "algorithm.is_threshold=inf",
            "algorithm.opob_accumulators=2",
            "optimizer.lr=0.1",
            "rollout.replay=/a b/'c",
        ],
    )
    assert config.environment.options["when"] == datetime.date(1979, 5, 27)
    assert round_trip(config, file.parent) == config


toml_values = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    options=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), toml_values, max_size=3),
    lr=st.floats(min_value=1e-37, max_value=1e37),
)
def test_round_trip_is_exact(tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any], lr: float) -> None:
    config = RunConfig.model_validate(
        {
            "model": {"path": "/m"},
            "train": {"steps": 1},
            "environment": {"name": "e", "options": options},
            "optimizer": {"lr": lr},
        }
    )
    assert round_trip(config, tmp_path_factory.mktemp("resolved")) == config


def test_the_largest_seed_and_no_truncation_are_taken(file: Path) -> None:
    config = load_config(file, ["train.seed=9223372036854775807", "algorithm.is_threshold=inf"])
    assert config.train.seed == 2**63 - 1 and config.algorithm.is_threshold == float("inf")


def test_overrides_on_a_loaded_config(file: Path) -> None:
    config = load_config(file, ["environment.options.when=1979-05-27"])
    assert with_overrides(config, []) == config
    changed = with_overrides(config, ["train.steps=9"])
    different = {key for key, value in flatten(changed).items() if flatten(config)[key] != value}
    assert different == {"train.steps"} and changed.train.steps == 9


def test_a_byte_order_mark_at_the_start_of_the_file_is_no_text(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert load_config(file).train.steps == 3


def test_a_broken_copy_of_a_run_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "resolved.toml").write_text("[model\n")
    with pytest.raises(ConfigError, match="undo the change.* the run was started with"):
        load_resolved(tmp_path / "resolved.toml")
