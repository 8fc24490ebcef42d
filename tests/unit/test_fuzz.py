"""Damaged pictures, bodies and files give a result within bounds or an error in words. scripts/fuzz.py runs more."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fuzzing import TARGETS, damaged


@pytest.mark.parametrize("name", TARGETS)
def test_sound_inputs_pass(name):
    for seed in TARGETS[name].seeds():
        TARGETS[name].check(seed)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=40)
@given(st.data())
def test_damage_gives_an_error_in_words_and_nothing_else(name, data):
    target = TARGETS[name]
    target.check(data.draw(damaged(target.seeds())))
