"""docs/errors.md against the code."""

import re
from pathlib import Path

import grpc
from kvstore_client import errors as client_errors
from kvstore_client.hook import errors as hook_errors

from kvstore import errors

TABLE = Path(__file__).parents[2] / "docs" / "errors.md"


def test_the_table_has_every_error_with_its_code():
    service = TABLE.read_text().split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", service, re.MULTILINE))
    assert rows == {name: getattr(errors, name).code for name in errors.__all__}


def test_the_table_has_every_error_of_the_worker():
    worker = TABLE.read_text().split("\n## ")[1]
    rows = re.findall(r"^\| `(\w+)` \|", worker, re.MULTILINE)
    raised = {
        name
        for module in (client_errors, hook_errors)
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, client_errors.KVStoreError)
    }
    assert sorted(rows) == sorted(raised)


def test_every_code_is_one_of_grpc():
    for name in errors.__all__:
        assert getattr(errors, name).code in grpc.StatusCode.__members__
