"""Imports go one way, and nothing guesses what an object can do."""

import ast
from pathlib import Path

import pytest

import foreglance

PACKAGE = Path(foreglance.__file__).parent
LEVELS = (
    {"request", "settings", "stats"},
    {"images", "chat_format", "lark", "detokenize", "sampling", "verify"},
    {"conversation", "reasoning", "tool_grammar"},
    {"grammar"},
    {"prompt"},
    {"sequence"},
    {"batch"},
    {"ops", "cache"},
    {"models"},
    {"drafters"},
    {"scheduler", "slots"},
    {"runner"},
    {"engine"},
    {"bench", "cli", "explain", "rows_svg", "serve"},
)
TEXT = ("chat_format", "lark", "conversation", "reasoning", "tool_grammar", "grammar")
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(PACKAGE)) for path in FILES]


def tree_of(path):
    return ast.parse(path.read_text(), filename=str(path))


def imported(tree):
    """Our own modules that a file imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "foreglance":
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from [a.name.split(".")[1] for a in node.names if a.name.startswith("foreglance.")]


def test_every_module_has_a_level():
    own = {name.split("/")[0].removesuffix(".py") for name in NAMES} - {"__init__", "__main__", "embedded", "assets"}
    assert own <= set(LEVEL), f"give {own - set(LEVEL)} a place in the line"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_imports_go_one_way(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own in ("__init__", "__main__"):
        return
    for other in imported(tree_of(path)):
        if other in LEVEL:  # else a name of the package itself
            assert LEVEL[other] <= LEVEL[own], f"{own} must not import {other}"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_no_module_guesses_attributes_or_has_global_state(path):
    tree = tree_of(path)
    assert ast.get_docstring(tree), "a module says what it owns"
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"line {node.lineno}: a global statement"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("getattr", "hasattr"), f"line {node.lineno}: {node.func.id}"


def test_every_package_says_what_it_owns():
    for folder in {path.parent for path in FILES}:
        assert (folder / "__init__.py").is_file()
        assert len(ast.get_docstring(tree_of(folder / "__init__.py")) or "") > 40, folder.name


def test_the_words_of_the_interface_need_no_torch():
    for name in (
        "request",
        "settings",
        "stats",
        "images",
        "prompt",
        "detokenize",
        "sampling",
        "verify",
        "scheduler",
        *TEXT,
    ):
        for node in ast.walk(tree_of(PACKAGE / f"{name}.py")):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "")]
            assert not any((n or "").split(".")[0] in ("torch", "transformers") for n in names), name
