"""`defer` puts the import of a module off until one of its attributes is used.

It is for modules that a library imports unconditionally and that a process probably never uses. Python's LazyLoader
would import such a module as soon as a second file imports it.
"""

import importlib
import importlib.util
import sys
import threading
from collections.abc import Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_turn = threading.Lock()
"""Held while a module is taken out of `sys.modules`, and never during an import."""
IMPORT_SYSTEM = importlib._bootstrap.__name__
"""Name of the module in which Python looks up the folders of a submodule's parent."""


def defer(name: str, *, functions: Collection[str] = ()) -> None:
    """Makes `import name` cheap: the module itself is imported when the first of its attributes is used.

    `functions` names functions of the module that files import by `from name import function`; such an import does not
    load the module yet, but the first call does. A failure to import the module is raised there, too. Does nothing if
    the module is imported already, or is not installed.
    """
    if name in sys.modules:
        return
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return
    if spec is None:
        return
    module = _Deferred(name)
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
    module.__dict__.update({function: _caller(name, function) for function in functions})
    sys.modules[name] = module
    _finder.deferred.add(name)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Deferred(ModuleType):
    """Stands in `sys.modules` for a module; what it lacks is looked up in the real one."""

    def __getattr__(self, attribute: str) -> Any:
        # `from module import function` asks whether this is a package; the import of a submodule needs the real one.
        if attribute == "__path__" and sys._getframe(1).f_globals.get("__name__") != IMPORT_SYSTEM:
            raise AttributeError(f"module {self.__name__!r} is not imported yet")
        return getattr(_real(self.__name__), attribute)


def _caller(module: str, function: str) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(_real(module), function)(*arguments, **options)

    call.__name__ = call.__qualname__ = function
    call.__module__ = module
    return call


def _real(name: str) -> ModuleType:
    """Imports the module in place of what stands for it; Python's own lock makes other threads wait for it."""
    with _turn:  # Another thread may have replaced it by the real module meanwhile, and that must stay.
        if isinstance(sys.modules.get(name), _Deferred):
            del sys.modules[name]
    return importlib.import_module(name)


class _Finder(MetaPathFinder):
    """Finds submodules that were imported while Python looked for them.

    Python asks the package of a submodule for its folders; a deferred package is imported at this question, and its
    import may import the submodule. Python does not expect that: it would execute the submodule a second time.
    """

    def __init__(self) -> None:
        self.deferred: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = sys.modules.get(fullname)
        # With a target, an imported module is meant to be executed again.
        if target is not None or module is None or fullname.rpartition(".")[0] not in self.deferred:
            return None
        return ModuleSpec(fullname, _Imported(), loader_state=module.__spec__)


class _Imported(Loader):
    """Loader of a module that is imported already."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


_finder = _Finder()
