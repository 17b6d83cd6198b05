"""Parts of the service on their own: log guard, control channel, segments, peers, health, threads, configuration."""

import asyncio
import logging
import os
import socket
import threading
from pathlib import Path

import grpc
import pytest

from kvstore.config import ConfigurationError, ServiceConfig, check_memory, default_address, load_config
from kvstore.control import (
    MAX_BACKLOG,
    ControlChannel,
    EndClient,
    Grant,
    KeepSegment,
    Kept,
    SetWriter,
    receive_packet,
)
from kvstore.errors import InvalidRequestError, NotHeldError
from kvstore.log import MAX_KINDS, LimitedLog
from kvstore.server.health import Health
from kvstore.server.workers import Workers
from kvstore.service.guard import status_of
from kvstore.service.requests import check_digests, check_parallel, check_text
from kvstore.service.sessions import LiveSession, Outbox, SessionTable
from kvstore.supervisor import peer
from kvstore.supervisor.segments import LEDGER, SLAB, AccessError, SegmentTable


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_b217_a_repeated_event_is_logged_once_in_ten_seconds_with_a_count(caplog):
    clock = Clock()
    log = LimitedLog(logging.getLogger("kvstore.test"), clock=clock)
    with caplog.at_level(logging.INFO):
        for _ in range(600):
            log.log(logging.INFO, "absent", "the service is absent")
            log.log(logging.INFO, "other", "something else")
            clock.now += 1 / 60
        clock.now += 1
        log.log(logging.INFO, "absent", "the service is absent")
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        "the service is absent",
        "something else",
        "the service is absent (599 more of this kind in the last 11 s)",
    ]


def test_the_log_guard_remembers_a_bounded_number_of_kinds():
    log = LimitedLog(logging.getLogger("kvstore.test"), clock=Clock())
    for kind in range(3 * MAX_KINDS):
        log.log(logging.DEBUG, str(kind), "")
    assert len(log._kinds) == MAX_KINDS


@pytest.fixture
def channels():
    ours, theirs = ControlChannel.pair()
    other = ControlChannel(theirs)
    yield ours, other
    ours.close()
    other.close()


def test_control_messages_arrive_in_order_with_their_descriptors(channels):
    sender, receiver = channels
    with Path(os.devnull).open() as file:
        sender.send(KeepSegment(1, SLAB, 2**40, 3, 4096, 4, 1024), [file.fileno()])
    sender.send(Grant("ab", 7))
    message, (fd,) = receiver.receive()
    assert message == KeepSegment(1, SLAB, 2**40, 3, 4096, 4, 1024)
    assert not os.get_inheritable(fd)
    os.close(fd)
    assert receiver.receive() == (Grant("ab", 7), [])
    assert receiver.receive() is None
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive()


def test_a_full_control_channel_keeps_order_and_is_bounded(channels):
    sender, receiver = channels
    sent = 0
    with Path(os.devnull).open() as file:
        while sender.backlog < MAX_BACKLOG:
            sender.send(Kept(sent), [file.fileno()] if sent % 100 == 0 else [])
            sent += 1
    with pytest.raises(BufferError):
        sender.send(Kept(sent))
    assert sender.backlog == MAX_BACKLOG
    heard = 0
    while heard < sent:
        sender.flush()
        while (received := receiver.receive()) is not None:
            assert received[0] == Kept(heard)
            assert len(received[1]) == (heard % 100 == 0)
            for fd in received[1]:
                os.close(fd)
            heard += 1
    assert sender.backlog == 0


def test_a_packet_with_too_many_descriptors_is_told_apart():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, Path(os.devnull).open() as file:
        socket.send_fds(ours, [b"x"], [file.fileno()] * 9)
        data, fds, complete = receive_packet(theirs, 100, 2)
        for fd in fds:
            os.close(fd)
        assert (data, complete) == (b"x", False)


def memfd(nbytes=4096):
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd


@pytest.fixture
def table():
    table = SegmentTable()
    table.keep(KeepSegment(1, SLAB, 5, 1, 4096, 1024, 4), memfd())
    table.keep(KeepSegment(2, LEDGER, 1, 1, 4096, 0, 64), memfd())
    table.add_client("writer", None)
    table.add_client("reader", None)
    table.add_client("stranger", None)
    table.grant(Grant("writer", 1))
    table.grant(Grant("reader", 1))
    table.grant(Grant("stranger", 2))
    table.grant(Grant("nobody", 1))
    table.set_writer(SetWriter(5, "writer"))
    yield table
    table.close()


def test_only_the_writer_gets_a_slab_for_writing(table):
    segment, fd = table.open("writer", SLAB, 5, writable=True)
    assert (segment.nbytes, segment.slot_bytes, segment.slots) == (4096, 1024, 4)
    os.pwrite(fd, b"x", 0)
    _, readonly = table.open("reader", SLAB, 5, writable=False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(readonly, b"y", 0)
    assert os.fstat(readonly).st_mode & 0o777 == 0o600
    with pytest.raises(AccessError) as caught:
        table.open("reader", SLAB, 5, writable=True)
    assert not caught.value.missing
    table.set_writer(SetWriter(5, ""))
    with pytest.raises(AccessError):
        table.open("writer", SLAB, 5, writable=True)


@pytest.mark.parametrize(("kind", "segment"), [(SLAB, 5), (LEDGER, 1), (SLAB, 6)])
def test_a_foreign_segment_looks_like_none(table, kind, segment):
    texts = set()
    for token in ("stranger", "nobody"):
        with pytest.raises(AccessError) as caught:
            table.open(token, kind, segment, writable=False)
        assert caught.value.missing
        texts.add(str(caught.value))
    assert len(texts) == 1


def test_a_ledger_is_for_reading_only(table):
    table.open("writer", LEDGER, 1, writable=False)
    with pytest.raises(AccessError):
        table.open("writer", LEDGER, 1, writable=True)


def test_grants_end_with_the_client(table):
    table.end_client(EndClient("reader"))
    table.end_client(EndClient("reader"))
    with pytest.raises(AccessError):
        table.open("reader", SLAB, 5, writable=False)


def test_without_kernel_help_a_pidfd_is_compared_by_pid(monkeypatch):
    monkeypatch.setattr(peer, "peer_pidfd", lambda _sock: None)
    own = peer.Credentials(os.getpid(), 0, 0)
    assert peer.verified_pidfd(None, None, own) is None
    fd = peer.verified_pidfd(None, os.pidfd_open(os.getpid()), own)
    os.close(fd)
    # A process of a foreign pid namespace has pid 0: nothing to compare.
    os.close(peer.verified_pidfd(None, os.pidfd_open(os.getpid()), peer.Credentials(0, 0, 0)))
    with pytest.raises(peer.PeerError):
        peer.verified_pidfd(None, os.pidfd_open(os.getppid()), own)
    with pytest.raises(peer.PeerError):
        peer.verified_pidfd(None, memfd(), own)


def test_an_outbox_says_each_slab_once_and_the_end_last():
    async def scenario():
        outbox = Outbox()
        for _ in range(1000):
            outbox.unmap((3, 1))
            outbox.downgrade((2,))
        assert await outbox.take() == ([3, 1], [2], None)
        outbox.goodbye("enough")
        assert await outbox.take() == ([], [], "enough")

    asyncio.run(scenario())


def test_a_superseded_session_does_not_take_its_successor_along():
    async def scenario():
        table = SessionTable()
        old, new = (LiveSession(bytes([i]) * 16, b"i" * 16, "w", None) for i in (1, 2))
        table.add(old)
        table.add(new)
        assert table.remove(old.session_id) is old
        assert table.remove(old.session_id) is None
        assert table.of_instance(b"i" * 16) is new

    asyncio.run(scenario())


async def eventually(condition):
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not within the deadline")


def test_b214_hanging_work_makes_the_service_not_ready_but_alive():
    clock, hang = Clock(), threading.Event()

    async def scenario():
        workers = Workers(threads=1, limit_s=30, clock=clock)
        health = Health(("kvstore.v1.BlockService",), workers.stuck)
        work = asyncio.create_task(workers.run("copying", hang.wait, 20))
        watching = asyncio.create_task(health.run())
        await eventually(lambda: workers._running)
        names = ("", "kvstore.v1.BlockService", "live")
        assert [health.status(name) for name in names] == [1, 1, 1]
        clock.now += 31
        assert "copying has run for 31 s" in workers.stuck()
        await eventually(lambda: health.status("") == 2)
        assert [health.status(name) for name in names] == [2, 2, 1]
        hang.set()
        await work
        await eventually(lambda: health.status("") == 1)
        health.drain()
        assert [health.status(name) for name in names] == [2, 2, 1]
        watching.cancel()
        workers.close()

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_an_unexpected_error_is_logged_under_the_id_the_client_gets(caplog):
    try:
        _ = {}["missing key"]
    except KeyError as error:
        code, text = status_of(error)
    assert code is grpc.StatusCode.INTERNAL
    assert "missing key" not in text
    (record,) = caplog.records
    assert text.split("error id ")[1][:8] in record.getMessage()
    assert record.exc_info
    assert status_of(NotHeldError("gone")) == (grpc.StatusCode.NOT_FOUND, "gone")


def test_fields_are_checked():
    assert check_digests("digests", bytes(64)) == 2
    assert check_parallel(a=[1, 2, 3], b=(4, 5, 6)) == 3
    for call in (
        lambda: check_digests("digests", bytes(33)),
        lambda: check_digests("digests", bytes(32 * 16385)),
        lambda: check_parallel(a=[1], b=[]),
        lambda: check_text("name", "a\x1b[31m", 100),
    ):
        with pytest.raises(InvalidRequestError, match="Expected"):
            call()


def test_the_command_line_wins_over_the_environment_wins_over_the_default(tmp_path):
    env = {"KVSTORE_BUDGET": "2 GiB", "KVSTORE_MAX_SESSIONS": "3", "KVSTORE_ADDRESS": str(tmp_path / "a.sock")}
    config = load_config({"budget": "512MiB", "max_sessions": None}, env)
    assert (config.budget_bytes, config.max_sessions) == (512 << 20, 3)
    assert config.address == tmp_path / "a.sock"
    assert config.grace_s == ServiceConfig(tmp_path).grace_s
    assert ServiceConfig.from_json(config.to_json()) == config


def test_the_default_address_is_private_to_the_user():
    assert default_address({"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/user/7/kvstore/kvstore.sock")
    assert default_address({"KVSTORE_ADDRESS": "unix:/a/b.sock"}) == Path("/a/b.sock")


@pytest.mark.parametrize(
    "listen",
    ["0.0.0.0:1", "example.org:1", "10.0.0.1:80", "127.0.0.1.example.org:1", "localhost.example.org:5", "[::]:5"],
)
def test_only_loopback_without_insecure(tmp_path, listen):
    with pytest.raises(ConfigurationError, match="--insecure"):
        ServiceConfig(tmp_path / "a.sock", listen=listen)
    ServiceConfig(tmp_path / "a.sock", listen=listen, insecure=True)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:5", "[::1]:5", "127.8.8.8:5"])
def test_loopback_is_allowed(tmp_path, listen):
    assert ServiceConfig(tmp_path / "a.sock", listen=listen).listen == listen


def test_a_budget_is_held_against_machine_and_control_group(tmp_path):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (cgroups / "inner").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 8192 kB\nMemAvailable: 16 kB\n")
    (proc / "self" / "cgroup").write_text("0::/inner\n")
    check_memory(8 * 2**20, proc, cgroups)
    with pytest.raises(ConfigurationError, match=f"{8 * 2**20 + 1}.*{8 * 2**20} bytes.*MemTotal.*smaller"):
        check_memory(8 * 2**20 + 1, proc, cgroups)
    (cgroups / "inner" / "memory.max").write_text(f"{2**20}\n")
    (cgroups / "inner" / "memory.current").write_text(f"{2**19}\n")
    check_memory(2**20, proc, cgroups)
    with pytest.raises(ConfigurationError, match=f"{2**20} bytes.*control group /inner"):
        check_memory(2**20 + 1, proc, cgroups)
