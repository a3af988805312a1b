"""Fused GPU kernels: which of those installed this rank uses, and how Megatron is told.

    Adam              Megatron takes TransformerEngine's or Apex's where it can import one; what cannot run here is
                      hidden from it
    weight gradients  Apex's kernel adds grads^T inputs to an fp32 gradient without a tensor of its size in between.
                      Megatron's layers call it for a plain backward. Where a trajectory's gradient is separated it is
                      ``add_product`` that does, on the gradient and on S_g alike

A kernel that is found and not used is named in the log, with the reason.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass

from torch import Tensor

from ...config.fused_kernels import InstalledKernels


@dataclass(frozen=True)
class Kernels:
    """adam: whose ("TransformerEngine", "Apex", "torch"). adds_products: weight gradients by Apex's kernel.

    hidden  modules that would be imported and do not work
    notes   lines for the log
    """

    adam: str
    adds_products: bool
    hidden: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def choose_kernels(installed: InstalledKernels, *, can_run: bool) -> Kernels:
    """What to use of ``installed``; ``can_run``: on this device at all."""
    notes = [f"{installed.apex_problem}: not used"] if installed.apex_problem else []
    if can_run:
        adam = installed.fused_adam
        notes.append(f"Adam: {adam}'s, fused" if adam else "Adam: torch's; TransformerEngine and Apex are missing")
        if installed.weight_gradients:
            notes.append("weight gradients: added by Apex's kernel")
        hidden = ("apex",) * bool(installed.apex_problem)
        return Kernels(adam or "torch", installed.weight_gradients, hidden, tuple(notes))
    names = {
        "transformer_engine": installed.transformer_engine,
        "apex": installed.apex != "none",
        "fused_weight_gradient_mlp_cuda": installed.weight_gradients,
    }
    hidden = tuple(name for name, found in names.items() if found)
    notes += [
        f"{name} is installed and needs a GPU: not used"
        for name in hidden
        if name != "apex" or not installed.apex_problem
    ]
    return Kernels("torch", False, hidden, tuple(notes))


def tell_megatron(kernels: Kernels) -> Kernels:
    """Make Megatron use ``kernels``, before it is imported. Returns what it really uses."""
    for module in kernels.hidden:
        sys.modules.setdefault(module, None)  # type: ignore[arg-type]  # by definition an import of it then fails
    from megatron.core import optimizer

    if kernels.adam == "torch" and not optimizer.USING_PYTORCH_OPTIMIZER:
        raise RuntimeError("Megatron was imported before its fused kernels were decided on")
    if kernels.adam != "torch" and optimizer.USING_PYTORCH_OPTIMIZER:
        kept = [note for note in kernels.notes if not note.startswith("Adam:")]
        note = f"Adam: torch's; {kernels.adam} is installed, but its FusedAdam cannot be imported"
        return dataclasses.replace(kernels, adam="torch", notes=(*kept, note))
    return kernels


def add_product(total: Tensor, grads: Tensor, inputs: Tensor) -> None:
    """total += grads^T inputs by Apex's kernel: total fp32 [d_out, d_in], grads [T, d_out], inputs [T, d_in]."""
    import fused_weight_gradient_mlp_cuda

    fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(inputs.contiguous(), grads.contiguous(), total)
