"""What makes two models one and the same for files: the values of their weights and how they are computed with."""

import shutil

import pytest

from foreglance import Engine, RequestError, SamplingParams, Settings, Speculation
from foreglance.bench.prompts import text_cases
from foreglance.models import fingerprint as module
from foreglance.models.fingerprint import fingerprint
from foreglance.models.weights import EMBEDDED


@pytest.fixture
def folder(tmp_path):
    for name in ("config.json", "model.safetensors", "README.md"):
        shutil.copy(EMBEDDED / "tiny-text" / name, tmp_path)
    return tmp_path


def changed(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("whole", (1 << 30, 1000))
def test_any_other_training_is_another_model_and_a_copy_is_the_same(folder, tmp_path_factory, monkeypatch, whole):
    """Of a file that is too large to be read whole, pieces all over it are."""
    monkeypatch.setattr(module, "WHOLE", whole)
    before = fingerprint(folder)
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    (copy / "README.md").write_text("other words")
    assert fingerprint(copy) == before
    size = (folder / "model.safetensors").stat().st_size
    for at in (9, size // 2, size - 1):
        changed(folder / "model.safetensors", at)
        assert fingerprint(folder) != before
        changed(folder / "model.safetensors", at)
    assert fingerprint(folder) == before
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert fingerprint(folder) != before


def test_files_are_those_of_one_model_computed_in_one_way(tmp_path):
    def engine(name, weights="fp32", draft=None):
        return Engine.load(name, Settings(weights=weights, slots=1, try_drafts=False), draft_model=draft)

    def answered(engine, draft):
        engine.generate(text_cases(1)[0].request(SamplingParams(max_tokens=4), Speculation(draft, 2)))
        return engine

    answered(engine("tiny-qwen"), "mtp").save_slot(0, tmp_path / "mtp")
    answered(engine("tiny-qwen", draft="tiny-text"), "model").save_slot(0, tmp_path / "model")
    assert engine("tiny-qwen").restore_slot(0, tmp_path / "mtp").rows > 10
    assert engine("tiny-qwen", draft="tiny-text").restore_slot(0, tmp_path / "model").rows > 10
    for other, file, words in (
        (engine("tiny-qwen", "fp16"), "mtp", "computed with fp32"),
        (engine("tiny-step"), "mtp", "another model"),
        (engine("tiny-text"), "mtp", "'mtp/see', which this engine does not have"),
        (engine("tiny-qwen"), "model", "'model/tiny-text', which this engine does not have"),
    ):
        with pytest.raises(RequestError, match=words) as error:
            other.restore_slot(0, tmp_path / file)
        assert (error.value.param, error.value.code) == ("filename", "slot_file")
        assert other.cached_bytes == 0 and other.slots()[0].rows == 0
