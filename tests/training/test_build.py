"""The recipes from an empty folder to a model folder, at a few steps a stage, and runs that are stopped."""

import importlib
import os
import signal
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file
from torch import nn

from foreglance import Engine, Request, SamplingParams
from training import build, build_family
from training.schedule import Run


class InProcess:
    """Stands for a stage's process, which a test would spend most of its time starting."""

    def __init__(self, stage: str, **options: object):
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        app = typer.Typer()
        app.command()(importlib.import_module(f"training.{stage}").main)
        app(words, standalone_mode=False)

    def wait(self) -> int:
        return 0


class WithoutTables(InProcess):
    def __init__(self, stage: str, **options: object):
        if stage not in ("evaluate", "chained_acceptance"):
            super().__init__(stage, **options)


@pytest.fixture(autouse=True)
def small_numbers_stay():
    """What training switches off for its process, other tests need."""
    yield
    torch.set_flush_denormal(False)


def stop_here() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def steps(folder: Path, num: int, stop_after: int | None = None) -> nn.Linear:
    """A run of `num` steps with a random part in each."""
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    run = Run(folder / "run.pt", module, optimizer, steps=num, seconds=float("inf"), warm_up=3)
    for step in run.numbers(lambda: None):
        run.descend(module(torch.randn(2, 4)).square().sum())
        if step + 1 == stop_after:
            stop_here()
    return module


def test_a_run_stopped_by_a_signal_goes_on_to_the_same_weights(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "stopped").mkdir()
    whole = steps(tmp_path / "whole", 9)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop:
        steps(tmp_path / "stopped", 9, stop_after=4)
    assert stop.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert torch.load(tmp_path / "stopped" / "run.pt", weights_only=True)["facts"]["step"] == 4
    stopped = steps(tmp_path / "stopped", 9)
    assert torch.equal(stopped.weight, whole.weight)
    assert torch.equal(steps(tmp_path / "stopped", 9).weight, whole.weight)  # nothing is left to do


def test_a_rehearsal_of_tiny_gemma_makes_a_model_and_one_that_was_stopped_makes_the_same(tmp_path, monkeypatch):
    for module in (build, build_family):
        monkeypatch.setattr(module, "start", InProcess)
    shipped = {path: path.stat().st_mtime_ns for path in build.EMBEDDED.rglob("*") if path.is_file()}
    build_family.main("gemma", work=tmp_path / "whole", quick=True)
    folders = [tmp_path / name / "quick" / "embedded" for name in ("whole", "stopped")]
    asked = Request.from_prompt("Hello", sampling=SamplingParams(max_tokens=4))
    (answer,) = Engine.load(str(folders[0] / "tiny-gemma")).generate([asked])
    assert len(answer.token_ids) == 4

    for module in (build, build_family):
        monkeypatch.setattr(module, "start", WithoutTables)
    descend, calls = Run.descend, []

    def stopping(run: Run, *losses: torch.Tensor) -> None:
        descend(run, *losses)
        calls.append(run.checkpoint.name)
        if len(calls) == 5:
            stop_here()

    monkeypatch.setattr(Run, "descend", stopping)
    with pytest.raises(SystemExit):
        build_family.main("gemma", work=tmp_path / "stopped", quick=True)
    assert calls[-1] == "gemma-target.pt"
    build_family.main("gemma", work=tmp_path / "stopped", quick=True)
    assert calls.count("gemma-target.pt") == calls.count("gemma-vision.pt") == 3  # no step was done twice
    for name in ("tiny-gemma", "tiny-gemma-assistant"):
        whole, stopped = (load_file(folder / name / "model.safetensors") for folder in folders)
        assert whole.keys() == stopped.keys()
        assert all(torch.equal(whole[key], stopped[key]) for key in whole)
    assert shipped == {path: path.stat().st_mtime_ns for path in build.EMBEDDED.rglob("*") if path.is_file()}
