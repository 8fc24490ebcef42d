"""What is guaranteed for each case from the field, and the page that says which test holds it.

A test that holds a case is marked `@pytest.mark.case("A1")`. The page is written by `scripts/field_cases.py` from these
marks and tests/data/field-cases.toml, and a test holds that it is current and that no case is without a test.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "field-cases.md"
DATA = ROOT / "tests" / "data" / "field-cases.toml"
REPOSITORIES = {
    "L": "ggml-org/llama.cpp",
    "IK": "ikawrakow/ik_llama.cpp",
    "V": "vllm-project/vllm",
    "S": "sgl-project/sglang",
    "H": "huggingface/transformers",
    "MV": "Blaizzy/mlx-vlm",
    "ML": "ml-explore/mlx-lm",
    "A": "vllm-project/vllm-ascend",
}


@dataclass(frozen=True)
class Case:
    """`seen`: public threads as a short name of `REPOSITORIES` and numbers, e.g. "L 25129 25144, V 43820"."""

    group: str
    seen: str
    guarantee: str


CASES = {id: Case(**row) for id, row in tomllib.loads(DATA.read_text(encoding="utf-8")).items()}


@dataclass(frozen=True)
class Held:
    """A test that holds cases."""

    path: Path
    name: str
    ids: tuple[str, ...]


def held(root: Path = ROOT / "tests") -> Iterator[Held]:
    """Every marked test, read from the sources."""
    for path in sorted(root.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                ids = tuple(id for decorator in node.decorator_list for id in _ids(decorator))
                if ids:
                    yield Held(path, node.name, ids)


def _ids(decorator: ast.expr) -> tuple[str, ...]:
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.case":
        return tuple(ast.literal_eval(argument) for argument in decorator.args)
    return ()


def page() -> str:
    """The whole of docs/field-cases.md."""
    tests = list(held())
    lines = [
        "# Cases from the field",
        "",
        "What users of several engines have met with speculative decoding together with images, caches, slots,",
        "cancelling, sampling and loading, what foreglance guarantees, and the tests that hold it. Written by",
        "`python scripts/field_cases.py` from the marks of the tests.",
    ]
    for group in dict.fromkeys(case.group for case in CASES.values()):
        lines += ["", f"## {group}", "", "| id | what is guaranteed | held by | seen in |", "|---|---|---|---|"]
        for id, case in CASES.items():
            if case.group == group:
                links = [_link(test) for test in tests if id in test.ids]
                lines.append(f"| {id} | {case.guarantee} | {'<br>'.join(links)} | {_threads(case.seen)} |")
    return "\n".join(lines) + "\n"


def _link(test: Held) -> str:
    where = test.path.relative_to(ROOT).as_posix()
    return f"[{test.name.removeprefix('test_').replace('_', ' ')}](../{where})"


def _threads(seen: str) -> str:
    """ "L 25129 25144" -> links to the threads."""
    links = []
    for source in filter(None, seen.split(", ")):
        short, *numbers = source.split(" ")
        repository = REPOSITORIES[short]
        links += [f"[{repository}#{n}](https://github.com/{repository}/issues/{n})" for n in numbers]
    return ", ".join(links)
