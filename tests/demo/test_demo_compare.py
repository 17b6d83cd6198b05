"""The rule for equal texts."""

import pytest

from kvstore.demo.compare import TIE, compare_tokens


@pytest.mark.parametrize(
    ("reference", "other", "gaps", "equal", "where"),
    [
        ([], [], [], True, None),
        ([1, 2, 3], [1, 2, 3], [], True, None),
        ([1, 2, 3], [1, 9, 3], [1, TIE, 1], False, 1),
        ([1, 2, 3], [1, 9, 3], [1, TIE / 2, 1], True, 1),
        # What follows a tie is another text: it does not count.
        ([1, 2, 3, 4], [1, 9, 8, 7], [1, 0.0, 5, 5], True, 1),
        # A tie later on does not excuse an earlier difference.
        ([1, 2, 3], [9, 2, 4], [1, 1, 0.0], False, 0),
        ([1, 2, 3], [1, 2], [1, 1, 1], False, 2),
        ([1, 2], [1, 2, 3], [1, 1], False, 2),
        # Without a gap nothing is excused.
        ([1], [2], [], False, 0),
    ],
)
def test_compare_tokens(reference: list, other: list, gaps: list, equal: bool, where: int | None) -> None:
    found = compare_tokens(reference, other, gaps)
    assert (found.equal, found.first_difference) == (equal, where)


def test_describe_names_the_place_and_the_tie() -> None:
    assert compare_tokens([1], [1]).describe() == "equal"
    assert compare_tokens([1], [2], [0.5]).describe() == "differs at token 0, gap 5.0e-01"
    assert "(tie)" in compare_tokens([1], [2], [1e-6]).describe()
