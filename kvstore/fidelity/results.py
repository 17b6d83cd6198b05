"""The results file of `kvstore fidelity`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from kvstore.demo.claims import Row
from kvstore.demo.results import checkout_commit, describe_device, package_versions
from kvstore.fidelity.claims import claims_from

_PACKAGES = ("hqq", "optimum-quanto")


def make_results(
    rows: Sequence[Row], *, device: str, command: str, commit: str = "", created: datetime | None = None
) -> dict[str, Any]:
    """Everything a reader needs to judge the figures. `commit` where this is no checkout."""
    return {
        "name": "fidelity",
        "device": describe_device(device),
        "versions": package_versions(_PACKAGES),
        "commit": commit or checkout_commit(),
        "created": (created or datetime.now(UTC)).isoformat(timespec="seconds"),
        "command": command,
        "rows": list(rows),
        "claims": [claim.to_json() for claim in claims_from(rows)],
    }
