"""The command of the Makefile that runs a test, read from the marks in the test's source; nothing is imported.

What a fixture or the body of a test skips is not seen.
"""

import ast
from collections.abc import Iterator
from itertools import product

DEFAULT = "make test"
COMMANDS = {
    "pretend_gpu": "make test-pretend-gpu",
    "gpu": "make test-gpu",
    "slow": "make test-slow",
    "extended": "make test-extended",
    "nodes": "make test-nodes",
}
"""Mark that `make test` leaves out → command that runs the test; of several marks the first one here counts."""
NOWHERE = "no command"
"""In place of a command: the test is skipped on some machines, or may fail (skip, skipif, xfail)."""
FOLDERS = {"tests/pretend_gpu/": "pretend_gpu"}
"""Folder whose conftest.py gives all tests a mark."""
NO_GPU = "torch.cuda.is_available()"
"""Condition of a skipif that never holds in `make test`, which needs no GPU."""

Marks = frozenset[str]


def commands_of(file: str, source: str) -> dict[str, set[str]]:
    """Test of a file → the commands that run its cases; `file` is the path from the repository's root."""
    tree = ast.parse(source)
    variables = [node for node in tree.body if isinstance(node, ast.Assign)]
    values = {target.id: node.value for node in variables for target in node.targets if isinstance(target, ast.Name)}
    of_all = frozenset(mark for folder, mark in FOLDERS.items() if file.startswith(folder))
    if "pytestmark" in values:
        of_all |= _marks(values["pytestmark"], values)
    return {
        node.name: {_command(of_all | marks) for marks in _cases(node.decorator_list, values)}
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def _command(marks: Marks) -> str:
    if marks & {"skip", "skipif", "xfail"}:
        return NOWHERE
    if {"slow", "pretend_gpu"} <= marks:
        return COMMANDS["slow"]  # which makes test-pretend-gpu-slow, too
    return next((command for mark, command in COMMANDS.items() if mark in marks), DEFAULT)


def _cases(decorators: list[ast.expr], values: dict[str, ast.expr]) -> Iterator[Marks]:
    """Yields the marks of each kind of case that a test has: those of its decorators, and those of its parameters."""
    always, choices = frozenset[str](), []
    for decorator in decorators:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("mark.parametrize"):
            listed = [*decorator.args[1:2], *(word.value for word in decorator.keywords if word.arg == "argvalues")]
            choices.append(_of_parameters(listed[0], values))
        else:
            always |= _marks(decorator, values)
    for chosen in product(*choices):
        yield always.union(*chosen)


def _of_parameters(node: ast.expr, values: dict[str, ast.expr]) -> set[Marks]:
    """Returns the different marks that the entries of a parametrize's list have."""
    if isinstance(node, ast.List | ast.Tuple):
        return set().union(*(_of_parameters(entry, values) for entry in node.elts)) or {frozenset()}
    if isinstance(node, ast.ListComp | ast.GeneratorExp):
        return _of_parameters(node.elt, values)
    if isinstance(node, ast.IfExp):
        return _of_parameters(node.body, values) | _of_parameters(node.orelse, values)
    if isinstance(node, ast.Starred):
        return _of_parameters(node.value, values)
    if isinstance(node, ast.Name) and node.id in values:
        return _of_parameters(values[node.id], values)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.param":
        marks = [word.value for word in node.keywords if word.arg == "marks"]
        return _of_marks(marks[0], values) if marks else {frozenset()}
    return {frozenset()}


def _of_marks(node: ast.expr, values: dict[str, ast.expr]) -> set[Marks]:
    if isinstance(node, ast.IfExp):
        return _of_marks(node.body, values) | _of_marks(node.orelse, values)
    return {_marks(node, values)}


def _marks(node: ast.expr, values: dict[str, ast.expr]) -> Marks:
    """Returns the names of all marks in an expression, also of those that a variable of the module stands for.

    Raises ValueError for a bare name that the module does not define: a mark that it imports could not be seen.
    """
    if isinstance(node, ast.List | ast.Tuple):
        return frozenset[str]().union(*(_marks(entry, values) for entry in node.elts))
    if isinstance(node, ast.Name):
        if node.id not in values:
            raise ValueError(f"{node.id} is imported, so its mark cannot be read")
        return _marks(values[node.id], values)
    name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    if isinstance(node, ast.Call) and name.endswith("mark.skipif") and ast.unparse(node.args[0]) == NO_GPU:
        return frozenset()
    return frozenset([name.rpartition("mark.")[2]]) if "mark." in name else frozenset()
