"""Every family of docs/families.md: what the table says is what happens (b014, b164, b184)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kvstore_client import connect
from kvstore_client.hook import AttachError, UnsupportedInputError, attach

sys.path.insert(0, str(Path(__file__).parent))
import families

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
_NAMES = list(families.FAMILIES)
# The others take another half minute.
_QUICK = (
    "Llama",
    "Mistral, sliding",
    "Gemma 3",
    "gpt-oss",
    "GPT-2",
    "DeepSeek-V3, latents",
    "GPT-J",
    "DiffLlama",
    "Llama 4",
)
_MUST_BE_SERVED = _NAMES[: _NAMES.index("Cohere 2")]


@pytest.fixture
def embedded() -> Iterator[Any]:
    families.quiet()
    with connect("embedded", budget=64 * 2**20) as store:
        yield store


@pytest.mark.parametrize(
    "family", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in families.FAMILIES]
)
def test_a_family_does_what_the_table_says(embedded: Any, family: str) -> None:
    row = families.measure(family, embedded)
    if family in _MUST_BE_SERVED:
        assert row.served != families.REFUSED
    if row.served != families.REFUSED:
        figures = (row.passthrough, row.warm, row.beam, row.crop, row.assisted)
        assert set(figures) == {"yes"}, row
        assert row.batch == ("yes" if row.served == families.BLOCKS else "native")
        assert row.int8 is not None
        assert row.int8 < 0.05
    line = families.table([row]).splitlines()[2]
    # Rounding differs between processors: without the last column.
    assert line.rpartition(" | ")[0] in PAGE.read_text(), "scripts/generate_families.py writes the page"


def test_every_family_is_in_the_table_and_no_other() -> None:
    page = PAGE.read_text()
    lines = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.startswith("| ")]
    assert [name for name in lines if name in families.FAMILIES] == _NAMES
    assert len(lines) == len(_NAMES) + 2


@pytest.mark.parametrize("codec", ["k8v4", "int4", "int8:1,int4:3"])
@pytest.mark.parametrize("family", ["GPT-J", "DeepSeek-V3, latents"])
def test_tensors_come_from_every_codec(embedded: Any, family: str, codec: str) -> None:
    """Latents are K of 32 and V of 8 channels, which the codec rotates (b033, b052)."""
    model = families.make_model(family)
    ids = torch.randint(3, families.VOCABULARY, (2, 150), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
    with attach(embedded, model, codec=codec) as attachment:
        assert attachment.plan.gathers
        cold = families._tokens(model, ids)
        embedded.flush()
        # Two rows without padding go together, warm as well.
        warm = families._tokens(model, ids)
        assert embedded.last_report.path == "kvstore"
        assert [row.reused_tokens for row in embedded.last_report.rows] == [128, 128]
        assert cold.shape == warm.shape == (2, families.ANSWER)
        with attachment.cache(ids) as cache, torch.no_grad():
            cache.batch_select_indices(torch.tensor([1, 0]))
            past = cache.get_seq_length()
            placed = torch.arange(past, 150)[None]
            found = model(ids.flip(0)[:, past:], past_key_values=cache, position_ids=placed).logits[:, -1]
    assert families._difference(expected.flip(0), found) < 0.3


def test_a_padded_batch_of_a_model_with_its_own_attention_says_why_it_runs_native(embedded: Any) -> None:
    model = families.make_model("GPT-J")
    ids, mask = families._padded()
    with attach(embedded, model) as attachment:
        families._tokens(model, ids, mask)
        report = embedded.last_report
        assert report.path == "native"
        assert "where a padded row begins" in report.warnings[0]
        with pytest.raises(UnsupportedInputError, match="where a padded row begins"):
            attachment.cache(ids, mask)
        with pytest.raises(AttachError, match="max_error"):
            attach(embedded, families.make_model("GPT-J"), max_error=0.1)
