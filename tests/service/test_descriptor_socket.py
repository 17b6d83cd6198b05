"""The descriptor socket against a running service: hello, probe, and what no client of ours would send."""

import array
import contextlib
import mmap
import os
import pickle
import random
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kvstore_proto import PROTOCOL_VERSION
from kvstore_proto.v1 import descriptor_pb2

from kvstore.testing_client import DescriptorClient, DescriptorRefusedError

INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED, RESOURCE_EXHAUSTED, FAILED_PRECONDITION = 3, 5, 7, 8, 9
PROBE = descriptor_pb2.DescriptorRequest(probe=descriptor_pb2.Probe())


@pytest.fixture
def connect(shared_service):
    clients = []

    def make():
        clients.append(DescriptorClient(shared_service.address))
        return clients[-1]

    yield make
    for client in clients:
        client.close()
    assert shared_service.poll() is None


@pytest.fixture
def own_pidfd():
    fd = os.pidfd_open(os.getpid())
    yield fd
    os.close(fd)


def refusal(call, *args, **kwargs):
    with pytest.raises(DescriptorRefusedError) as caught:
        call(*args, **kwargs)
    return caught.value


def open_fds(pid):
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_hello_gives_a_fresh_token_and_watches_the_process(connect, own_pidfd):
    tokens = {connect().hello(secrets.token_bytes(16), pidfd=own_pidfd).token for _ in range(3)}
    assert len(tokens) == 3
    assert {len(bytes.fromhex(token)) for token in tokens} == {16}
    assert connect().hello(secrets.token_bytes(16), pidfd=own_pidfd).process_watched


def test_a_client_that_sends_no_pidfd_is_watched_where_the_kernel_knows_it(connect):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        try:
            os.close(array.array("i", ours.getsockopt(socket.SOL_SOCKET, 77, 4))[0])
            known = True
        except OSError:
            known = False
    assert connect().hello(secrets.token_bytes(16)).process_watched is known


def test_a_pidfd_of_another_process_is_refused(connect):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        fd = os.pidfd_open(other.pid)
        error = refusal(connect().hello, secrets.token_bytes(16), pidfd=fd)
        os.close(fd)
        other.stdin.close()
    assert error.code == PERMISSION_DENIED
    assert str(other.pid) in str(error)
    assert str(os.getpid()) in str(error)


def test_a_descriptor_that_is_no_pidfd_is_refused(connect):
    with Path(os.devnull).open() as file:
        error = refusal(connect().hello, secrets.token_bytes(16), pidfd=file.fileno())
    assert error.code == PERMISSION_DENIED
    assert "no pidfd" in str(error)


def test_another_protocol_version_is_refused_with_both_named(connect):
    error = refusal(connect().hello, secrets.token_bytes(16), protocol_version=PROTOCOL_VERSION + 6)
    assert error.code == FAILED_PRECONDITION
    assert f"version {PROTOCOL_VERSION + 6}, the service {PROTOCOL_VERSION}" in str(error)


@pytest.mark.parametrize("length", [0, 15, 17, 4096])
def test_an_instance_id_of_a_wrong_length_is_refused(connect, length):
    assert refusal(connect().hello, bytes(length)).code == INVALID_ARGUMENT


def test_nothing_works_before_hello_and_hello_works_once(connect, own_pidfd):
    client = connect()
    assert refusal(client.ask, PROBE).code == FAILED_PRECONDITION
    assert refusal(client.open_segment, 1, 1, writable=False).code == FAILED_PRECONDITION
    client.hello(secrets.token_bytes(16), pidfd=own_pidfd)
    assert refusal(client.hello, secrets.token_bytes(16)).code == FAILED_PRECONDITION


def test_the_probe_page_holds_the_nonce_and_is_read_only(connect, own_pidfd):
    client = connect()
    client.hello(secrets.token_bytes(16), pidfd=own_pidfd)
    response, (fd,) = client.ask(PROBE)
    with mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ) as page:
        assert page[: len(response.probe.nonce)] == response.probe.nonce
        assert len(response.probe.nonce) == 32
    with pytest.raises(PermissionError):
        mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(fd)


@pytest.mark.parametrize(("kind", "segment"), [(0, 1), (1, 0), (1, 2**63), (2, 1), (77, 1)])
def test_segments_that_are_not_there_are_not_found(connect, own_pidfd, kind, segment):
    client = connect()
    client.hello(secrets.token_bytes(16), pidfd=own_pidfd)
    assert refusal(client.open_segment, kind, segment, writable=True).code == NOT_FOUND


def test_b152_garbage_gets_an_error_or_a_closed_connection(connect, shared_service, own_pidfd):
    rng = random.Random(152)
    before = open_fds(shared_service.pid)
    packets = [rng.randbytes(rng.randrange(1, 3000)) for _ in range(100)]
    packets += [pickle.dumps({"run": print}), b"\xff" * 65536, b"\x0a\xff\xff\xff\xff\x0f", b"GET / HTTP/1.1\r\n\r\n"]
    for number, packet in enumerate(packets):
        client = connect()
        # Also with descriptors that nobody asked for, more than are allowed among them.
        fds = [own_pidfd] * (number % 7)
        socket.send_fds(client.sock, [packet], fds)
        data, received, _, _ = socket.recv_fds(client.sock, 65536, 4)
        assert received == []
        if data:
            response = descriptor_pb2.DescriptorResponse.FromString(data)
            assert response.WhichOneof("response") == "error"
            assert response.error.code in (INVALID_ARGUMENT, FAILED_PRECONDITION, PERMISSION_DENIED)
        client.close()
    connect().hello(secrets.token_bytes(16), pidfd=own_pidfd)
    deadline = time.monotonic() + 5
    while open_fds(shared_service.pid) > before + 3:
        assert time.monotonic() < deadline, "descriptors leak"
        time.sleep(0.02)


def test_an_oversized_packet_is_refused(connect):
    client = connect()
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    client.sock.send(bytes(70_000))
    response = descriptor_pb2.DescriptorResponse.FromString(client.sock.recv(65536))
    assert response.error.code == INVALID_ARGUMENT


def test_a_client_that_never_reads_holds_up_nobody(connect, own_pidfd):
    deaf = connect()
    deaf.hello(secrets.token_bytes(16), pidfd=own_pidfd)
    deaf.sock.setblocking(False)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while sent < 100_000:
            sent += deaf.sock.send(PROBE.SerializeToString()) > 0
    assert sent < 100_000
    connect().hello(secrets.token_bytes(16), pidfd=own_pidfd)


def test_a_flood_of_connections_is_bounded_and_passes(launch, own_pidfd):
    service = launch("--max-sessions", "2")
    clients = [DescriptorClient(service.address) for _ in range(60)]
    refused = 0
    for client in clients:
        try:
            client.ask(PROBE)
        except DescriptorRefusedError as error:
            refused += error.code == RESOURCE_EXHAUSTED
        except (EOFError, ConnectionResetError, BrokenPipeError):
            refused += 1
    # The oldest gave way to the youngest.
    assert refused <= 60 - (2 * 2 + 16)
    assert open_fds(service.pid) < 60
    for client in clients:
        client.close()
    # The supervisor sees them go one after the other.
    deadline = time.monotonic() + 5
    while True:
        late = DescriptorClient(service.address)
        try:
            late.hello(secrets.token_bytes(16), pidfd=own_pidfd)
            break
        except DescriptorRefusedError:
            assert time.monotonic() < deadline, "the flood is not over"
        finally:
            late.close()


def test_silent_connections_keep_no_worker_out(launch, own_pidfd):
    service = launch("--max-sessions", "2")
    silent = [DescriptorClient(service.address) for _ in range(2 * 2 + 16)]
    time.sleep(0.2)
    started = time.monotonic()
    late = DescriptorClient(service.address)
    late.hello(secrets.token_bytes(16), pidfd=own_pidfd)
    assert time.monotonic() - started < 0.9
    deadline = time.monotonic() + 5
    while open_fds(service.pid) > 30:
        assert time.monotonic() < deadline, "silent connections stay"
        time.sleep(0.05)
    for client in [*silent, late]:
        client.close()


def test_hellos_without_sessions_are_bounded(launch, own_pidfd):
    service = launch("--max-sessions", "2")
    clients = [DescriptorClient(service.address) for _ in range(5)]
    for client in clients[:4]:
        client.hello(secrets.token_bytes(16), pidfd=own_pidfd)
    assert refusal(clients[4].hello, secrets.token_bytes(16)).code == RESOURCE_EXHAUSTED
    for client in clients[:4]:
        client.close()
    deadline = time.monotonic() + 5
    while True:
        try:
            clients[4].hello(secrets.token_bytes(16), pidfd=own_pidfd)
            break
        except DescriptorRefusedError:
            assert time.monotonic() < deadline, "hellos of clients that left are kept"
            time.sleep(0.02)
    clients[4].close()
