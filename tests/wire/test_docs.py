"""What docs/server.md shows works as it stands there."""

import doctest
import re
from pathlib import Path

from foreglance.serve.schema import UNSUPPORTED, known_fields

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "server.md").read_text()


FIXED = ("model.id", "off.timings")  # what is shown for these holds for any model


def test_the_transcript_runs(served):
    shown = "\n".join(re.findall(r"```pycon\n(.*?)```", PAGE, re.DOTALL)).replace("http://127.0.0.1:8321", served.url)
    examples, names, compared = doctest.DocTestParser().get_examples(shown), {}, 0
    for example in examples:
        try:
            result = eval(example.source, names)
        except SyntaxError:
            exec(example.source, names)
            continue
        if any(word in example.source for word in FIXED):
            assert repr(result) == example.want.strip()
            compared += 1
    assert len(examples) > 15 and compared == len(FIXED)
    served.settle()


def test_every_field_that_is_named_is_known_or_refused_on_purpose():
    table = PAGE.split("## What is taken and what is refused")[1].split("Every answer carries")[0]
    named = {name for name in re.findall(r"`([a-z_]+)`", table)} - {
        "image_url",
        "input_image",
        "function_call_output",
        "drafted",
    }
    assert named <= known_fields() | set(UNSUPPORTED) | {"include_usage"}, named
