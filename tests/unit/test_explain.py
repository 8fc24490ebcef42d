"""The picture of architecture and docs, as numbers: which rows exist under a policy, and at which positions."""

from xml.etree import ElementTree

import pytest

from foreglance.cli.rows_text import draw_lines
from foreglance.explain import Explanation, explain, fold, shorten, to_numbers, visible
from foreglance.models.base import HeadSpec
from foreglance.prompt import ImageInput, MRope, OneAxis, make_rows
from foreglance.rows_svg import draw

IMAGE_TOKEN = 9


def explained(token_ids, grids=((2, 2),), rule=None, with_head=True, modules=1) -> Explanation:
    rule = rule or MRope()
    images = [ImageInput(f"image {i}", grid) for i, grid in enumerate(grids)]
    rows = make_rows(token_ids, IMAGE_TOKEN, images, rule)
    head = HeadSpec("toy", 16, 8, rule, (), modules, "input", IMAGE_TOKEN) if with_head else None
    return explain(rows, [f"<{token}>" for token in rows.token_ids], rule, head)


def firsts(explanation: Explanation, name: str) -> list[int | None]:
    """First coordinates by column, None for a hole."""
    track = next(track for track in explanation.tracks if track.name == name)
    return [None if cell is None else cell.position[0] for cell in track.cells]


def test_the_worked_example_of_the_architecture():
    picture = explained([1, 2, 3, IMAGE_TOKEN, 4, 5])
    assert firsts(picture, "target") == [0, 1, 2, 3, 3, 3, 3, 5, 6, 7]
    assert firsts(picture, "see") == [None, 0, 1, 2, 2, 2, 2, 4, 5, 6]
    assert firsts(picture, "placeholder") == firsts(picture, "see")
    assert firsts(picture, "skip") == [None, 0, 1, None, None, None, None, 2, 3, 4]
    assert firsts(picture, "gap") == [None, 1, 2, None, None, None, None, 5, 6, 7]


def test_one_axis_positions_count_rows_and_only_a_gap_has_a_hole():
    picture = explained([1, IMAGE_TOKEN, 4], rule=OneAxis())
    assert firsts(picture, "target") == [0, 1, 2, 3, 4, 5, 6]
    assert firsts(picture, "see") == [None, 0, 1, 2, 3, 4, 5]
    assert firsts(picture, "skip") == [None, None, None, None, None, 0, 1]
    assert firsts(picture, "gap") == [None, None, None, None, None, 5, 6]


def test_rows_of_a_cache_are_consecutive_whatever_its_positions():
    picture = explained([1, 2, IMAGE_TOKEN, 3, IMAGE_TOKEN, 4], grids=((1, 3), (2, 1)))
    for track in picture.tracks:
        assert [cell.row for cell in track.cells if cell is not None] == list(range(track.num_rows + 1)), track.name
    assert [track.num_rows for track in picture.tracks] == [9, 8, 3, 8, 3]


def test_only_see_feeds_image_embeddings():
    picture = explained([1, IMAGE_TOKEN, 2])
    inputs = {track.name: {cell.input for cell in track.cells if cell is not None} for track in picture.tracks}
    assert inputs == {
        "target": {"token", "image"},
        "see": {"token", "image"},
        "skip": {"token"},
        "placeholder": {"token", "placeholder"},
        "gap": {"token"},
    }


def test_without_a_head_there_is_only_the_target():
    assert [track.name for track in explained([1, IMAGE_TOKEN, 2], with_head=False).tracks] == ["target"]


def test_each_module_of_a_chain_has_a_track_that_takes_the_input_one_row_further_on():
    picture = explained([1, 2, IMAGE_TOKEN, 4, 5], grids=((1, 2),), rule=OneAxis(), modules=3)
    assert [track.name for track in picture.tracks[:4]] == ["target", "see/1", "see/2", "see/3"]
    assert firsts(picture, "see/1") == [None, 0, 1, 2, 3, 4, 5]
    assert firsts(picture, "see/2") == [None, None, 0, 1, 2, 3, 4]
    assert firsts(picture, "see/3") == [None, None, None, 0, 1, 2, 3]
    assert firsts(picture, "skip/1") == [None, 0, None, None, 1, 2, 3]
    assert firsts(picture, "skip/2") == [None, None, None, None, None, 0, 1], "an input up to its own is an image"
    assert len({track.meaning for track in picture.tracks}) == len(picture.tracks)
    assert firsts(explained([IMAGE_TOKEN], modules=3), "skip/2") == [None] * 5
    assert firsts(explained([1], grids=(), modules=3), "see/3") == [None, None], "shorter than the chain"


def test_numbers_say_in_which_column_each_row_stands():
    numbers = to_numbers(explained([1, 2, 3, IMAGE_TOKEN, 4, 5]))
    assert numbers["rows"] == 9 and numbers["images"] == [{"start": 3, "stop": 7, "grid": [2, 2]}]
    skip = next(track for track in numbers["tracks"] if track["name"] == "skip")
    assert skip == {
        "name": "skip",
        "rows": 4,
        "columns": [1, 2, 7, 8, 9],
        "positions": [[0] * 3, [1] * 3, [2] * 3, [3] * 3, [4] * 3],
        "inputs": ["token"] * 5,
    }
    target = numbers["tracks"][0]
    assert target["positions"][3:7] == [[3, 3, 3], [3, 3, 4], [3, 4, 3], [3, 4, 4]]


@pytest.mark.parametrize("num_text", [1, 9, 10, 300])
def test_shortening_shows_or_counts_every_column_once(num_text):
    picture = explained([1] * num_text + [IMAGE_TOKEN] + [2] * num_text, grids=((4, 5),))
    slots = shorten(picture)
    assert [slot.start for slot in slots] == [0, *(slot.stop for slot in slots[:-1])]
    assert slots[-1].stop == picture.num_columns
    assert len(slots) <= 9 + 5 + 9
    assert all(slot.stop - slot.start > 1 for slot in slots if slot.is_elided)


def test_lines_keep_to_the_room_and_hold_images_whole():
    picture = explained([*[1] * 5, IMAGE_TOKEN, 1, 1, IMAGE_TOKEN, *[1] * 5], grids=((2, 2), (2, 2)))
    slots = shorten(picture)
    lines = fold(slots, [1] * len(slots), 9)
    assert [slot for line in lines for slot in line] == slots
    assert [len(line) for line in lines] == [9, 9, 3]
    for block in (0, 1):
        assert sum(any(slot.block == block for slot in line) for line in lines) == 1


def test_lines_are_about_equally_long():
    slots = shorten(explained([1] * 8, grids=()))
    assert [len(line) for line in fold(slots, [1] * len(slots), 8)] == [5, 4]


@pytest.mark.parametrize("all_axes", [False, True])
def test_the_svg_is_well_formed_self_contained_and_bounded(all_axes):
    picture = explained([1, 2, IMAGE_TOKEN, *[3] * 300], grids=((6, 7),))
    text = draw(picture, all_axes, "a <model> & more")
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert int(root.get("width")) < 1200 and int(root.get("height")) < 1200
    assert "href" not in text and "url(" not in text
    words = ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "image 1: 6 × 7 = 42 rows" in words and "38 more" in words
    assert words.count("…") == 5 + 3  # text is left out in all tracks, image rows in the three that have some
    fills = [element.get("fill") for element in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert fills[0] == "#ffffff"


def test_the_terminal_picture_aligns_drafts_with_the_rows_whose_input_they_take(capsys):
    lines = [line.plain.split() for line in draw_lines(explained([1, 2, 3, IMAGE_TOKEN, 4, 5]), False, 100)]
    assert ["target", "0", "1", "2", "[", "3", "3", "3", "3]", "5", "6", "7"] in lines
    assert ["see", "·", "0", "1", "[", "2", "2", "2", "2]", "4", "5", "6"] in lines
    assert ["skip", "·", "0", "1", "[", "·", "·", "·", "·]", "2", "3", "4"] in lines


def test_lines_fit_the_terminal_and_wide_characters_stay_in_their_columns():
    rows = make_rows([1, 2, 3, IMAGE_TOKEN, *[4] * 20], IMAGE_TOKEN, [ImageInput("image", (4, 4))], MRope())
    head = HeadSpec("toy", 16, 8, MRope(), (), 1, "input", IMAGE_TOKEN)
    picture = explain(rows, ["描述图像图像"] * len(rows), MRope(), head)
    band = [line for line in draw_lines(picture, False, 70) if " rows: " not in line.plain]
    assert len(band) > 6 and max(line.cell_len for line in band) <= 70
    assert len({line.cell_len for line in band[:7]}) == 1


def test_all_axes_are_drawn_on_request():
    lines = [line.plain.split() for line in draw_lines(explained([1, IMAGE_TOKEN, 4]), True, 100)]
    assert ["target", "w", "0", "[", "1", "2", "1", "2]", "3", "4"] in lines


def test_labels_show_white_space_and_hold_no_control_characters():
    assert visible(" a\n\t") == "␣a↵⇥"
    assert visible("\x1b") == "∅"
