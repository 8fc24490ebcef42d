"""Answers of a given form and budgets of reasoning: held to, and the same token for token with drafts on and off."""

import re
from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.toy import END, VOCAB, ask, picture, run, toy_target
from support.toy_chain import chained_target
from support.toy_grammar import TAGS, grammar_engine, with_grammars
from toy.test_independent import SIMPLE, engine_with

from foreglance import Grammar, RequestError
from foreglance.prompt import MRope

WIDE = picture(2, 9, 40)
FORMS = {
    "words": r"[a-z]{2,9}( [A-Z][a-z]{1,6}){1,3}[.!]",
    "a list": r"\([0-9](, [0-9]{1,3}){2,5}\)",
    "forced": r"(the answer is |it is )(never|always) (so|not so), é or €",
}
DRAFTERS = ("mtp", "ngram", "chain", "model")


def engine_for(draft, **options):
    if draft == "model":
        return with_grammars(engine_with(SIMPLE), **options)
    return grammar_engine(chained_target(MRope()) if draft == "chain" else toy_target(), **options)


def asked(form, draft="none", depth=3, temperature=0.8, seed=1, **sampling):
    kind = "mtp" if draft == "chain" else draft
    request = ask(
        "what is red here?",
        [WIDE],
        draft=kind,
        depth=depth,
        temperature=temperature,
        seed=seed,
        max_tokens=40,
        **sampling,
    )
    return request if form is None else replace(request, grammar=Grammar("regex", FORMS[form]))


@lru_cache
def plain(form, chain=False, **options):
    (result,) = run(engine_for("chain" if chain else "mtp"), [asked(form, **options)])
    return result


@pytest.mark.case("D8")
@pytest.mark.parametrize("temperature", (0.0, 0.8))
@pytest.mark.parametrize("depth", (1, 3, 7))
@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize("form", FORMS)
def test_an_answer_has_its_form_and_drafts_never_change_it(form, draft, depth, temperature):
    requests = [asked(form, draft, depth, temperature, seed) for seed in range(3)]
    for seed, result in enumerate(run(engine_for(draft), requests)):
        expected = plain(form, draft == "chain", temperature=temperature, seed=seed)
        assert result.token_ids == expected.token_ids and result.error is None
        assert result.finish_reason == "stop" and re.fullmatch(FORMS[form], result.text)


@pytest.mark.case("D8")
def test_guesses_are_held_to_the_form_too():
    """Else most of them are wasted: the toy model would write something else."""
    results = run(engine_for("mtp"), [asked("forced", "mtp", seed=seed) for seed in range(4)])
    accepted, drafted = (sum(sum(vars(r.timings)[name]) for r in results) for name in ("accepted", "drafted"))
    assert accepted / drafted > 0.9


@given(
    st.lists(st.tuples(st.sampled_from(("(1, 2, 345)", "(1, 23, 4)", "(7, 2, 345, 6)")), st.integers(0, 9)), max_size=8)
)
def test_what_may_follow_is_a_function_of_the_tokens(questions):
    """Whatever was asked before: drafts that fell leave no trace."""
    prompter = grammar_engine()._prompter

    def fresh():
        return prompter.guide(asked("a list"), "done", VOCAB, frozenset({END}))

    guide = fresh()
    for text, length in questions:
        tokens = prompter.encode(text, special=False)[:length]
        assert guide.allowed(tokens).tolist() == fresh().allowed(tokens).tolist()
    assert guide.allowed([*prompter.encode("(1, 2, 3)", special=False), END]) is None


def test_one_batch_may_hold_answers_with_and_without_a_form():
    forms = ("words", None, "a list", None, "forced")
    requests = [asked(form, "mtp", seed=seed) for seed, form in enumerate(forms)]
    for seed, (form, result) in enumerate(zip(forms, run(engine_for("mtp"), requests), strict=True)):
        assert result.token_ids == plain(form, seed=seed).token_ids


@pytest.mark.parametrize("draft", ("none", "mtp"))
def test_a_form_outweighs_a_bias(draft):
    result = run(engine_for(draft), [asked("a list", draft, logit_bias={token: -100.0 for token in range(3, 60)})])[0]
    assert result.finish_reason == "stop" and re.fullmatch(FORMS["a list"], result.text)


@pytest.mark.parametrize("draft", ("none", "mtp"))
def test_an_answer_that_is_cut_is_a_beginning(draft):
    whole, request = plain("words", seed=2), asked("words", draft, seed=2)
    (result,) = run(engine_for(draft), [replace(request, sampling=replace(request.sampling, max_tokens=5))])
    assert result.finish_reason == "length" and result.token_ids == whole.token_ids[:5]


@pytest.mark.parametrize("draft", ("none", "mtp", "ngram"))
def test_a_form_that_the_vocabulary_cannot_write_fails_alone(draft):
    """There is no brace among the toy tokens."""
    broken = replace(asked(None, draft), grammar=Grammar("lark", 'start: "so {" /[a-z]+/ "}"'))
    fine, lost = run(engine_for(draft), [asked("words", draft), broken])
    assert fine.token_ids == plain("words").token_ids
    assert lost.finish_reason == "error" and "grammar cannot be followed any further" in lost.error


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("regex", "[a"), "invalid regex"),
        (Grammar("lark", "start: other"), "other"),
        (Grammar("json_schema", "{"), "no JSON"),
        (Grammar("json_schema", "[]"), "must be a JSON object"),
        (Grammar("json_schema", '{"type": "thing"}'), "thing"),
        (Grammar("json_schema", '{"$ref": "https://example.org/schema"}'), "example.org"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused(grammar, words):
    with pytest.raises(RequestError, match=words) as error:
        grammar_engine().prepare(replace(asked(None), grammar=grammar))
    assert (error.value.param, error.value.code) == ("grammar", "invalid_grammar")


def thinking(budget, draft="none", form=None, depth=5, seed=1, temperature=0.8):
    request = asked(form, draft, depth, temperature, seed)
    return replace(request, sampling=replace(request.sampling, reasoning_budget=budget, max_tokens=60))


@lru_cache
def thought(budget, form, chain=False, **options):
    engine = engine_for("chain" if chain else "mtp", reasoning=TAGS, opened=True)
    return run(engine, [thinking(budget, form=form, **options)])[0]


@pytest.mark.case("D10")
@pytest.mark.parametrize("form", (None, "words"))
@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize("budget", (0, 1, 7))
def test_a_budget_of_reasoning_cuts_exactly_and_drafts_never_change_it(budget, draft, form):
    """The toy model never ends its reasoning by itself."""
    requests = [thinking(budget, draft, form, seed=seed) for seed in range(2)]
    for seed, result in enumerate(run(engine_for(draft, reasoning=TAGS, opened=True), requests)):
        assert result.token_ids == thought(budget, form, draft == "chain", seed=seed).token_ids
        ids = list(result.token_ids)
        end = engine_for("mtp")._prompter.encode(TAGS.end, special=False)
        assert ids[budget : budget + len(end)] == end
        assert thought(None, None, draft == "chain", seed=seed).token_ids[:budget] == result.token_ids[:budget]
        if form is not None:
            assert result.finish_reason == "stop"
            assert re.fullmatch(FORMS[form], result.text.partition(TAGS.end)[2].strip())


def test_a_budget_needs_a_model_that_reasons():
    with pytest.raises(RequestError) as error:
        grammar_engine().prepare(thinking(3))
    assert error.value.param == "reasoning_budget"


def test_an_answer_may_begin_without_reasoning_and_then_has_its_form_at_once():
    engine = grammar_engine(reasoning=TAGS)
    texts = [run(engine, [asked("words", seed=seed)])[0].text for seed in range(8)]
    for text in texts:
        assert re.fullmatch(rf"(?s:\s*<t>.*</t>\s*)?{FORMS['words']}", text) or text.lstrip().startswith("<t>")
