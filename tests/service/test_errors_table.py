"""docs/errors.md against the code."""

import re
from pathlib import Path

import grpc

from kvstore import errors

TABLE = Path(__file__).parents[2] / "docs" / "errors.md"


def test_the_table_has_every_error_with_its_code():
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", TABLE.read_text(), re.MULTILINE))
    assert rows == {name: getattr(errors, name).code for name in errors.__all__}


def test_every_code_is_one_of_grpc():
    for name in errors.__all__:
        assert getattr(errors, name).code in grpc.StatusCode.__members__
