"""Codec plans on disk, for use without a service."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore_client.notices import Notices

if TYPE_CHECKING:
    from kvstore_kernels.codecs.plan import CodecPlan
    from kvstore_kernels.layout import BlockLayout

NOISE_LIMIT = "noise_limit"
"""Tensor of a codec plan: the largest error of K and of V in each layer [layers, 2] that blocks are shared with."""
_MOST_BYTES = 64 * 2**20


class PlanFolder:
    """$XDG_CACHE_HOME/gpu-kvstore/plans/<fingerprint>-<plan name or codec>.plan.

    A file that can't be read is as good as none.
    """

    def __init__(self, folder: Path, notices: Notices) -> None:
        self._folder = folder
        self._notices = notices

    @classmethod
    def of_user(cls, notices: Notices, environ: Mapping[str, str] | None = None) -> PlanFolder:
        """The folder of the user who runs this process."""
        environ = os.environ if environ is None else environ
        base = environ.get("XDG_CACHE_HOME", "")
        root = Path(base) if Path(base).is_absolute() else Path(environ.get("HOME", "/nonexistent")) / ".cache"
        return cls(root / "gpu-kvstore" / "plans", notices)

    def load(self, fingerprint: bytes, layout: BlockLayout, name: str = "") -> CodecPlan | None:
        """The plan kept for a model under a name (default: the codec's), if there is a sound one that fits."""
        path = self._path(fingerprint, name or layout.codec)
        data = _content(path)
        plan = None if data is None else read_plan(data, layout)
        if plan is None and data is not None:
            self._notices.warn("plan-file", f"{path} holds no codec plan for this model; calibrating again")
        return plan

    def named(self, fingerprint: bytes, name: str) -> bytes | None:
        """What is kept for a model under a name, whatever its layout."""
        return _content(self._path(fingerprint, name))

    def save(self, fingerprint: bytes, layout: BlockLayout, plan: CodecPlan, name: str = "") -> None:
        """Keeps a plan, atomically."""
        path = self._path(fingerprint, name or layout.codec)
        data = plan.to_bytes()
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if path.exists() and path.read_bytes() == data:
                return
            fd, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
            temporary = Path(name)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            self._notices.warn("plan-file", f"the codec plan can't be kept in {path}: {error}")

    def _path(self, fingerprint: bytes, name: str) -> Path:
        return self._folder / f"{fingerprint.hex()}-{_name(name)}.plan"


def _content(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES + 1)
    except OSError:
        return None


def _name(codec: str) -> str:
    # Of layers with several codecs the name may be longer than a file's may.
    return codec if codec.isalnum() else hashlib.sha256(codec.encode()).hexdigest()[:32]


def read_plan(data: bytes, layout: BlockLayout) -> CodecPlan | None:
    """The codec plan in `data`, if it is one and fits the layout."""
    from kvstore_kernels.codecs import make_codec
    from kvstore_kernels.codecs.plan import CodecPlan
    from kvstore_kernels.errors import LayoutError, PlanError

    try:
        plan = CodecPlan.from_bytes(data)
        make_codec(layout, plan)
        if NOISE_LIMIT in plan.tensors:
            plan.tensor(NOISE_LIMIT, (layout.layers, 2))
    except (LayoutError, PlanError):
        return None
    return plan
