"""Stands in for SGLang's compiled kernels on machines without AMX: it imports, every kernel refuses to run.

SGLang imports these names at module load when its CPU engine is on. Without AMX it calls none of them for the models
that this package trains.
"""

from collections.abc import Callable

__version__ = "0.0.0+cpu.shim"


def __getattr__(name: str) -> Callable[..., object]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> object:
        raise NotImplementedError(f"sgl_kernel.{name}: this is the CPU shim, which has no kernels")

    missing.__name__ = name
    return missing
