"""Import of a function or class that a configuration names as `pkg.module:attr` or `file.py:attr`."""

import importlib
import importlib.util
import inspect
import os
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from async_flowrl.config.error_text import in_one_line, unknown_name

OWN_CODE = "one of your own is written pkg.module:attr or file.py:attr"
SUFFIX = ".py"


def import_named(key: str, path: str) -> Any:
    """Returns the attribute that `path` names. Raises ValueError, which begins with `key`, if it cannot be imported."""
    place, _, attribute = path.rpartition(":")
    try:
        module = _of_file(Path(place)) if place.endswith(SUFFIX) else importlib.import_module(place)
    except Exception as error:  # whatever the module does when it is read
        hint = ""
        if os.sep in place and not place.endswith(SUFFIX):
            hint = "; a file is written file.py:attr"
        elif isinstance(error, ImportError) and os.sep in (error.name or ""):
            hint = "; a file with relative imports (from .x import y) is named as a module, pkg.module:attr"
        raise ValueError(f"{key}: {path} cannot be imported: {in_one_line(error)}{hint}") from error
    try:
        return attrgetter(attribute)(module)
    except AttributeError as error:
        public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        known = [name for name, value in public.items() if not _imported(value, module.__name__)] or list(public)
        raise ValueError(f"{key}: {unknown_name(f'the name after the colon of {path}', attribute, known)}") from error


def _imported(value: object, module: str) -> bool:
    definition = inspect.isclass(value) or inspect.isroutine(value)
    return inspect.ismodule(value) or (definition and not f"{value.__module__}.".startswith(f"{module}."))


def absolute(name: str) -> str:
    """Returns the name of one's own code with the absolute path of its file, for other folders and processes."""
    place, _, attribute = name.rpartition(":")
    return f"{os.path.abspath(Path(place).expanduser())}:{attribute}" if place.endswith(SUFFIX) else name


def source_of(name: str) -> Path | None:
    """Returns the source file of one's own code without running it; None for registered names and if there is none."""
    place, _, _ = name.rpartition(":")
    if place.endswith(SUFFIX):
        file = Path(place).expanduser()
    else:
        spec = importlib.util.find_spec(place) if place else None
        file = Path((spec and spec.origin) or "")
    return file if file.is_file() else None


def _of_file(file: Path) -> ModuleType:
    file = Path(os.path.abspath(file.expanduser()))
    if (name := str(file)) in sys.modules:
        return sys.modules[name]
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec: Any = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
