"""Block layout: every byte has one place, and the sizes are the promised ones."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from kvstore_kernels.errors import LayoutError
from kvstore_kernels.layout import ALIGNMENT, BlockLayout

HEAD_DIMS = [64, 72, 80, 96, 112, 120, 128, 192, 256]
LEDGER_RECORD = 128


def layout(codec: str = "int8", **changes: object) -> BlockLayout:
    sizes = {"layers": 3, "kv_heads": 2, "k_dim": 64, "v_dim": 64, "dtype": "bfloat16", **changes}
    return BlockLayout.create(codec, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", ["int8", "passthrough"])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_parts_are_aligned_and_do_not_overlap(codec: str, dim: int) -> None:
    made = layout(codec, k_dim=dim, v_dim=dim - 8)
    for part, following in pairwise(made.parts):
        assert part.offset % ALIGNMENT == 0
        assert part.offset + part.nbytes <= following.offset < part.offset + part.nbytes + ALIGNMENT
    assert made.parts[-1].offset + made.parts[-1].nbytes <= made.head_bytes
    assert made.layer_bytes == 2 * made.head_bytes
    assert made.block_bytes == 3 * made.layer_bytes
    assert made.block_bytes % ALIGNMENT == 0


@pytest.mark.parametrize(("dim", "most"), [(64, 0.53), (128, 0.515), (256, 0.515)])
def test_int8_bytes_against_two_bytes_a_number(dim: int, most: float) -> None:
    for layers, kv_heads in ((30, 3), (1, 1), (32, 8)):
        made = layout(layers=layers, kv_heads=kv_heads, k_dim=dim, v_dim=dim)
        plain = 2 * 2 * dim * made.block_tokens * layers * kv_heads
        limit = most if layers * kv_heads > 1 else most + LEDGER_RECORD / plain
        assert (made.block_bytes + LEDGER_RECORD) / plain <= limit


def test_bytes_follow_kv_heads_not_query_heads() -> None:
    """b084: keys are stored before they are repeated."""
    assert layout(kv_heads=4).block_bytes == 4 * layout(kv_heads=1).block_bytes


def test_passthrough_stores_the_models_own_numbers() -> None:
    for dtype, item in (("float32", 4), ("bfloat16", 2), ("float16", 2)):
        made = layout("passthrough", dtype=dtype, layers=1, kv_heads=1)
        assert made.block_bytes == 2 * 64 * 64 * item


def test_offsets_past_32_bits() -> None:
    """The seed's crash at 20 000 tokens was a 32-bit index."""
    made = layout(layers=80, kv_heads=8, k_dim=128, v_dim=128)
    slot = 2**33 // made.block_bytes + 1
    offset = made.offset(slot, 79, 7, "v_codes")
    assert offset > 2**33
    assert offset == slot * made.block_bytes + 79 * made.layer_bytes + 7 * made.head_bytes + made.part("v_codes").offset


def test_digest_tells_layouts_apart() -> None:
    assert layout().digest() == layout().digest()
    assert len(layout().digest()) == 32
    others = [
        layout("passthrough"),
        layout(layers=4),
        layout(kv_heads=1),
        layout(k_dim=72),
        layout(v_dim=72),
        layout(dtype="float32"),
        layout(block_tokens=128),
    ]
    assert len({item.digest() for item in [layout(), *others]}) == len(others) + 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"codec": "int5"}, "int5"),
        ({"dtype": "float64"}, "float64"),
        ({"layers": 0}, "layers"),
        ({"kv_heads": -1}, "kv_heads"),
        ({"k_dim": 0}, "k_dim"),
        ({"v_dim": 5000}, "v_dim"),
        ({"block_tokens": 63}, "block_tokens"),
        ({"block_tokens": 96}, "block_tokens"),
    ],
)
def test_impossible_layouts_name_the_value(changes: dict[str, object], named: str) -> None:
    codec = str(changes.pop("codec", "int8"))
    with pytest.raises(LayoutError, match=named):
        layout(codec, **changes)


def test_unknown_part() -> None:
    with pytest.raises(LayoutError, match="k_scales"):
        layout("passthrough").part("k_scales")


def test_layout_and_checksum_import_without_torch() -> None:
    code = "import sys, kvstore_kernels.layout, kvstore_kernels.checksum; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
