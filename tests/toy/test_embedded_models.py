"""Every model that ships: small, whole, and its drafts change no token and mostly stand."""

import pytest

from foreglance import Engine, SamplingParams, Settings, Speculation
from foreglance.bench.prompts import image_cases, text_cases
from foreglance.models.weights import EMBEDDED, embedded_models, find_assistant

ASSISTANTS = [name for name in embedded_models() if name.endswith("-assistant")]
TARGETS = [name for name in embedded_models() if name not in ASSISTANTS]


def engine_of(name: str, draft_model: str | None = None) -> Engine:
    return Engine.load(name, Settings(prefix_cache_bytes=0), draft_model=draft_model or find_assistant(name))


def compare(engine: Engine, cases, draft: str) -> float:
    """Acceptance of first guesses; token ids must be those without drafts."""
    tried = stood = 0
    for number, case in enumerate(cases):
        sampling = SamplingParams(max_tokens=48, temperature=0.8 * (number % 2), seed=number)
        plain = engine.generate(case.request(sampling, Speculation("none")))[0]
        drafted = engine.generate(case.request(sampling, Speculation(draft, 3)))[0]
        assert drafted.token_ids == plain.token_ids and drafted.text == plain.text
        tried += drafted.timings.drafted[0] if drafted.timings.drafted else 0
        stood += drafted.timings.accepted[0] if drafted.timings.accepted else 0
    engine.check()
    return stood / tried


@pytest.mark.parametrize("name", embedded_models())
def test_a_folder_is_small_and_says_what_it_is(name):
    folder = EMBEDDED / name
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) <= 12_000_000
    assert "## Measured" in (folder / "README.md").read_text()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "tiny-text"])
def test_a_model_describes_pictures_and_its_own_drafts_mostly_stand(name):
    engine = engine_of(name)
    assert compare(engine, image_cases(4), "auto") > 0.6
    assert compare(engine, text_cases(4), "auto") > 0.6


def test_a_text_model_of_the_same_vocabulary_drafts_without_seeing():
    engine = engine_of("tiny-qwen", "tiny-text")
    assert compare(engine, image_cases(4), "model") > 0.3
    assert compare(engine, text_cases(4), "model") > 0.5


def test_a_text_model_alone_needs_no_drafts_and_takes_no_pictures():
    from foreglance import RequestError

    engine = engine_of("tiny-text")
    assert engine.generate(text_cases(1)[0].request(SamplingParams(max_tokens=8), Speculation()))[0].text
    with pytest.raises(RequestError):
        engine.add(image_cases(1)[0].request(SamplingParams(), Speculation()))
