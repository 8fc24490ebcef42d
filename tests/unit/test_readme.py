"""What the README shows works as it stands there."""

import re
import shutil
from pathlib import Path

import foreglance
from foreglance.cli import app

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    shutil.copy(Path(foreglance.__file__).parent / "assets" / "scene.png", tmp_path / "photo.png")
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(example, names)
    assert len(capsys.readouterr().out) > 40
    assert [type(result).__name__ for result in names["results"]] == ["Result", "Result"]


def test_the_example_of_a_form_runs(tmp_path, monkeypatch, capsys):
    shutil.copy(Path(foreglance.__file__).parent / "assets" / "scene.png", tmp_path / "photo.png")
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "structured.md").read_text(), re.DOTALL)
    exec(example, {})
    assert capsys.readouterr().out.strip() in ("red", "blue")


def test_every_command_that_is_named_exists():
    groups = {"bench": next(group for group in app.registered_groups if group.name == "bench").typer_instance}
    known = names_of(app) | set(groups)
    shells = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
    shown = re.findall(r"^foreglance ([\w-]+)(?: ([\w-]+))?", shells, re.MULTILINE)
    assert len(shown) >= 6
    for command, sub in shown:
        assert command in known
        if command in groups:
            assert sub in names_of(groups[command])


def names_of(commands) -> set[str]:
    return {c.name or c.callback.__name__.replace("_", "-") for c in commands.registered_commands}


def test_every_linked_file_is_there():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links {target}"
