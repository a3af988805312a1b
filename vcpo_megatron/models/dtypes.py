"""Dtypes that weights are stored in and trained from, by torch's names. No torch: conversion has the map to its own."""

from __future__ import annotations

from collections.abc import Mapping

#: torch's name -> safetensors' name.
SAFETENSORS_NAMES: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
#: torch's name -> bytes of an element.
ELEMENT_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Those that models are trained in: float16 has too small a range for gradients without scaling the loss.
TRAINED = ("float32", "bfloat16")
