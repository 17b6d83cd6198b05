"""How long one LookupAndLease takes: service and client in processes of their own, over the Unix socket.

    python benchmarks/lookup.py --blocks 512 --json lookup.json

Prints one JSON object: milliseconds from the call to the parsed answer, leases released outside of the measured time.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import grpc
from kvstore_proto.v1 import blocks_pb2

from kvstore.launch import ServiceProcess
from kvstore.testing_client import ModelShape, RawClient, chain


def measure(address: Path, blocks: int, calls: int) -> list[float]:
    """Milliseconds of each of `calls` look-ups of a committed chain of `blocks`."""
    shape = ModelShape("lookup", block_bytes=4096)
    digests = chain("lookup", blocks)
    with RawClient(address, name="writer") as writer, RawClient(address, name="reader") as reader:
        namespace = writer.register(shape).namespace_id
        reader.register(shape)
        reserved = writer.reserve(namespace, digests)
        if len(reserved.slots) < blocks:
            raise SystemExit(f"error: {len(reserved.slots)} of {blocks} slots: {reserved.short_reason}")
        writer.commit(namespace, reserved, digests, [0] * blocks)
        query = blocks_pb2.Query(namespace_id=namespace, digests=b"".join(digests))
        request = blocks_pb2.LookupAndLeaseRequest(queries=[query])
        times = []
        for _ in range(calls):
            before = time.perf_counter()
            lease = reader.call(reader.blocks.LookupAndLease, request).leases[0]
            slots = list(lease.slots)
            times.append((time.perf_counter() - before) * 1000)
            if len(slots) != blocks:
                raise SystemExit(f"error: {len(slots)} of {blocks} blocks found")
            reader.call(reader.blocks.Release, blocks_pb2.ReleaseRequest(lease_ids=[lease.lease_id]))
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--warm-up", type=int, default=200)
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        address = Path(folder) / "kv.sock"
        with ServiceProcess.start(address, options=["--budget", "256MiB", "--log-level", "error"]):
            times = measure(address, options.blocks, options.warm_up + options.calls)[options.warm_up :]
    cuts = statistics.quantiles(times, n=100)
    result = {
        "benchmark": "LookupAndLease over the Unix socket",
        "blocks": options.blocks,
        "calls": options.calls,
        "p10_ms": round(cuts[9], 3),
        "p50_ms": round(cuts[49], 3),
        "p90_ms": round(cuts[89], 3),
        "p99_ms": round(cuts[98], 3),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "grpc": grpc.__version__,
    }
    text = json.dumps(result, indent=2)
    sys.stdout.write(text + "\n")
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
