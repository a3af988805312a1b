"""Which fused GPU kernels are installed, found without importing any of them.

    Adam              TransformerEngine's, else Apex's; Megatron takes them in this order
    weight gradients  Apex's extension that adds a matrix product to an fp32 gradient

NVIDIA's Apex is built from source. The package index has another project called apex, and Apex can be built
without its extensions: in both cases ``import apex`` works and its FusedAdam does not.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ApexState = Literal["none", "usable", "without extensions", "another package"]


@dataclass(frozen=True)
class InstalledKernels:
    """transformer_engine: its PyTorch part is there. weight_gradients: Apex's extension is."""

    transformer_engine: bool = False
    apex: ApexState = "none"
    weight_gradients: bool = False

    @property
    def fused_adam(self) -> str:
        """Whose Adam Megatron would take: "TransformerEngine", "Apex", or "" where there is none."""
        if self.transformer_engine:
            return "TransformerEngine"
        return "Apex" if self.apex == "usable" else ""

    @property
    def apex_problem(self) -> str:
        """Why an installed apex is not used; "" where there is nothing to say."""
        return {
            "another package": "the installed apex is not NVIDIA's but another project of that name; NVIDIA's is built "
            "from its source",
            "without extensions": "NVIDIA's apex is installed without its CUDA extensions; build it with --cpp_ext "
            "--cuda_ext",
        }.get(self.apex, "")


def find_kernels() -> InstalledKernels:
    """What the interpreter's path holds."""
    engine, apex = _folder("transformer_engine"), _folder("apex")
    state: ApexState = "none"
    if apex is not None:
        state = "another package"
        if (apex / "optimizers" / "fused_adam.py").is_file():
            state = "usable" if _exists("amp_C") else "without extensions"
    return InstalledKernels(
        transformer_engine=engine is not None and (engine / "pytorch" / "optimizers").is_dir(),
        apex=state,
        weight_gradients=_exists("fused_weight_gradient_mlp_cuda"),
    )


def engine_problem(reason: str) -> str:
    """One line for the user: TransformerEngine is installed, and importing it fails for ``reason``."""
    return (
        f"transformer-engine is installed and cannot be imported ({reason}): its torch part has to be built against "
        "the torch beside it; make the environment anew with tools/make_gpu_env.sh, or go without (pip uninstall "
        "transformer-engine transformer-engine-cu13 transformer-engine-torch)"
    )


def _exists(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _folder(package: str) -> Path | None:
    """Where a top-level package lies; to look for it imports nothing."""
    spec = importlib.util.find_spec(package)
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))) if places else None
