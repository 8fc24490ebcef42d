"""A draft is tried at load: one that cannot guess is reported at once, in words, and the text is right all the same."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from foreglance import Engine, Request, SamplingParams, Settings, Speculation
from foreglance.models.qwen3_5 import MtpHead
from foreglance.models.weights import find_assistant, find_model


def with_tensors(folder, change):
    """A copy of tiny-qwen whose tensors were changed."""
    shutil.copytree(find_model("tiny-qwen"), folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def norms_without_one(tensors):
    """What a conversion leaves that takes the head's norms for plain ones (they are stored as w - 1)."""
    for name in tensors:
        if name.startswith("mtp.") and "norm" in name:
            tensors[name] -= 1


def another_head(tensors):
    generator = torch.Generator().manual_seed(0)
    for name in tensors:
        if name.startswith("mtp.") and "norm" not in name:
            tensors[name] = torch.randn(tensors[name].shape, generator=generator).half() / 14


@pytest.mark.case("A12", "C7", "E4")
@pytest.mark.parametrize("change", (norms_without_one, another_head))
def test_weights_that_do_not_belong_together_are_reported_once_at_load(change, tmp_path, caplog):
    engine = Engine.load(with_tensors(tmp_path / "odd", change), Settings(prefix_cache_bytes=0))
    (warning,) = engine.warnings
    assert warning.startswith("drafter mtp: only ") and " of 24 first guesses stood" in warning
    assert "belong together" in warning and warning in caplog.messages
    request = Request.from_prompt("Hello!", sampling=SamplingParams(max_tokens=12))
    assert engine.generate(request)[0].text == Engine.load("tiny-qwen").generate(request)[0].text


@pytest.mark.parametrize(("name", "second"), [("tiny-qwen", None), ("tiny-qwen", "tiny-text"), ("tiny-gemma", "own")])
def test_a_draft_that_guesses_right_gives_no_warning_and_leaves_no_trace(name, second):
    engine = Engine.load(name, draft_model=find_assistant(name) if second == "own" else second)
    assert not engine.warnings and engine.is_idle
    engine.check()


def test_a_draft_that_fails_is_reported_and_no_crash(monkeypatch):
    monkeypatch.setattr(MtpHead, "forward", lambda self, batch, caches: 1 / 0)
    (warning,) = Engine.load("tiny-qwen").warnings
    assert "ZeroDivisionError" in warning


def test_nothing_is_tried_if_it_is_not_wanted_or_there_is_no_draft(monkeypatch):
    monkeypatch.setattr(Engine, "stream", lambda self, request: 1 / 0)
    Engine.load("tiny-qwen", Settings(try_drafts=False))
    Engine.load("tiny-text")


def test_what_rows_and_guesses_cost_is_known_after_loading():
    """Of every depth, so that the first answer is as fast as later ones. Without a compiler steps are slow; the trial
    is over after some seconds."""
    costs = Engine.load("tiny-qwen")._costs
    assert not costs.tour
    assert costs.target.knows_up_to(1) and costs.drafter["mtp", 1].knows_up_to(1)
    rounds = [costs.round("mtp", 1, depth) for depth in (0, 1, 8)]
    assert 0 < rounds[0] < rounds[2] and rounds[1] < rounds[2]
    assert Engine.load("tiny-qwen", Settings(try_drafts=False))._costs.round("mtp", 1, 8) == 0


def test_a_slow_machine_is_not_kept_waiting(monkeypatch):
    monkeypatch.setattr("foreglance.engine.TRIAL_SECONDS", 0.0)
    steps, step = [], Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: steps.append(1) or step(self))
    assert not Engine.load("tiny-qwen").warnings
    assert len(steps) < 3


def test_a_context_too_short_for_the_trial_is_no_failure():
    assert not Engine.load("tiny-qwen", Settings(context=8)).warnings


@pytest.mark.case("A12")
def test_the_alarm_while_running_stays(tmp_path):
    """One that was not tried is noticed after a hundred rounds."""
    engine = Engine.load(with_tensors(tmp_path / "odd", another_head), Settings(try_drafts=False))
    sampling = SamplingParams(max_tokens=130, ignore_eos=True)
    assert not engine.warnings
    engine.generate(Request.from_prompt("Hello!", sampling=sampling, speculation=Speculation(depth=1)))
    (warning,) = engine.warnings
    assert "of 100 first guesses stood" in warning
