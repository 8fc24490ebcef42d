"""Log-probabilities of tokens: the model's own distribution, equal with drafts on and off, accepted or not."""

import numpy as np
import pytest
from support.toy import VOCAB, ask, picture, toy_engine, toy_target

WIDE = picture(2, 9, 40)
UNTOUCHED = {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.1, "logit_bias": {7: 2.0}}


def answer(draft, num_top=3, **sampling):
    request = ask("what is red here?", [WIDE], draft=draft, depth=4, max_tokens=60, logprobs=num_top, **sampling)
    engine, tokens = toy_engine(), []
    engine.add(request)
    while not engine.is_idle:
        tokens += [token for event in engine.step() for token in event.tokens]
    return tokens


@pytest.mark.case("D7")
@pytest.mark.parametrize("sampling", ({}, UNTOUCHED), ids=("greedy", "sampled"))
@pytest.mark.parametrize("draft", ("mtp", "ngram"))
def test_they_are_equal_with_drafts_on_and_off(draft, sampling):
    plain, drafted = answer("none", **sampling), answer(draft, **sampling)
    assert any(token.depth for token in drafted)
    assert [(t.id, t.logprob, t.top_logprobs) for t in drafted] == [(t.id, t.logprob, t.top_logprobs) for t in plain]


def test_they_are_those_of_the_logits_before_anything_else_acts(monkeypatch):
    target, rows = toy_target(), []

    def logits(hidden):
        rows.append(type(target).logits(target, hidden).double().log_softmax(-1).numpy())
        return type(target).logits(target, hidden)

    monkeypatch.setattr(target, "logits", logits)
    tokens = answer("none", 20, **UNTOUCHED)
    assert len(rows) == len(tokens)
    for token, row in zip(tokens, rows, strict=True):
        assert token.logprob == pytest.approx(row[0, token.id], abs=1e-9)
        assert len(token.top_logprobs) == 20
        assert [i for i, _ in token.top_logprobs] == np.argsort(-row[0], kind="stable")[:20].tolist()
        assert [p for _, p in token.top_logprobs] == pytest.approx(np.sort(row[0])[::-1][:20], abs=1e-9)


def test_none_are_there_unless_asked_for():
    assert all(t.logprob is None and t.top_logprobs == () for t in answer("mtp", None))
    assert all(t.logprob is not None and t.top_logprobs == () for t in answer("mtp", 0))


def test_a_text_that_ends_behind_a_draft_has_one_for_each_token():
    """A verdict that is cut loses the numbers behind the end too."""
    plain = answer("none")
    stop = plain[9].text or plain[10].text
    texts = [answer(draft, stop=(stop,)) for draft in ("none", "mtp")]
    assert [(t.id, t.logprob) for t in texts[0]] == [(t.id, t.logprob) for t in texts[1]]
    assert all(np.isfinite(t.logprob) for t in texts[1]) and len(texts[1]) <= 11 < VOCAB
