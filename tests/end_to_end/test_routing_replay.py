"""A run of a mixture of experts whose routing is replayed, with either engine: what servers recorded reaches the
learner, and is deleted once it was trained on."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from .running import EXAMPLE, Run, read_rows

VOCABULARY, EOS = 12, 11


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE with the example's tokenizer."""
    folder = tmp_path_factory.mktemp("moe") / "model"
    shutil.copytree(EXAMPLE.parent / "model", folder, ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        max_position_embeddings=64,
        eos_token_id=EOS,
        bos_token_id=None,
        initializer_range=0.1,
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


def engine_settings(engine: str) -> tuple[str, ...]:
    if engine == "embedded":
        return ()
    python = os.environ.get("VCPO_ROLLOUT_PYTHON")
    if not python:
        pytest.skip("VCPO_ROLLOUT_PYTHON names no rollout environment (tools/make_rollout_env.sh --cpu makes one)")
    return ("rollout.engine=sglang", f"rollout.python={python}", "rollout.start_timeout_s=400")


def kept(run_dir: Path, copy: Path) -> int:
    """Samples whose experts lie in the store, which a run keeps to itself: a copy is looked at. One that was taken in
    the middle of a write tells nothing."""
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    try:
        for file in run_dir.glob("rollouts.sqlite*"):
            shutil.copyfile(file, copy / file.name)
        with closing(sqlite3.connect(copy / "rollouts.sqlite")) as connection:
            return int(connection.execute("SELECT count(*) FROM routing").fetchone()[0])
    except (OSError, sqlite3.DatabaseError):
        return 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def test_a_run_replays_the_experts_of_its_servers_and_forgets_them(engine: str, model: Path, tmp_path: Path) -> None:
    settings = (
        f"model.path={model}",
        "train.steps=8",
        "train.eval_every=0",
        "checkpoint.every=4",
        "checkpoint.keep_last=1",
        "parallel.tensor=1",
        "parallel.expert=2",
        "rollout.routing_replay=true",
        "rollout.verify_sync=true",
        "staleness.max_staleness=2",
        "train.groups_per_step=4",
        *engine_settings(engine),
    )
    with Run(tmp_path / "run", *settings) as run:
        run.wait_for(lambda: kept(run.run_dir, tmp_path / "copy") > 0, 500, "record of experts")
        assert run.wait(300) == 0, run.text()
    rows = read_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(8)) and rows[-1]["rollouts/trained"] == 8 * 4 * 8
    assert max(row["staleness/max"] for row in rows) >= 1
    # Later tokens of the learner's own version may follow a prefix of an older one, whose record is replayed although
    # the server computed it once more, with newer weights.
    assert rows[0]["staleness/max"] == 0 and rows[0]["mismatch/tokens"] > 0 and rows[0]["mismatch/max"] < 1e-4
    with closing(sqlite3.connect(tmp_path / "run" / "rollouts.sqlite")) as connection:
        assert connection.execute("SELECT count(*) FROM routing").fetchone() == (0,)
