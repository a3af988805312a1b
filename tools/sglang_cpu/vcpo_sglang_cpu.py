"""Makes the CUDA-first SGLang wheel importable on a machine without a GPU, Triton, or its compiled kernels.

``tools/make_rollout_env.sh --cpu`` copies this module, the package ``sgl_kernel`` beside it and ``vcpo_sglang_cpu.pth``
into the site-packages of a rollout environment; the .pth file imports it whenever that environment's interpreter
starts, SGLang's child processes included. Nothing of SGLang is edited: four imports are met on their way.

- ``sglang``: SGLang's own stand-in for Triton (it has one for macOS) is put in place just before SGLang is imported,
  and after torch has decided that there is no Triton.
- ``torchvision``: declares the two operators that it registers meta kernels for; its own library cannot be loaded
  beside a torch of another build.
- ``sglang.srt.mem_cache.pool_host.common``: pinning host memory for a GPU becomes a no-op (routed experts use it).
- ``sgl_kernel``: the package beside this file.

Written for SGLang 0.5.23.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

#: The function of SGLang's ``_platform_stubs`` whose branch on Triton is run.
_STUBS_FUNCTION = "install_platform_stubs"


class _Before(importlib.abc.MetaPathFinder):
    """Calls ``prepare`` once, just before the module ``name`` is looked for; finds nothing itself."""

    def __init__(self, name: str, prepare: Callable[[], object]) -> None:
        self._name, self._prepare, self._done = name, prepare, False
        self._kept: object = None  # what ``prepare`` returned lives on

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == self._name and not self._done:
            self._done = True  # first: ``prepare`` may look for the module itself
            self._kept = self._prepare()
        return None


class _After(importlib.abc.MetaPathFinder):
    """Calls ``change`` with the module ``name`` as soon as it is loaded."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name, self._change, self._busy = name, change, False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy = False
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            self._change(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


def _declare_torchvision_operators() -> object:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def _put_triton_stand_in() -> None:
    """Run the branch of SGLang's ``install_platform_stubs`` that concerns Triton; the rest is for another platform."""
    try:
        import triton  # noqa: F401
    except ImportError:
        import torch
        import torch._dynamo  # noqa: F401 - torch looks for Triton here, and must not find the stand-in
    else:
        return
    package = importlib.util.find_spec("sglang")
    assert package is not None and package.origin is not None
    source = Path(package.origin).with_name("_platform_stubs.py")
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", source)
    assert spec is not None and spec.loader is not None
    stubs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs  # its dataclasses look themselves up
    spec.loader.exec_module(stubs)
    functions = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef)]
    install = next(function for function in functions if function.name == _STUBS_FUNCTION)
    branch = next(node for node in install.body if isinstance(node, ast.If) and "triton" in ast.unparse(node.test))
    exec(compile(ast.Module(branch.body, []), str(source), "exec"), vars(stubs))  # noqa: S102 - SGLang's own code


def _do_not_pin(module: ModuleType) -> None:
    module._cuda_host_register = lambda *args, **kwargs: None  # type: ignore[attr-defined]


def install() -> None:
    """Idempotent enough for one interpreter: the .pth file imports this module once."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sys.meta_path[:0] = [
        _Before("torchvision", _declare_torchvision_operators),
        _Before("sglang", _put_triton_stand_in),
        _After("sglang.srt.mem_cache.pool_host.common", _do_not_pin),
    ]


install()
