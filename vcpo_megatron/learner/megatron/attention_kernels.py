"""Which kernel computes the attention of which layer on which device: one table, without torch.

    transformer_engine  cuDNN's fused attention through TransformerEngine: one call a layer and pack, told where
                        sequences begin. Hopper and later; plain causal attention of equal heads, no context parallelism
    flash               torch's variable-length flash attention (``torch.nn.attention.varlen``): one call a layer and
                        pack, also for windows, for the chunks of context parallelism, and for heads of unequal size,
                        whose smaller part is filled up with zeros. Ampere and later, 16 bits
    sdpa                torch's scaled dot product, a call a sequence, with a mask wherever causal attention is not
                        plain: CPUs, float32, and what the others do not take

``model.core_attention``: "torch" leaves the first out, "auto" takes the first that serves, from the top; by name
TransformerEngine's is taken or refused (``config.checks.transformer_engine``), never replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

AttentionKernel = Literal["transformer_engine", "flash", "sdpa"]

_NAMES: dict[AttentionKernel, str] = {
    "transformer_engine": "TransformerEngine's kernels, a call a pack",
    "flash": "torch's flash attention, a call a pack",
    "sdpa": "torch's scaled dot product, a call a sequence",
}


@dataclass(frozen=True)
class AttentionLayer:
    """What a kernel has to compute. Head dimensions of keys (and queries) and of values; ``window``: tokens that a
    token sees, None for all before it; ``context``: ranks that share a sequence; ``dtype`` as "bfloat16"."""

    key_dim: int
    value_dim: int
    dtype: str
    window: int | None = None
    context: int = 1


@dataclass(frozen=True)
class AttentionDevice:
    """What a rank runs on. ``capability`` of its GPU, None without one; ``transformer_engine``: it can be imported;
    ``varlen``: this torch has the variable-length call with windows, which came with 2.11; ``deterministic``: torch was
    told to use deterministic algorithms only."""

    capability: tuple[int, int] | None = None
    transformer_engine: bool = False
    varlen: bool = False
    deterministic: bool = False


@dataclass(frozen=True)
class AttentionChoice:
    """``reason``: what keeps the next faster kernel from being used; "" where there is none, or none was asked for."""

    kernel: AttentionKernel
    reason: str = ""


def choose_attention(wanted: str, layer: AttentionLayer, device: AttentionDevice) -> AttentionChoice:
    """The kernel of one layer; ``wanted`` is ``model.core_attention``."""
    if wanted == "transformer_engine":
        return AttentionChoice("transformer_engine")
    if device.capability is None:
        return AttentionChoice("sdpa", "no GPU")
    if layer.dtype not in ("bfloat16", "float16"):
        return AttentionChoice("sdpa", f"flash kernels take 16 bits, not {layer.dtype}")
    engine = _against_engine(layer, device, device.capability) if wanted == "auto" else ""
    if wanted == "auto" and not engine:
        return AttentionChoice("transformer_engine")
    flash = _against_flash(layer, device, device.capability)
    return AttentionChoice("sdpa", flash) if flash else AttentionChoice("flash", engine)


def _against_engine(layer: AttentionLayer, device: AttentionDevice, capability: tuple[int, int]) -> str:
    """Why TransformerEngine's kernels are not taken; of packed sequences they know what is written there."""
    if not device.transformer_engine:
        return "TransformerEngine is not there"
    if capability < (9, 0):
        return f"TransformerEngine's kernels for packs need compute capability 9.0, not {_dotted(capability)}"
    if device.deterministic and capability >= (10, 0):
        return "TransformerEngine's is not deterministic on Blackwell"
    if layer.context > 1:
        return "TransformerEngine's is not checked with context parallelism"
    if layer.window is not None:
        return "TransformerEngine's is not checked with sliding windows"
    if layer.key_dim != layer.value_dim:
        return "TransformerEngine's is not checked with latent attention"
    if layer.key_dim > 128 or layer.key_dim % 8:
        return f"TransformerEngine's takes heads of up to 128 dimensions in steps of 8, not {layer.key_dim}"
    return ""


def _against_flash(layer: AttentionLayer, device: AttentionDevice, capability: tuple[int, int]) -> str:
    if capability < (8, 0):
        return f"flash kernels need compute capability 8.0, not {_dotted(capability)}"
    if not device.varlen:
        return "this torch has no torch.nn.attention.varlen with windows; 2.11 has"
    if max(layer.key_dim, layer.value_dim) > 256:
        return f"flash kernels take heads of up to 256 dimensions, not {max(layer.key_dim, layer.value_dim)}"
    return ""


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def describe(choices: Sequence[AttentionChoice]) -> str:
    """A line for the log: the kernels of all layers, with the reason of each."""
    lines = []
    for choice in dict.fromkeys(choices):
        count = sum(other == choice for other in choices)
        where = "" if count == len(choices) else f" in {count} of {len(choices)} layers"
        lines.append(f"{_NAMES[choice.kernel]}{where}" + (f" ({choice.reason})" if choice.reason else ""))
    return "; ".join(lines)
