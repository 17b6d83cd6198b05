"""Measures every family of tests/hook/families.py and writes the table of docs/families.md.

python scripts/generate_families.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "hook"))

import families  # noqa: E402
import transformers  # noqa: E402
from kvstore_client import connect  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
BEGIN, END = "<!-- families:begin -->", "<!-- families:end -->"


def main() -> None:
    families.quiet()
    rows = []
    for name in families.FAMILIES:
        with connect("embedded", budget=64 * 2**20) as store:
            rows.append(families.measure(name, store))
        sys.stdout.write(f"{rows[-1]}\n")
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    origin = f"Measured with transformers {transformers.__version__}, on a CPU."
    PAGE.write_text(f"{before}{BEGIN}\n{origin}\n\n{families.table(rows)}\n{END}{after}")


if __name__ == "__main__":
    main()
