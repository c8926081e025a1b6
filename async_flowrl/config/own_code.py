"""Import of a function or class that a configuration names as `pkg.module:attr`."""

import importlib
from operator import attrgetter
from typing import Any

from async_flowrl.config.messages import in_one_line, unknown_name


def import_named(key: str, path: str) -> Any:
    """Returns the attribute that `path` names. Raises ValueError, which begins with `key`, if it cannot be imported."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the module does when it is read
        raise ValueError(f"{key}: {path} cannot be imported: {in_one_line(error)}") from error
    try:
        return attrgetter(attribute)(module)
    except AttributeError as error:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise ValueError(f"{key}: {unknown_name(f'the name after the colon of {path}', attribute, public)}") from error
