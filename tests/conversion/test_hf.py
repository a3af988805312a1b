"""Damaged model folders: one clear line, before anything is built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vcpo_megatron.conversion.errors import ConversionError, listed
from vcpo_megatron.conversion.hf import HFFolder, natural

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two files: a, b in the first, c in the second."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"c": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    return tmp_path


def write_index(path: Path, weight_map: dict[str, str]) -> None:
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def refused(path: Path, message: str) -> None:
    with pytest.raises(ConversionError, match=message) as caught:
        HFFolder(path)
    assert "\n" not in str(caught.value)


def test_reads_single_tensors(folder):
    with HFFolder(folder) as model:
        assert model.names() == ["a", "b", "c"]
        assert model.config == {"model_type": "qwen2"}
        assert model.shape("a") == (2, 3) and "c" in model and "d" not in model
        assert model.tensor("a").tolist() == [[0, 1, 2], [3, 4, 5]]
        assert model.tensor("c").dtype == torch.bfloat16
        with pytest.raises(ConversionError, match="has no tensor d"):
            model.tensor("d")


def test_one_file_needs_no_index(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert HFFolder(tmp_path).names() == ["a"]


def test_missing_folder_config_and_weights(tmp_path):
    refused(tmp_path / "nowhere", "nowhere does not exist")
    refused(tmp_path, r"config\.json does not exist")
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "cannot be read as JSON")
    (tmp_path / "config.json").write_text("[]")
    refused(tmp_path, "holds no JSON object, but list")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path, "safetensors files only")


def test_missing_file_of_the_index(folder):
    (folder / "two.safetensors").unlink()
    refused(folder, r"misses 1 of 2 weight files .*: two\.safetensors")


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_truncated_file(folder, keep):
    data = (folder / "one.safetensors").read_bytes()
    (folder / "one.safetensors").write_bytes(data[:keep])
    refused(folder, r"damaged or truncated weight files one\.safetensors")


def test_lfs_pointer_in_place_of_the_weights(folder):
    (folder / "two.safetensors").write_text("version https://git-lfs.example/spec/v1\noid sha256:00\nsize 123\n")
    refused(folder, r"two\.safetensors .*Git LFS pointers")


def test_index_and_files_disagree(folder):
    write_index(
        folder, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors", "d": "two.safetensors"}
    )
    refused(folder, "not in the file that .* names: d")
    write_index(folder, {"a": "one.safetensors", "c": "two.safetensors"})
    refused(folder, "not named in .*: b")
    write_index(folder, {})
    refused(folder, "no weight_map")


@pytest.mark.parametrize("file", [5, None, ["one.safetensors"], {"one.safetensors": 1}, True])
def test_an_index_of_wrong_types(folder, file):
    write_index(folder, {"a": "one.safetensors", "b": file, "c": "two.safetensors"})
    refused(folder, r"model\.safetensors\.index\.json names no file for b: download")


@pytest.mark.parametrize("file", ["../other/model.safetensors", "/other/model.safetensors", "sub/model.safetensors"])
def test_an_index_of_files_elsewhere(folder, file):
    (folder / "sub").mkdir()
    (folder / "two.safetensors").rename(folder / "sub" / "model.safetensors")
    write_index(folder, {"a": "one.safetensors", "b": "one.safetensors", "c": file})
    refused(folder, rf"{INDEX} names files outside its folder: {file}: download")


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_nested_without_end(folder, name):
    (folder / name).write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    refused(folder, rf"{name} cannot be read as JSON: maximum recursion depth")


def test_tensor_stored_twice(folder):
    save_file({"c": torch.zeros(4), "b": torch.ones(2)}, folder / "two.safetensors")
    refused(folder, r"stored twice: b \(in one\.safetensors and two\.safetensors\)")


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_bad_values(tmp_path, bad):
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.tensor([1.0, bad, bad])}, tmp_path / "model.safetensors")
    with pytest.raises(ConversionError, match=r"model\.safetensors: tensor a holds 2 .* of 3"):
        HFFolder(tmp_path).tensor("a")


def test_integers_are_not_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(3, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConversionError, match=r"tensor a is torch\.int32"):
        HFFolder(tmp_path).tensor("a")


def test_listing_and_order():
    assert sorted(["l.10.w", "l.2.w", "a"], key=natural) == ["a", "l.2.w", "l.10.w"]
    assert listed("abc") == "a, b, c"
    assert listed(str(i) for i in range(10)) == ", ".join("01234567") + " and 2 more"
