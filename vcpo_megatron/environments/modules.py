"""A user's own code by name, "package.module:attribute": where it is looked for, and what is wrong with it.

The folder of RUN.toml (``environment.modules``) is put at the end of Python's path, for good: what a module imports
later, inside a function, is found there, too. At the end, so that a file beside RUN.toml never takes the place of an
installed module; a name that is taken is refused instead of the other module being used.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ..run.text import one_line
from .base import EnvironmentSetupError

_PACKAGE = str(Path(__file__).parents[1])


def load_attribute(name: str, folder: Path | None, key: str) -> Any:
    """What "package.module:attribute" names; EnvironmentSetupError begins with the configuration key ``key`` and it.

    ``folder`` is searched after what is installed and PYTHONPATH.
    """
    wrong = f"{key} = {name!r}: "
    module_name, _, attribute = name.partition(":")
    if not attribute or not all(part.isidentifier() for part in module_name.split(".")):
        raise EnvironmentSetupError(f"{wrong}give 'package.module:name'")
    module = _import(module_name, folder, wrong)
    try:
        return getattr(module, attribute)
    except AttributeError:
        near = difflib.get_close_matches(attribute, vars(module), 1)
        raise EnvironmentSetupError(
            f"{wrong}{_place(module)} has no {attribute!r}"
            + (f"; did you mean {module_name}:{near[0]}?" if near else "; name something that it defines")
        ) from None


def _import(name: str, folder: Path | None, wrong: str) -> ModuleType:
    """Module ``name``; ``wrong`` begins every error."""
    if folder is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()  # a module that was written a moment ago
    own = _own_file(name, folder)
    try:
        with user_code(f"{wrong}importing {name}", ModuleNotFoundError):
            module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if own is not None and error.name != name.partition(".")[0] and f"{name}.".startswith(f"{error.name}."):
            raise _hidden(wrong, own, sys.modules[name.partition(".")[0]]) from None
        if not f"{name}.".startswith(f"{error.name}."):  # something that the module itself imports
            raise EnvironmentSetupError(
                f"{wrong}importing {name} needs {error.name!r}, which is not there ({_where(error)}); install it"
            ) from error
        searched = f"{folder} (the folder of RUN.toml), " if folder is not None else ""
        raise EnvironmentSetupError(
            f"{wrong}{error}; searched: {searched}PYTHONPATH, what is installed; put it there, or correct the name"
        ) from None
    found = getattr(module, "__file__", None)
    if own is not None and (found is None or not own.samefile(found)):
        raise _hidden(wrong, own, module)
    return module


def _own_file(name: str, folder: Path | None) -> Path | None:
    """The file in ``folder`` that a user means by module ``name``, if there is one."""
    if folder is None:
        return None
    path = folder.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _hidden(wrong: str, own: Path, by: ModuleType) -> EnvironmentSetupError:
    return EnvironmentSetupError(f"{wrong}{own} is hidden by {_place(by)}, which has the same name; rename yours")


def _place(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or f"Python's own {module.__name__}"


@contextmanager
def user_code(what: str, *passing: type[BaseException]) -> Iterator[None]:
    """Fault boundary: whatever a user's code raises while the environment is made is a problem of the setup, one line
    with its type and place. ``sys.exit`` is a fault like any other. EnvironmentSetupError and ``passing`` pass."""
    try:
        yield
    except EnvironmentSetupError:
        raise
    except passing:
        raise
    except (Exception, SystemExit) as error:  # fault boundary, see above
        said = one_line(error) if str(error) else ""
        raise EnvironmentSetupError(
            f"{what} raised {type(error).__name__}{': ' if said else ''}{said} ({_where(error)}); correct it"
        ) from error


def _where(error: BaseException) -> str:
    """FILE line N of the last line of a user's own code that ``error`` came through; else where it was raised."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename} line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    library = (_PACKAGE, sys.prefix, sys.base_prefix, "<")
    own = [frame for frame in frames if not frame.filename.startswith(library)]
    last = (own or frames)[-1]
    return f"{last.filename} line {last.lineno}"
