"""Tokens whose embedding is a row of zeros are named at start; rows that only fill the vocabulary up are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.messages import assert_names

from ..scenarios import make_config, make_model_folder
from ..world import run_world


def model_with_zeros(folder: Path, rows: tuple[int, ...], known: int, *, tied: bool = False) -> Path:
    """A model of 30 tokens, of which the tokenizer, if there is one, knows the first ``known``."""
    make_model_folder(folder, tied=tied, layers=2)
    weights = load_file(folder / "model.safetensors")
    for row in rows:
        weights["model.embed_tokens.weight"][row] = 0.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if known:
        words = {f"<{number}>": number for number in range(known)}
        model = {"type": "WordLevel", "vocab": words, "unk_token": "<0>"}
        (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_with_an_embedding_of_zeros_are_named(ranks: int, tmp_path: Path) -> None:
    """Rows on both tensor ranks; rows 30 and 31 fill the vocabulary up, and 29 is no token of the tokenizer."""
    folders = [
        model_with_zeros(tmp_path / "one", (11,), 30),
        model_with_zeros(tmp_path / "many", (3, 7, 20, 25, 29), 29, tied=True),
        model_with_zeros(tmp_path / "no tokenizer", (29,), 0),
        model_with_zeros(tmp_path / "unknown", (29,), 29),
        model_with_zeros(tmp_path / "none", (), 30),
    ]
    configs = [make_config(folder, ranks, parallel={"tensor": ranks}) for folder in folders]
    said = run_world(ranks, "learner.run_layouts:said_when_built", {"configs": configs})
    names = ["token 11 ('<11>')", "token 3 ('<3>'), token 7 ('<7>'), token 20 ('<20>') and 1 more", "token 29", "", ""]
    for folder, text, expected in zip(folders, said, names, strict=True):
        lines = [line for line in text.splitlines() if line.startswith("vcpo: warning: ")]
        assert len(lines) == bool(expected)
        if expected:
            assert_names(lines[0], f"vcpo: warning: {folder}", f"embedding of {expected} is a row of zeros")
