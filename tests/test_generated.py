"""The committed generated code is what the protos generate today."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("kvstore_proto") / "v1"


def _modules(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / PACKAGE).iterdir() if path.is_file()}


def test_generated_code_is_current(tmp_path: Path) -> None:
    generator = ROOT / "scripts" / "generate_proto.py"
    subprocess.run([sys.executable, str(generator), "--target", str(tmp_path)], check=True, timeout=60)
    fresh, committed = _modules(tmp_path), _modules(ROOT / "proto" / "gen")
    assert sorted(fresh) == sorted(committed)
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert not stale, f"run `make proto`: {stale}"


def test_every_proto_is_generated() -> None:
    sources = {path.stem for path in (ROOT / "proto" / "kvstore" / "v1").glob("*.proto")}
    generated = {path.name.removesuffix("_pb2.py") for path in (ROOT / "proto" / "gen" / PACKAGE).glob("*_pb2.py")}
    assert sources == generated
