"""Both position rules against a plain reference; what may follow what."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreglance.prompt import ImageInput, MRope, OneAxis, PositionError, Positions, Span, make_rows, spans_of
from foreglance.request import RequestError

sides = st.integers(1, 7)
spans = st.lists(
    st.one_of(
        st.integers(1, 9).map(Span),
        st.tuples(sides, sides).map(lambda grid: Span(grid[0] * grid[1], grid)),
    ),
    min_size=1,
    max_size=6,
)


def reference(spans):
    """Row by row: text counts up on all axes, an image spreads over two and moves on by its larger side."""
    rows, start = [], 0
    for span in spans:
        if span.grid is None:
            for _ in range(span.num_rows):
                rows.append((start, start, start))
                start += 1
        else:
            for y in range(span.grid[0]):
                for x in range(span.grid[1]):
                    rows.append((start, start + y, start + x))
            start += max(span.grid)
    return rows, start


def image_mask(spans):
    return np.concatenate([np.full(span.num_rows, span.grid is not None) for span in spans])


@given(spans)
def test_three_axes_are_placed_as_the_reference_places_them(spans):
    placed, (rows, after) = MRope().place(spans), reference(spans)
    assert [placed.at(i) for i in range(len(placed))] == rows
    if spans[-1].grid is None or spans[-1].num_rows == max(spans[-1].grid) * min(spans[-1].grid):
        assert MRope().following(placed.at(-1)) == after


@given(spans)
def test_one_axis_counts_rows(spans):
    placed = OneAxis().place(spans)
    assert placed.coords.tolist() == [list(range(sum(span.num_rows for span in spans)))]
    assert OneAxis().following(placed.at(-1)) == len(placed)


@given(spans, st.data())
def test_what_a_rule_places_it_accepts_in_any_pieces(spans, data):
    for rule in (MRope(), OneAxis()):
        placed, mask = rule.place(spans), image_mask(spans)
        cuts = sorted(data.draw(st.sets(st.integers(1, len(placed)), max_size=4)) | {len(placed)})
        last, start = None, 0
        for cut in cuts:
            rule.check(last, placed.part(start, cut), mask[start:cut])
            last, start = placed.at(cut - 1), cut


@given(spans, st.data())
def test_a_token_row_that_does_not_go_forward_is_refused(spans, data):
    for rule in (MRope(), OneAxis()):
        placed = rule.place([*spans, Span(3)])
        last, new = placed.at(-4), placed.part(len(placed) - 3, len(placed))
        back = data.draw(st.integers(1, 5))
        with pytest.raises(PositionError, match="holds its last row"):
            rule.check(last, Positions(new.coords - back), np.zeros(3, bool))


def test_one_axis_refuses_holes_and_a_start_above_zero():
    for last, start in (((3,), 5), ((3,), 3), (None, 1)):
        with pytest.raises(PositionError, match="without holes"):
            OneAxis().check(last, Positions.run(start, 2, 1), np.zeros(2, bool))
    OneAxis().check((3,), Positions.run(4, 2, 1), np.ones(2, bool))


def test_an_image_row_may_share_a_coordinate_but_never_goes_back():
    MRope().check((5, 5, 5), Positions(np.array([[5, 5], [5, 6], [5, 5]])), np.ones(2, bool))
    for coords in ([[4], [5], [5]], [[5], [4], [5]]):
        with pytest.raises(PositionError, match="never go back"):
            MRope().check((5, 5, 5), Positions(np.array(coords)), np.ones(1, bool))


@pytest.mark.case("A2")
def test_row_count_and_coordinate_are_different_things_after_a_wide_image():
    """Case A2: an image of 2 x 9 has 18 rows and moves the text coordinate by 9."""
    placed = MRope().place([Span(3), Span(18, (2, 9)), Span(2)])
    assert len(placed) == 23
    assert placed.at(-1) == (13, 13, 13)


@given(st.lists(st.sampled_from("ti"), min_size=1, max_size=12), st.data())
def test_placeholders_become_the_rows_of_their_images(kinds, data):
    images = [ImageInput(f"{i}", data.draw(st.tuples(sides, sides))) for i in range(sum(kind == "i" for kind in kinds))]
    rows = make_rows([9 if kind == "i" else 5 for kind in kinds], 9, images, MRope())
    left = iter(range(len(images)))
    want = []
    for kind in kinds:
        index = next(left) if kind == "i" else -1
        want += [(9, index, o) for o in range(images[index].num_rows)] if kind == "i" else [(5, -1, 0)]
    assert list(zip(rows.token_ids.tolist(), rows.image.tolist(), rows.offset.tolist(), strict=True)) == want
    assert rows.positions.coords.tolist() == MRope().place(spans_of(rows.image, images)).coords.tolist()
    assert rows.num_image_rows == sum(image.num_rows for image in images)


def test_a_placeholder_without_an_image_is_refused():
    for ids, images in (([9, 9], 1), ([5], 1), ([9], 0)):
        with pytest.raises(RequestError) as refused:
            make_rows(ids, 9, [ImageInput("x", (1, 1))] * images, OneAxis())
        assert refused.value.code == "image_count_mismatch"


def test_the_identity_of_an_image_row_is_its_content_and_place():
    def of(digest, grid, ids=(5, 9, 6)):
        return make_rows(ids, 9, [ImageInput(digest, grid)], OneAxis()).identities()

    one = of("one", (2, 2))
    assert one.tolist() == of("one", (2, 2)).tolist()
    assert len(set(one.tolist())) == 6 and (one[1:5] < 0).all()
    assert not np.isin(of("two", (2, 2))[1:5], one).any(), "the same size is not the same image"
