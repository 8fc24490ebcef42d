"""docs/field-cases.md says what the tests hold, and every case has one."""

from support.field_cases import CASES, PAGE, REPOSITORIES, held, page


def test_every_case_is_held_by_a_test_and_every_mark_names_a_case():
    marked = {id for test in held() for id in test.ids}
    assert marked == set(CASES), "cases without a test, or marks without a case"


def test_the_page_is_what_the_script_writes():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python scripts/field_cases.py`"


def test_a_thread_is_named_by_a_known_repository_and_number():
    for id, case in CASES.items():
        for source in filter(None, case.seen.split(", ")):
            short, *numbers = source.split(" ")
            assert short in REPOSITORIES and numbers and all(number.isdigit() for number in numbers), id


def test_a_mark_is_found_whatever_stands_around_it(tmp_path):
    (tmp_path / "test_x.py").write_text(
        "import pytest\n@pytest.mark.parametrize('a', (1,))\n@pytest.mark.case('A1', 'B2')\ndef test_one(a): ...\n"
        "def test_two(): ...\n"
    )
    (one,) = held(tmp_path)
    assert (one.name, one.ids) == ("test_one", ("A1", "B2"))
