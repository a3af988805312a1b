"""Which kernel serves which layer on which device, as a table of literals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.messages import assert_names
from vcpo_megatron.learner.megatron.attention_kernels import (
    AttentionChoice,
    AttentionDevice,
    AttentionLayer,
    choose_attention,
    describe,
)

PLAIN = AttentionLayer(128, 128, "bfloat16")
CPU = AttentionDevice()
H100 = AttentionDevice((9, 0), transformer_engine=True, varlen=True)
B200 = replace(H100, capability=(10, 0))
BARE, A100, T4 = replace(H100, transformer_engine=False), replace(H100, capability=(8, 0)), AttentionDevice((7, 5))
OLD_TORCH = replace(BARE, varlen=False)
WINDOWED, CHUNKED = replace(PLAIN, window=4096), replace(PLAIN, context=4)
FLOAT32, LATENT, WIDE = replace(PLAIN, dtype="float32"), replace(PLAIN, key_dim=192), replace(PLAIN, key_dim=320)


@pytest.mark.parametrize(
    ("wanted", "layer", "device", "kernel", "names"),
    [
        ("auto", PLAIN, H100, "transformer_engine", ()),
        ("auto", PLAIN, B200, "transformer_engine", ()),
        ("auto", PLAIN, replace(H100, deterministic=True), "transformer_engine", ()),
        ("auto", PLAIN, replace(B200, deterministic=True), "flash", ("TransformerEngine", "deterministic")),
        ("auto", PLAIN, A100, "flash", ("TransformerEngine", "9.0", "8.0")),
        ("auto", PLAIN, BARE, "flash", ("TransformerEngine",)),
        ("auto", WINDOWED, H100, "flash", ("TransformerEngine", "sliding windows")),
        ("auto", CHUNKED, H100, "flash", ("TransformerEngine", "context parallelism")),
        ("auto", LATENT, H100, "flash", ("TransformerEngine", "latent attention")),
        ("auto", AttentionLayer(256, 256, "bfloat16"), H100, "flash", ("TransformerEngine", "128", "256")),
        ("auto", AttentionLayer(100, 100, "bfloat16"), H100, "flash", ("TransformerEngine", "8", "100")),
        ("torch", PLAIN, H100, "flash", ()),
        ("torch", WINDOWED, A100, "flash", ()),
        ("torch", replace(CHUNKED, window=64), H100, "flash", ()),
        ("torch", LATENT, H100, "flash", ()),
        ("torch", WIDE, H100, "sdpa", ("256", "320")),
        ("auto", WIDE, H100, "sdpa", ("256", "320")),
        ("torch", PLAIN, T4, "sdpa", ("8.0", "7.5")),
        ("torch", PLAIN, OLD_TORCH, "sdpa", ("torch.nn.attention.varlen", "2.11")),
        ("auto", PLAIN, replace(OLD_TORCH, transformer_engine=True), "transformer_engine", ()),
        ("auto", FLOAT32, H100, "sdpa", ("16 bits", "float32")),
        ("auto", PLAIN, CPU, "sdpa", ("no GPU",)),
        ("torch", FLOAT32, CPU, "sdpa", ("no GPU",)),
        ("transformer_engine", PLAIN, H100, "transformer_engine", ()),
        ("transformer_engine", PLAIN, CPU, "transformer_engine", ()),  # and refused where the layer is made
    ],
)
def test_the_table(
    wanted: str, layer: AttentionLayer, device: AttentionDevice, kernel: str, names: tuple[str, ...]
) -> None:
    found = choose_attention(wanted, layer, device)
    assert found.kernel == kernel and bool(found.reason) == bool(names)
    assert_names(found.reason, *names)


def test_the_log_names_kernels_and_reasons_once() -> None:
    full, windowed = AttentionChoice("transformer_engine"), AttentionChoice("flash", "windows")
    assert describe([full] * 3) == "TransformerEngine's kernels, a call a pack"
    both = describe([windowed, full, windowed])
    assert_names(both, "torch's flash", "2 of 3 layers (windows)", "TransformerEngine's", "1 of 3 layers")
    assert_names(describe([AttentionChoice("sdpa", "no GPU")]), "torch's scaled dot product", "(no GPU)")
