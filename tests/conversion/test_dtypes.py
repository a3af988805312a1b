"""Names and sizes of dtypes, against torch and the safetensors library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vcpo_megatron.conversion.dtypes import TORCH_DTYPES, dtype_name, torch_dtype
from vcpo_megatron.models.dtypes import ELEMENT_BYTES, SAFETENSORS_NAMES


def test_names_and_sizes_are_those_of_torch_and_safetensors(tmp_path: Path) -> None:
    assert list(TORCH_DTYPES.values()) == [torch.float32, torch.bfloat16, torch.float16]
    save_file({name: torch.zeros(3, dtype=dtype) for name, dtype in TORCH_DTYPES.items()}, tmp_path / "a")
    with safe_open(tmp_path / "a", framework="pt") as file:
        for name, dtype in TORCH_DTYPES.items():
            assert (torch_dtype(name), dtype_name(dtype)) == (dtype, name)
            assert ELEMENT_BYTES[name] == dtype.itemsize
            assert file.get_slice(name).get_dtype() == SAFETENSORS_NAMES[name]


@pytest.mark.parametrize("name", ["int64", "float8_e4m3fn", "torch.float32", ""])
def test_what_is_not_trained_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected one of float32, bfloat16, float16"):
        torch_dtype(name)
