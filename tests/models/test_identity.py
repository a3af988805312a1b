"""What tells a model from another: each field of its shape, by name, and its weights; not where its folder is."""

from __future__ import annotations

import json
from pathlib import Path

from vcpo_megatron.models.identity import differences, shape_facts, weight_facts
from vcpo_megatron.models.rope import Rope
from vcpo_megatron.models.shape import ModelShape
from vcpo_megatron.models.window import Window


def shape(**changes: object) -> ModelShape:
    values = dict(
        architecture="A",
        num_layers=2,
        hidden_size=8,
        ffn_hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        vocab_size=10,
        norm_eps=1e-6,
        rope=Rope(10000.0),
        tie_word_embeddings=False,
        qkv_bias=True,
        qk_norm=False,
        max_position_embeddings=64,
    )
    return ModelShape(**{**values, **changes})  # type: ignore[arg-type]


def test_every_field_that_differs_is_named_with_both_values() -> None:
    saved = json.loads(json.dumps(shape_facts(shape())))  # as a manifest keeps it
    assert differences(saved, shape_facts(shape())) == []
    changed = shape(rope=Rope(5000.0), norm_eps=1e-5, window=Window(4, (1,)))
    assert differences(saved, shape_facts(changed)) == [
        "norm_eps 1e-06 in the checkpoint, 1e-05 now",
        "rope.theta 10000.0 in the checkpoint, 5000.0 now",
        "window.tokens None in the checkpoint, 4 now",
        "window.layers None in the checkpoint, [1] now",
    ]
    assert differences(shape_facts(changed), saved)[2:] == [
        "window.tokens 4 in the checkpoint, None now",
        "window.layers [1] in the checkpoint, None now",
    ]


def folder(path: Path, **files: bytes) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / f"{name}.safetensors").write_bytes(content)
    return path


def test_weights_are_known_by_their_bytes_wherever_they_are(tmp_path: Path) -> None:
    there = folder(tmp_path / "a", model=b"tensors")
    assert weight_facts(there) == weight_facts(folder(tmp_path / "b", model=b"tensors", unused=b"x"))
    assert weight_facts(there) != weight_facts(folder(tmp_path / "c", model=b"tensorz"))
    assert weight_facts(there) != weight_facts(folder(tmp_path / "d", model=b"tensor"))


def test_large_files_are_looked_at_all_over(tmp_path: Path) -> None:
    whole = bytes(3 << 20)
    facts = {}
    for name, at in {"whole": None, "first": 0, "middle": (3 << 20) * 7 // 15, "last": (3 << 20) - 1}.items():
        content = whole if at is None else whole[:at] + b"\1" + whole[at + 1 :]
        path = folder(tmp_path / name, one=content, two=whole)
        index = {"weight_map": {"x": "one.safetensors", "y": "two.safetensors"}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        facts[name] = weight_facts(path)
    assert len({found["one.safetensors"] for found in facts.values()}) == 4
    assert len({found["two.safetensors"] for found in facts.values()}) == 1
