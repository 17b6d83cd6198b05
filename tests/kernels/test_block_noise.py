"""A block's error, told from its bytes, is the error that its codec really made."""

from __future__ import annotations

import pytest
import torch
from kvstore_kernels.codecs import Calibrator, CodecPlan, make_codec, names
from kvstore_kernels.errors import LayoutError
from kvstore_kernels.layout import BlockLayout
from kvstore_kernels.noise import block_noise, largest_noise
from kvstore_kernels.slab import Slab
from kvstore_kernels.table import BlockTable

HEADS, DIM, SIZE = 2, 64, 64
MIXED = "int8:1,k4v2:1,passthrough:1,k8v4:1"


def layout_of(codec: str) -> BlockLayout:
    layers = 4 if codec == MIXED else 2
    return BlockLayout.create(codec, layers=layers, kv_heads=HEADS, k_dim=DIM, v_dim=DIM, dtype="float32")


def keys_and_values(layers: int, blocks: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """[layers, 1, heads, tokens, dim]; channels of K have a bias and a width of their own."""
    generator = torch.Generator().manual_seed(7)
    shape = (layers, 1, HEADS, blocks * SIZE, DIM)
    k, v = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    return k * (0.2 + 4 * torch.rand(DIM, generator=generator)) + 3 * torch.randn(DIM, generator=generator), v


def calibrated(codec: str, k: torch.Tensor) -> CodecPlan:
    calibrator = Calibrator(codec, layers=len(k), kv_heads=HEADS, k_dim=DIM)
    for layer, keys in enumerate(k):
        calibrator.observe(layer, keys)
    return calibrator.finish("random")


def stored(layout: BlockLayout, plan: CodecPlan, k: torch.Tensor, v: torch.Tensor) -> tuple[Slab, BlockTable]:
    """Block i in slot 3 - i of a slab."""
    slab, table = Slab.allocate(layout.block_bytes, 4), BlockTable(1, block_tokens=SIZE)
    slab.data.fill_(0xAB)
    codec = make_codec(layout, plan)
    for slot in range(3, 3 - k.shape[3] // SIZE, -1):
        table.append_block(0, slab, slot)
    for layer in range(layout.layers):
        codec.write(layer, k[layer], v[layer], table, [(0, 0)])
    # What is read from here on was coded.
    table.tail = None
    return slab, table


@pytest.mark.parametrize("codec", [*names(), MIXED])
def test_it_agrees_with_the_error_that_was_made(codec: str) -> None:
    layout = layout_of(codec)
    k, v = keys_and_values(layout.layers)
    plan = calibrated(codec, k)
    slab, table = stored(layout, plan, k, v)
    noise = block_noise(slab, [3, 2, 1], layout)
    assert noise.shape == (3, layout.layers, 2)
    assert largest_noise(noise) == [float(row.max()) for row in noise]
    reader = make_codec(layout, plan)
    for layer, name in enumerate(layout.layer_codecs):
        read_k, read_v = reader.read(layer, table, 0, 0, 3 * SIZE)
        for block in range(3):
            if name == "passthrough":
                assert noise[block, layer].tolist() == [0, 0]
                continue
            part = slice(block * SIZE, (block + 1) * SIZE)
            width, shift = (plan.tensors[key][layer].unsqueeze(1) for key in ("k_scale", "k_shift"))
            exact_k, exact_v = k[layer, 0, :, part], v[layer, 0, :, part]
            made = [
                relative((read_k[:, part] - exact_k) / width, (exact_k - shift) / width),
                relative(read_v[:, part] - exact_v, exact_v),
            ]
            assert noise[block, layer].tolist() == pytest.approx(made, rel=0.1)


def relative(error: torch.Tensor, exact: torch.Tensor) -> float:
    return float((error.square().mean() / exact.square().mean()).sqrt())


@pytest.mark.parametrize("codec", [name for name in names() if name != "passthrough"])
def test_an_outlier_token_raises_it(codec: str) -> None:
    layout = layout_of(codec)
    k, v = keys_and_values(layout.layers)
    plan = calibrated(codec, k)
    before = block_noise(stored(layout, plan, k, v)[0], [3, 2, 1], layout)
    # Few channels of one token of the second block, in one layer.
    k[1, 0, :, SIZE + 5, :3] += 200 * plan.tensors["k_scale"][1][:, :3] * 127
    after = block_noise(stored(layout, plan, k, v)[0], [3, 2, 1], layout)
    raised = after / before > 1.2
    assert raised.nonzero().tolist() == [[1, 1, 0]]
    assert torch.equal(after[~raised], before[~raised])


@pytest.mark.parametrize("codec", [*names(), MIXED])
def test_zeros_have_no_error(codec: str) -> None:
    layout = layout_of(codec)
    k, _ = keys_and_values(layout.layers)
    plan = calibrated(codec, k)
    shift = plan.tensors.get("k_shift", torch.zeros(layout.layers, HEADS, DIM))[:, None, :, None]
    zeros = torch.zeros(layout.layers, 1, HEADS, SIZE, DIM)
    slab, _ = stored(layout, plan, zeros + shift, zeros)
    assert block_noise(slab, [3], layout).tolist() == [[[0.0, 0.0]] * layout.layers]


def test_many_blocks_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of("int4")
    k, v = keys_and_values(2)
    slab, _ = stored(layout, calibrated("int4", k), k, v)
    at_once = block_noise(slab, [1, 3, 2, 1], layout)
    monkeypatch.setattr("kvstore_kernels.noise._NUMBERS_AT_ONCE", {"cpu": 1})
    assert torch.equal(block_noise(slab, [1, 3, 2, 1], layout), at_once)
    assert block_noise(slab, [], layout).shape == (0, 2, 2)
    assert largest_noise(block_noise(slab, [], layout)) == []


def test_bytes_that_no_codec_wrote_have_a_number() -> None:
    layout = layout_of("int4")
    slab = Slab.allocate(layout.block_bytes, 1)
    slab.data.fill_(0xFF)
    assert bool(torch.isfinite(block_noise(slab, [0], layout)).all())


def test_what_is_refused() -> None:
    layout = layout_of("int8")
    slab = Slab.allocate(layout.block_bytes, 2)
    with pytest.raises(LayoutError, match="slot 2"):
        block_noise(slab, [2], layout)
    with pytest.raises(LayoutError, match="bytes a block"):
        block_noise(Slab.allocate(128, 1), [0], layout)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("codec", [*names(), MIXED])
def test_the_same_on_a_device(codec: str) -> None:
    layout = layout_of(codec)
    k, v = keys_and_values(layout.layers)
    slab, _ = stored(layout, calibrated(codec, k), k, v)
    there = Slab.allocate(layout.block_bytes, 4, device="cuda")
    there.data.copy_(slab.data)
    torch.testing.assert_close(block_noise(there, [3, 1], layout), block_noise(slab, [3, 1], layout), rtol=1e-4, atol=0)
