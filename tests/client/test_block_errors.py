"""The error of a block: measured by its writer, kept with it, bounded by the plan and by readers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch
from kvstore_client import Store
from kvstore_client.blocks import NO_PARENT, Block
from kvstore_client.namespace import ModelIdentity, Namespace
from kvstore_client.plans import NOISE_LIMIT
from kvstore_client.request import Request
from kvstore_client.testing import FakeService, chain_of, identity
from kvstore_kernels.codecs import CodecPlan, make_codec
from kvstore_kernels.layout import BlockLayout
from kvstore_kernels.table import BlockTable
from kvstore_proto.v1 import admin_pb2, admin_pb2_grpc

from kvstore.launch import ServiceProcess

LAYERS, HEADS, DIM, SIZE = 2, 2, 32, 64
LAYOUT = BlockLayout.create("int8", layers=LAYERS, kv_heads=HEADS, k_dim=DIM, v_dim=DIM, dtype="float32")
# Random numbers have an error of half a percent under int8, those with an outlier more than one.
BOUND = 0.008


def model() -> ModelIdentity:
    return identity("errors", LAYOUT)


def plan_of(limit: float | None) -> CodecPlan:
    shape = (LAYERS, HEADS, DIM)
    tensors = {"k_shift": torch.zeros(shape), "k_scale": torch.ones(shape)}
    if limit is not None:
        tensors[NOISE_LIMIT] = torch.full((LAYERS, 2), limit)
    return CodecPlan("int8", tensors)


def encode(block: Block, plan: CodecPlan, *, loud: bool) -> None:
    """Random K and V; `loud`: with an outlier that costs the other channels their bits."""
    k, v = torch.randn(2, 1, HEADS, SIZE, DIM, generator=torch.Generator().manual_seed(3))
    if loud:
        k[0, 1, 5, 7] = 300.0
    table = BlockTable(1, block_tokens=SIZE)
    table.append_block(0, block.slab, block.slot)
    for layer in range(LAYERS):
        make_codec(LAYOUT, plan).write(layer, k, v, table, [(0, 0)])


def write(request: Request, digests: list[bytes], loud: set[int], first: int = 0) -> None:
    entries = []
    for index in range(first, len(digests)):
        block = request.take(digests[index])
        encode(block, request.namespace.plan, loud=index in loud)
        entries.append((block, digests[index], digests[index - 1] if index else NO_PARENT))
    request.commit(entries)


def attached(fake: FakeService, opened: Callable[..., Store], limit: float | None) -> tuple[Store, Namespace]:
    store = opened(fake.address)
    return store, store.namespace_for(model(), lambda: plan_of(limit))


def test_every_commit_says_its_error(fake: FakeService, opened: Callable[..., Store]) -> None:
    store, namespace = attached(fake, opened, None)
    digests = chain_of("errors", 3)
    with store.open_request(namespace) as request:
        write(request, digests, {1})
        assert store.flush()
        assert request.report().blocks_committed == 3
    quiet, loud, last = (fake.errors[digest] for digest in digests)
    assert quiet == last < BOUND < 1.5 * BOUND < loud
    assert fake.not_shared == 0


def test_what_misses_the_bound_stays_private_and_so_does_what_follows(
    fake: FakeService, opened: Callable[..., Store]
) -> None:
    store, namespace = attached(fake, opened, BOUND)
    digests, other = chain_of("bound", 6), chain_of("bound too", 2)
    with store.open_request(namespace) as request:
        request.reserve([b"".join(digests)])
        write(request, digests[:4], {2})
        # A later job: all good, but nobody could find it.
        write(request, digests, set(), first=4)
        write(request, other, set())
        assert store.flush()
        traffic = request.report()
        assert (traffic.blocks_committed, traffic.blocks_not_shared_error) == (4, 4)
        assert traffic.commits_dropped == traffic.commits_lost == 0
    assert set(fake.committed) == {*digests[:2], *other}
    assert fake.not_shared == 4
    assert store.stats()["blocks_not_shared_error"] == 4
    assert store.stats()["notices"]["error-bound"] >= 1
    # Another request that has it all in order shares it.
    with store.open_request(namespace) as request:
        write(request, digests, set(), first=2)
        assert store.flush()
    assert set(digests) <= set(fake.committed)
    assert store.flush()
    assert not fake.held


def test_a_request_that_shares_nothing_says_so(fake: FakeService, opened: Callable[..., Store]) -> None:
    store, namespace = attached(fake, opened, BOUND)
    with store.open_request(namespace) as request:
        write(request, chain_of("nothing", 2), {0})
        assert store.flush()
    assert not fake.committed
    assert fake.not_shared == 2


def test_readers_choose_what_they_take(fake: FakeService, opened: Callable[..., Store]) -> None:
    store, namespace = attached(fake, opened, None)
    digests = chain_of("readers", 3)
    with store.open_request(namespace) as request:
        write(request, digests, {1})
        assert store.flush()
    for bound, blocks, reason in ((None, 3, ""), (1.0, 3, ""), (BOUND, 1, "fidelity"), (0.0, 0, "fidelity")):
        with store.open_request(namespace, max_block_error=bound) as request:
            (match,) = request.match([b"".join(digests)])
            assert (len(match.blocks), match.reason) == (blocks, reason)


def test_a_limit_of_another_shape_is_no_plan(fake: FakeService, opened: Callable[..., Store]) -> None:
    wrong = plan_of(None)
    fake.codec_plan = CodecPlan("int8", {**wrong.tensors, NOISE_LIMIT: torch.ones(LAYERS + 1, 2)}).to_bytes()
    store, namespace = attached(fake, opened, BOUND)
    assert namespace.reason == "plan-differs"
    assert float(namespace.plan.tensors[NOISE_LIMIT].max()) == pytest.approx(BOUND)
    assert store.named_plans(namespace.identity.fingerprint, "int8")[0] == fake.codec_plan


# ---- each a process of its own

OTHER = """
import sys
from kvstore_client import connect
from kvstore_client.testing import PATIENT, chain_of
sys.path.insert(0, sys.argv[1])
import test_block_errors as shared

store = connect(sys.argv[2], name="other", required=True, config=PATIENT)
namespace = store.namespace_for(shared.model(), lambda: shared.plan_of(None))
with store.open_request(namespace) as request:
    shared.write(request, chain_of("processes", 4), {2})
    assert store.flush()
    print(request.report().blocks_committed, request.report().blocks_not_shared_error)
with store.open_request(namespace) as request:
    shared.write(request, chain_of("quiet", 2), set())
    assert store.flush()
store.close()
"""


@pytest.fixture
def service() -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="kv-"))
    with (folder / "log").open("ab") as log:
        process = ServiceProcess.start(folder / "kv.sock", options=("--budget", "32MiB"), stderr=log)
    yield str(process.address)
    process.stop()
    shutil.rmtree(folder)


def test_between_processes(service: str, opened: Callable[..., Store]) -> None:
    store = opened(service, required=True)
    namespace = store.namespace_for(model(), lambda: plan_of(BOUND))
    # The other one adopts this plan, and its bound.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", OTHER, str(Path(__file__).parent), service]
    assert subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60).stdout == (
        "2 2\n"
    )
    digests = chain_of("processes", 4)
    with store.open_request(namespace) as request:
        (match,) = request.match([b"".join(digests)])
        assert (len(match.blocks), match.reason) == (2, "not-found")
    with store.open_request(namespace, max_block_error=0.001) as request:
        assert [m.reason for m in request.match([b"".join(digests), b"".join(chain_of("quiet", 2))])] == [
            "fidelity"
        ] * 2
    with grpc.insecure_channel(f"unix:{service}.admin", options=[("grpc.enable_http_proxy", 0)]) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        assert admin.GetStats(admin_pb2.GetStatsRequest(), timeout=5).blocks_not_shared_error == 2
        (shown,) = admin.ListNamespaces(admin_pb2.ListNamespacesRequest(), timeout=5).namespaces
        assert 0 < shown.mean_error <= shown.largest_error < BOUND
