"""Pictures in the context, positions and draft content: what users of other engines saw go wrong (cases A)."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from support.embedded import BLUE, GREEN, SEEING, ask, engine_of, loaded, picture, plain, run, same, scene, talk

from foreglance import Engine, Message, RequestError, Settings
from foreglance.bench.prompts import text_cases
from foreglance.drafters.mtp import MtpDrafter
from foreglance.drafters.mtp_chain import ChainDrafter
from foreglance.drafters.rows import RowMap
from foreglance.images import open_picture
from foreglance.models.weights import find_model
from foreglance.prompt import Positions, make_rows
from foreglance.request import Image, Text

OWN_ROWS = ("tiny-qwen", "tiny-step")  # drafts with caches of their own


def every_step(engine, *requests):
    """Step to the end; gives the engine after each step."""
    for request in requests:
        engine.add(request)
    while not engine.is_idle:
        engine.step()
        yield engine


def lanes_of(engine):
    """(rows in its cache, its lane) for every running sequence and module of the draft head."""
    drafter = engine._drafters["mtp"]
    is_chain = engine.target.head.spec.num_modules > 1
    lanes = [module.lanes for module in drafter._modules] if is_chain else [drafter._lanes]
    for one in lanes:
        for sequence in engine._scheduler.running:
            if sequence.id in one.store:
                yield one.store[sequence.id].rows, one[sequence], sequence


@pytest.mark.case("A1")
@pytest.mark.parametrize("policy", ("see", "skip"))
@pytest.mark.parametrize("name", OWN_ROWS)
def test_a_drafts_cache_holds_exactly_the_rows_that_its_policy_says(name, policy):
    """After every step: a draft row for each target row whose state and input are known, none short and none too many;
    what waits for its input is what the target has beyond."""
    request = ask("What is in the image?", [picture(448, 448)], policy=policy, depth=3, max_tokens=24)
    engine, seen = engine_of(name), 0
    for one in every_step(engine, request):
        for rows, lane, sequence in lanes_of(one):
            assert rows == lane.map.count(lane.first), "rows in the cache against rows of the mapping"
            if lane.map.shift == 1:
                assert lane.first + lane.num_waiting == sequence.committed
            seen += 1
    assert seen > 6
    (on,) = run(engine_of(name), replace(request, id="again"))
    same(on, plain(request, name))
    assert sum(on.timings.drafted) and on.draft.off_because is None


@pytest.mark.case("A2", "A4")
@pytest.mark.parametrize(("name", "depth"), [("tiny-qwen", 8), ("tiny-qwen", 2), ("tiny-step", 3)])
def test_drafts_stand_at_the_targets_positions_in_every_round(name, depth):
    """A wide picture, where row count and position part, and 200 tokens: each draft row stands where the target's row
    of the same input stands, moved by one constant, the first guess after the picture and after every verify too."""
    engine, seen, known = engine_of(name), [], {}

    class Watched(RowMap):
        def positions(self, start, stop):
            made = super().positions(start, stop)
            if self.shift == 1:  # the first module, or the only one
                seen.append((start, made.coords))
            return made

        def coordinate(self, row):
            made = super().coordinate(row)
            seen.append((row, np.full((engine.target.spec.rule.axes, 1), made)))
            return made

    head = engine.target.head
    engine.use_drafter((MtpDrafter if head.spec.num_modules == 1 else ChainDrafter)(head, row_map=Watched))
    request = ask("What is in the image?", [picture(1280, 320, BLUE)], depth=depth, max_tokens=200, ignore_eos=True)
    for one in every_step(engine, request):
        for sequence in one._scheduler.running:
            known[sequence.id] = sequence.positions(1, sequence.known + depth + 1).coords
    (want,) = known.values()
    want = want - want[:1, :1]
    assert len(seen) > 30
    for first, coords in seen:
        np.testing.assert_array_equal(coords, want[:, first : first + coords.shape[1]])


@pytest.mark.case("A2")
def test_positions_of_its_own_cost_a_draft_nothing():
    """The same head fed the target's true positions accepts as much, within two guesses of a hundred."""

    class TruePositions(RowMap):
        def _number(self, rule, position_of):
            first = self.shift
            return Positions(self._sequence.positions(first, first + len(self._kept)).coords)

    rates = []
    for row_map in (RowMap, TruePositions):
        engine = engine_of("tiny-qwen")
        engine.use_drafter(MtpDrafter(engine.target.head, row_map=row_map))
        results = run(engine, *(ask("Describe the image.", [scene(n)], max_tokens=40) for n in range(4)))
        rates.append(sum(r.timings.accepted[0] for r in results) / sum(r.timings.drafted[0] for r in results))
    assert abs(rates[0] - rates[1]) < 0.02 and rates[0] > 0.6


@pytest.fixture(scope="module")
def fine_grained(tmp_path_factory):
    """tiny-qwen with pictures of up to 1,100 rows instead of 16."""
    folder = tmp_path_factory.mktemp("fine") / "fine-qwen"
    shutil.copytree(find_model("tiny-qwen"), folder)
    path = folder / "preprocessor_config.json"
    values = json.loads(path.read_text()) | {"size": {"shortest_edge": 4096, "longest_edge": 1100 * 16 * 16}}
    path.write_text(json.dumps(values))
    return str(folder)


@pytest.mark.case("A3")
def test_deeper_drafts_gain_more_also_behind_a_picture_of_a_thousand_rows(fine_grained):
    """Tokens per step do not fall with depth, and rows lie in slots by their index: the text is the same throughout."""
    engine = Engine.load(fine_grained, Settings(try_drafts=False))
    big = picture(1024, 256, GREEN)
    gains, texts = [], set()
    for depth in (2, 6, 15):
        (result,) = run(engine, ask("What is in the image?", [big], depth=depth, max_tokens=40, ignore_eos=True))
        assert result.timings.image_rows >= 1000
        gains.append(result.timings.tokens_per_step)
        texts.add(result.token_ids)
    assert gains[1] >= 0.95 * gains[0] > 1 and gains[2] >= 0.95 * gains[1]
    (off,) = run(engine, ask("What is in the image?", [big], draft="none", max_tokens=40, ignore_eos=True))
    assert texts == {off.token_ids}


@pytest.mark.case("A8")
@pytest.mark.parametrize("name", SEEING)
def test_a_picture_and_plain_text_share_a_batch(name):
    requests = [ask("Describe the image.", [scene(3)], max_tokens=24), ask("Tell me a story.", max_tokens=24)]
    for on, request in zip(run(engine_of(name), *requests), requests, strict=True):
        same(on, plain(request, name))


def conversation(images_in_turn_2):
    return [
        Message.of("user", "What do you see?", [scene(4)]),
        Message.of("assistant", "I see some shapes."),
        Message.of("user", "And here?", images_in_turn_2),
    ]


@pytest.mark.case("A9")
@pytest.mark.parametrize("name", SEEING)
def test_large_and_several_pictures_run_and_leave_nothing(name):
    """2048 x 2048, two in one message, a second one in turn 2; again and again on the same slots."""
    engine = engine_of(name, slots=1, image_cache_bytes=1 << 20)
    shapes = [
        ask("What is this?", [picture(2048, 2048)], max_tokens=12),
        ask("Compare these.", [scene(5), scene(6)], max_tokens=12),
        talk(conversation([scene(7)]), max_tokens=12),
    ]
    for turn in range(2):
        for number, request in enumerate(shapes):
            (result,) = run(engine, replace(request, id=f"{turn} {number}"))
            assert engine._store.pages_held == 0 and not engine._running
            same(result, plain(request, name))
    assert engine._embeddings.bytes_held <= 1 << 20


@pytest.mark.case("A11")
@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize("size", ((1, 1), (640, 480), (3, 300)))
def test_a_picture_of_any_size_drafts_on(name, size):
    request = ask("What colour is this?", [picture(*size)], max_tokens=16)
    (on,) = run(engine_of(name), request)
    same(on, plain(request, name))
    assert on.draft.off_because is None and sum(on.timings.accepted) > 0


@pytest.mark.case("A11")
@pytest.mark.parametrize("name", SEEING)
def test_guesses_behind_a_picture_stand_about_as_often_as_in_text(name):
    def first_guesses(requests):
        timings = [result.timings for result in run(engine_of(name), *requests)]
        return sum(t.accepted[0] for t in timings) / sum(t.drafted[0] for t in timings)

    seen = first_guesses([ask("Describe the image.", [scene(n)], max_tokens=32) for n in range(8, 20)])
    told = first_guesses([talk(case.messages, max_tokens=24) for case in text_cases(6)])
    assert seen >= 0.8 * told


@pytest.mark.case("A13", "A14")
@pytest.mark.parametrize("name", SEEING)
def test_drafts_neither_hide_the_picture_nor_change_the_answer(name):
    """The same prompt rows, the same text as with drafts off, and another picture is another answer."""
    texts = set()
    for number in (13, 14):
        request = ask("Where is the object?", [scene(number)], max_tokens=32)
        (on,), off = run(engine_of(name), request), plain(request, name)
        same(on, off)
        assert on.timings.prompt_tokens == off.timings.prompt_tokens > on.timings.image_rows > 0
        texts.add(on.text)
    assert len(texts) == 2


@pytest.mark.case("A16", "A17")
@pytest.mark.parametrize("weights", ("fp32", "fp16"))
def test_an_assistant_reads_the_targets_cache_beyond_the_sliding_window(weights):
    """A prompt of more rows than the window, and past where the window's buffer is compacted."""
    engine = Engine.load(
        "tiny-gemma", Settings(prefix_cache_bytes=0, weights=weights), draft_model="tiny-gemma-assistant"
    )
    window = next(spec.window for spec in engine.target.spec.caches if spec.window)
    past = [
        m for case in text_cases(16) for m in (*case.messages, Message.of("assistant", "I will keep that in mind."))
    ]
    rates = []
    for text in ("Tell me a story.", "Who are you?"):
        request = talk([*past, Message.of("user", text)], depth=4, max_tokens=32)
        (result,) = run(engine, request)
        assert result.timings.prompt_tokens > window + 64 and result.draft.kind == "assistant"
        rates.append((result.timings.accepted[0], result.timings.drafted[0]))
    accepted, drafted = map(sum, zip(*rates, strict=True))
    assert accepted / drafted > 0.4


@pytest.mark.case("A19")
@pytest.mark.parametrize("name", SEEING)
def test_pictures_of_different_size_run_side_by_side(name):
    """Started steps apart, so that each is in another phase when the other begins."""
    engine = engine_of(name)
    pictures = [picture(900, 100)], [picture(100, 700)], []
    requests = [ask("What is it?", images, max_tokens=24) for images in pictures]
    results, waiting = {}, list(requests)
    while waiting or not engine.is_idle:
        if waiting:
            engine.add(waiting.pop(0))
        for _ in range(3):
            results |= {event.request_id: event.result for event in engine.step() if event.result}
    for request in requests:
        same(results[request.id], plain(request, name))


@pytest.mark.case("A20")
@pytest.mark.parametrize("name", OWN_ROWS)
def test_a_picture_across_chunk_borders_without_an_image_cache(name):
    """Chunks of 5 rows cut every picture; its embeddings are kept with the request and nowhere else."""
    requests = [ask("Compare.", [scene(20), scene(21)], depth=depth, max_tokens=24) for depth in (1, 4)]
    for request in requests:
        (on,) = run(engine_of(name, grid=5, image_cache_bytes=0), request)
        same(on, plain(request, name, grid=5))


@pytest.mark.case("A22")
@pytest.mark.parametrize("name", SEEING)
def test_eight_at_once_half_of_them_with_pictures(name):
    requests = [
        ask(f"Describe the image. {n}", [scene(n)] if n % 2 else [], depth=1 + n % 4, max_tokens=10, seed=n,
            temperature=0.7 * (n % 3))
        for n in range(8)
    ]  # fmt: skip
    for request, on in zip(requests, run(engine_of(name, slots=8), *requests), strict=True):
        same(on, plain(request, name))


@pytest.mark.case("A23")
@pytest.mark.parametrize("name", SEEING)
def test_the_limit_of_pictures_holds_and_the_engine_starts_with_any(name):
    engine = engine_of(name, max_images=2)
    with pytest.raises(RequestError, match="holds 3 images, the limit is 2") as refused:
        engine.add(ask("Compare.", [scene(n) for n in range(3)]))
    assert refused.value.code == "too_many_images" and engine.is_idle
    run(engine, ask("Compare.", [scene(n) for n in range(2)], max_tokens=4))
    assert engine_of(name, max_images=1000).is_idle


@pytest.mark.case("A24")
def test_a_model_with_three_axes_drafts_for_text():
    """As an independent draft of itself every guess stands: its axes are equal and go on as they should."""
    request = ask("Tell me a story.", draft="model", depth=4, max_tokens=24)
    (on,) = run(engine_of("tiny-qwen", "tiny-qwen"), request)
    same(on, plain(request))
    assert on.timings.acceptance == 1.0


@pytest.mark.case("A25")
def test_a_text_draft_gets_the_text_alone_with_a_picture_in_the_middle():
    messages = [
        Message.of("user", "Hello!"),
        Message.of("assistant", "Hi! Show me a picture."),
        Message("user", (Text("Look at"), Image(scene(30)), Text("and say what it is."))),
    ]
    engine = engine_of("tiny-qwen", "tiny-text")
    seen, request = [], talk(messages, draft="model", max_tokens=24)
    store = engine._drafters["model"].stores[0]
    for one in every_step(engine, request):
        for sequence in one._scheduler.running:
            if sequence.id in store and not sequence.in_prefill:
                seen.append(store[sequence.id].last[0] + 1 == store[sequence.id].rows)
    assert seen and all(seen), "positions count its own rows"
    (on,) = run(engine_of("tiny-qwen", "tiny-text"), replace(request, id="again"))
    same(on, plain(request))
    assert on.draft.model == "tiny-text" and sum(on.timings.accepted) > 0


@pytest.mark.case("A6")
def test_a_target_that_drops_image_rows_drops_them_for_the_draft_too():
    """Rows are made once and both sides read them: a family whose processor keeps fewer rows than the picture has
    patches gives its draft the same fewer rows, at the same positions."""
    target = loaded("tiny-qwen").target
    whole = target.prepare(open_picture(scene(31), 10**6))
    pruned = replace(whole, grid=(whole.grid[0] // 2, whole.grid[1]), digest="pruned")
    engine = engine_of("tiny-qwen")
    embed = target.embed_image
    spec = target.spec
    rows = make_rows([11, spec.image_token, 12, 13], spec.image_token, [pruned], spec.rule)
    assert rows.num_image_rows == whole.num_rows // 2
    sequence = engine.add_rows(ask("unused", depth=3), rows)
    engine.target.embed_image = lambda image: embed(whole)[: image.num_rows]
    try:
        counts = []
        while not engine.is_idle:
            events = engine.step()
            counts += [(rows, lane.map.count(lane.first)) for rows, lane, _ in lanes_of(engine)]
    finally:
        del engine.target.embed_image
    assert events[-1].result.error is None and events[-1].result.draft.off_because is None
    assert counts and all(have == want for have, want in counts) and sequence
