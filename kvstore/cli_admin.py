"""The commands that talk to a running service's admin socket."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.config import ConfigurationError, StartError, check_address, default_address, given_address, shorten

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from kvstore_proto.v1 import admin_pb2_grpc
    from rich.table import Table

DEADLINE_S = 10.0
CHECK_DEADLINE_S = 600.0
AddressOption = Annotated[
    str | None, typer.Option("--address", metavar="PATH", help="The service's socket [env: KVSTORE_ADDRESS].")
]
NamespaceArgument = Annotated[str, typer.Argument(help="Id, from `kvstore namespaces`.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_commands(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    app.command(epilog="Example: kvstore stats --json")(stats)
    app.command(epilog="Example: kvstore namespaces")(namespaces)
    app.command(epilog="Example: kvstore sessions --address /run/kvstore/kvstore.sock")(sessions)
    app.command(epilog="Example: kvstore evict 3")(evict)
    app.command(epilog="Example: kvstore pin 3 DIGEST_IN_HEX")(pin)
    app.command(epilog="Example: kvstore check --payloads")(check)


def stats(address: AddressOption = None, as_json: JsonOption = False) -> None:
    """Shows counters and sizes of the service."""
    from kvstore_proto.v1 import admin_pb2

    from kvstore.device.gpu import GpuInfo

    with _admin(address) as admin:
        reply = admin.GetStats(admin_pb2.GetStatsRequest(), timeout=DEADLINE_S)
    if as_json:
        return _print_json(reply)
    table = _table("", "")
    table.add_row("version", reply.server_version)
    table.add_row("up", f"{reply.uptime_s:.0f} s")
    for device in reply.devices:
        table.add_row(device.device, f"{_size(device.used_bytes)} of {_size(device.budget_bytes)}, {device.memory}")
        if device.device_uuid:
            table.add_row("  uuid", GpuInfo(0, device.device_uuid, "").text)
        slots = f"{device.slots_committed} committed ({device.blocks_pinned} pinned), {device.slots_private} private, "
        table.add_row("  slots", slots + f"{device.slots_condemned} condemned, {device.slots_free} free")
        table.add_row("  slabs", f"{device.slabs_live} live, {device.slabs_draining} draining")
    table.add_row("sessions, leases", f"{reply.sessions}, {reply.leases}")
    share = f" ({reply.hit_tokens / reply.lookup_tokens:.0%})" if reply.lookup_tokens else ""
    table.add_row("tokens found", f"{reply.hit_tokens} of {reply.lookup_tokens}{share} in {reply.lookups} look-ups")
    table.add_row("commits", f"{reply.commits}, and {reply.commit_losses} that came second")
    table.add_row("evicted, damaged", f"{reply.evictions}, {reply.damaged}")
    table.add_row("slots refused", str(reply.reserve_short))
    table.add_row("not shared for their error", str(reply.blocks_not_shared_error))
    table.add_row("bytes sent, received", f"{_size(reply.bytes_sent)}, {_size(reply.bytes_received)}")
    return _print_table(table)


def namespaces(address: AddressOption = None, as_json: JsonOption = False) -> None:
    """Lists the namespaces."""
    from kvstore_proto.v1 import admin_pb2

    with _admin(address) as admin:
        reply = admin.ListNamespaces(admin_pb2.ListNamespacesRequest(), timeout=DEADLINE_S)
    if as_json:
        return _print_json(reply)
    table = _table("id", "model", "codec", "committed", "private", "free", "pinned", "size", "limit", "sessions",
        "largest error", "mean")  # fmt: skip
    for entry in reply.namespaces:
        limit = _size(entry.max_bytes) if entry.max_bytes else "budget"
        numbers = (entry.committed, entry.private, entry.free, entry.pinned_chains)
        table.add_row(
            str(entry.namespace_id), entry.model_name, entry.codec, *map(str, numbers), _size(entry.slab_bytes), limit,
            str(entry.sessions), f"{entry.largest_error:.2g}", f"{entry.mean_error:.2g}",
        )  # fmt: skip
    return _print_table(table)


def sessions(address: AddressOption = None, as_json: JsonOption = False) -> None:
    """Lists the living sessions."""
    from kvstore_proto.v1 import admin_pb2

    with _admin(address) as admin:
        reply = admin.ListSessions(admin_pb2.ListSessionsRequest(), timeout=DEADLINE_S)
    if as_json:
        return _print_json(reply)
    table = _table("id", "name", "transport", "watched", "leases", "private", "age", "oldest lease", "client")
    for entry in reply.sessions:
        transport = f"{entry.transport} ({entry.transport_reason})" if entry.transport_reason else entry.transport
        table.add_row(
            entry.session_id.hex()[:8], entry.name, transport, "yes" if entry.process_watched else "no",
            str(entry.leases), str(entry.private_slots), f"{entry.age_s:.0f} s", f"{entry.oldest_lease_s:.0f} s",
            entry.client_version,
        )  # fmt: skip
    return _print_table(table)


def evict(
    namespace: NamespaceArgument,
    address: AddressOption = None,
    include_pinned: Annotated[bool, typer.Option("--include-pinned", help="Pinned chains too.")] = False,
) -> None:
    """Takes a namespace's blocks out of the cache. Blocks in use go when their last lease ends."""
    from kvstore_proto.v1 import admin_pb2

    request = admin_pb2.EvictRequest(namespace_id=_namespace_id(namespace), include_pinned=include_pinned)
    with _admin(address) as admin:
        reply = admin.Evict(request, timeout=DEADLINE_S)
    sys.stdout.write(f"freed {reply.freed}, in use until released {reply.condemned}, pinned {reply.pinned}\n")


def pin(
    namespace: NamespaceArgument,
    digest: Annotated[str, typer.Argument(help="Digest of the chain's last block, 64 hex digits.")],
    address: AddressOption = None,
    remove: Annotated[bool, typer.Option("--remove", help="Unpin.")] = False,
) -> None:
    """Keeps a chain of blocks from eviction."""
    from kvstore_proto.v1 import admin_pb2

    number = _namespace_id(namespace)
    try:
        raw = bytes.fromhex(digest)
    except ValueError:
        raise StartError(f"digest {digest[:80]!r} is not hexadecimal. Expected 64 hex digits: correct it") from None
    request = admin_pb2.PinChainRequest(namespace_id=number, digest=raw, pinned=not remove)
    with _admin(address) as admin:
        reply = admin.PinChain(request, timeout=DEADLINE_S)
    sys.stdout.write(f"{'unpinned' if remove else 'pinned'} a chain of {reply.blocks} blocks\n")


def check(
    address: AddressOption = None,
    payloads: Annotated[bool, typer.Option("--payloads", help="Read every block against its checksum.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Proves that bytes, slots, index and leases add up. Exit code 1 when something does not."""
    from kvstore_proto.v1 import admin_pb2

    with _admin(address) as admin:
        reply = admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest(payloads=payloads), timeout=CHECK_DEADLINE_S)
    if as_json:
        _print_json(reply)
    else:
        for problem in reply.problems:
            sys.stdout.write(f"problem: {problem}\n")
        read = f", {reply.blocks_verified} blocks read, {reply.damaged} damaged" if payloads else ""
        sys.stdout.write(f"{len(reply.problems)} problems{read}\n")
    if reply.problems or reply.damaged:
        raise typer.Exit(1)


def _namespace_id(text: str) -> int:
    # 64 bits is what the message carries, and 20 digits what that takes.
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) < 2**64):
        raise ConfigurationError(
            f"namespace {shorten(text)!r}: expected an id, a whole number from 0 to 2**64 - 1: "
            "take one that `kvstore namespaces` lists"
        )
    return int(text)


@contextmanager
def _admin(address: str | None) -> "Iterator[admin_pb2_grpc.AdminServiceStub]":
    import grpc
    from kvstore_proto.v1 import admin_pb2_grpc

    path = default_address(os.environ) if address is None else given_address(address, "--address")
    check_address(path)
    socket = path.with_name(path.name + ".admin")
    if not socket.exists():
        raise StartError(
            f"no service on {path} ({socket.name} is not there). Expected a running one: start it with "
            f"`kvstore serve --address {path}`, or name another one with --address"
        )
    with grpc.insecure_channel(f"unix:{socket}", options=(("grpc.enable_http_proxy", 0),)) as channel:
        try:
            yield admin_pb2_grpc.AdminServiceStub(channel)
        except grpc.RpcError as error:
            code, text = error.code(), error.details()
            if code is grpc.StatusCode.UNAVAILABLE:
                text = f"nobody answers on {socket}. Expected a running service: start it with `kvstore serve` ({text})"
            elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
                text = f"the service on {socket} did not answer in time. Expected it to: see its log"
            raise StartError(f"{text} [{code.name}]") from None


def _table(*columns: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _print_table(table: "Table") -> None:
    from rich.console import Console

    # In a pipe there is no width to fit: columns stay whole.
    width = None if sys.stdout.isatty() else 200
    Console(markup=False, highlight=False, width=width).print(table)


def _print_json(message: "Message") -> None:
    from google.protobuf.json_format import MessageToDict

    fields: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    sys.stdout.write(json.dumps(fields, indent=2) + "\n")


def _size(nbytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"
