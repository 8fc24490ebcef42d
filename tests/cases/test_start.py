"""What is said or refused when an engine starts (cases E): options that are not there, pairs that do not fit."""

import pytest
from typer.testing import CliRunner

from foreglance import Settings
from foreglance.cli import app


@pytest.mark.case("E7")
@pytest.mark.parametrize("option", ("tensor_parallel", "pipeline_parallel", "device_map"))
def test_a_model_is_not_split_and_who_asks_for_it_is_told_at_start(option):
    """Nothing is accepted and ignored: the command line names the option, Python the argument."""
    flag = f"--{option.replace('_', '-')}"
    for command in ("generate", "serve"):
        refused = CliRunner().invoke(app, [command, "--prompt", "Hello!", flag, "2"])
        assert refused.exit_code == 2 and "No such option" in refused.output
    with pytest.raises(TypeError, match=option):
        Settings(**{option: 2})


@pytest.mark.case("A24", "A25")
def test_a_draft_with_other_words_is_refused_on_the_command_line():
    refused = CliRunner().invoke(
        app, ["generate", "--model", "tiny-qwen", "--draft", "tiny-step", "--prompt", "Hello!"], catch_exceptions=True
    )
    assert refused.exit_code == 2
    words = refused.output + str(refused.exception)
    assert "tiny-step" in words and "vocabularies must be equal" in words
