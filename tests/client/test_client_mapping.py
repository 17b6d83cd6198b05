"""Mappings: rights, replacement in place, end of life; and replies that must not be believed."""

import fcntl
import gc
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kvstore_client import AccessDeniedError, BadReplyError, ProtocolMismatchError, ServiceUnavailableError
from kvstore_client.descriptors import DescriptorSocket, Received
from kvstore_client.mapping import SlabMap
from kvstore_client.offers import DescriptorSource, Offer, offer_of_segment
from kvstore_client.probing import probe_descriptors
from kvstore_proto.v1 import descriptor_pb2 as pb

SLOT = 4096


def memfd(nbytes: int, *, sealed: bool = True) -> int:
    fd = os.memfd_create("slab", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


class Supply:
    """Stands for the descriptor socket: hands out descriptors of one memfd and what the test says about it."""

    def __init__(self, nbytes: int = 3 * SLOT + 100, *, sealed: bool = True) -> None:
        self.fd = memfd(nbytes, sealed=sealed)
        self.segment = pb.Segment(bytes=nbytes, slot_bytes=SLOT, slots=3)
        self.opened: list[bool] = []

    def fetch(self, slab_id: int, *, writable: bool) -> Offer:
        self.opened.append(writable)
        mode = os.O_RDWR if writable else os.O_RDONLY
        return offer_of_segment(self.segment, Received(os.open(f"/proc/self/fd/{self.fd}", mode)))

    def close(self) -> None:
        os.close(self.fd)


def run_now(action: Callable[[], None]) -> None:
    action()


@pytest.fixture
def supply() -> Iterator[Supply]:
    made = Supply()
    yield made
    made.close()


def rights(address: int) -> list[str]:
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            found.append(line.split()[1])
    return found


def test_upgrade_and_downgrade_keep_the_address(supply: Supply) -> None:
    unmapped: list[int] = []
    slabs = SlabMap(supply, unmapped.append, run_now)
    slab = slabs.open(7, SLOT, writable=False)
    address = slab.base_address
    assert rights(address) == ["r--s"]
    os.pwrite(supply.fd, b"hello", SLOT)
    assert bytes(slab.slot_buffer(1)[:5]) == b"hello"
    assert slabs.open(7, SLOT, writable=True) is slab
    assert (slab.base_address, rights(address), slab.writable) == (address, ["rw-s"], True)
    slab.slot_buffer(2)[:3] = b"abc"
    assert os.pread(supply.fd, 3, 2 * SLOT) == b"abc"
    assert slabs.open(7, SLOT, writable=False) is slab, "a writable mapping serves readers"
    assert slabs.downgrade([7, 8]) == [7, 8]
    assert (rights(address), slab.writable) == (["r--s"], False)
    assert supply.opened == [False, True, False]
    assert unmapped == []


def test_mapping_lives_as_long_as_something_refers_to_it(supply: Supply) -> None:
    unmapped: list[int] = []
    slabs = SlabMap(supply, unmapped.append, run_now)
    view: torch.Tensor | None = slabs.open(7, SLOT, writable=False).data[5:9]
    assert view is not None
    address = view.data_ptr() - 5
    slabs.retire([7, 9])
    gc.collect()
    assert unmapped == [9], "a slab that was never mapped is acknowledged at once"
    assert rights(address) == ["r--s"]
    assert slabs.alive == 1
    with pytest.raises(ServiceUnavailableError, match="returned"):
        slabs.open(7, SLOT, writable=False)
    view = None
    gc.collect()
    assert unmapped == [9, 7]
    assert slabs.alive == 0
    slabs.retire([7])
    assert unmapped == [9, 7], "told once"


def test_forked_child_does_not_inherit_the_mapping(supply: Supply) -> None:
    slabs = SlabMap(supply, lambda _: None, run_now)
    slab = slabs.open(7, SLOT, writable=False)
    address = slab.base_address
    pid = os.fork()
    if pid == 0:
        os._exit(0 if rights(address) == [] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert rights(address) == ["r--s"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"bytes": 0}, "claims 0 bytes"),
        ({"bytes": 1 << 50}, "its descriptor has"),
        ({"bytes": 3 * SLOT + 101}, "its descriptor has"),
        ({"slot_bytes": SLOT * 2}, "slots of 8192"),
        ({"slot_bytes": 0}, "slots of 0"),
        ({"slots": 4}, "claims 4 slots"),
        ({"slots": 0}, "claims 0 slots"),
        ({"slots": 2**32 - 1}, "claims"),
    ],
)
def test_a_segment_that_can_not_be_is_not_mapped(supply: Supply, changes: dict[str, int], text: str) -> None:
    # b161
    for name, value in changes.items():
        setattr(supply.segment, name, value)
    slabs = SlabMap(supply, lambda _: None, run_now)
    with pytest.raises(BadReplyError, match=text):
        slabs.open(7, SLOT, writable=False)
    assert slabs.alive == 0


def test_memory_that_could_shrink_is_not_mapped() -> None:
    # b161: its owner could truncate it, and readers would die of SIGBUS.
    supply = Supply(sealed=False)
    slabs = SlabMap(supply, lambda _: None, run_now)
    with pytest.raises(BadReplyError, match="sealed"):
        slabs.open(7, SLOT, writable=False)
    supply.close()


def test_another_slot_size_for_a_mapped_slab(supply: Supply) -> None:
    slabs = SlabMap(supply, lambda _: None, run_now)
    slabs.open(7, SLOT, writable=False)
    with pytest.raises(BadReplyError, match="slots of 4096"):
        slabs.open(7, 2 * SLOT, writable=False)


SERVER = """
import os, socket, sys
listener = socket.socket(fileno=int(sys.argv[1]))
peer, _ = listener.accept()
peer.recv(65536)
fd = os.memfd_create("page", os.MFD_ALLOW_SEALING)
os.pwrite(fd, b"a nonce from another process" + bytes(4068), 0)
from kvstore_proto.v1 import descriptor_pb2 as pb
reply = pb.DescriptorResponse(probe=pb.ProbeReply(nonce=b"a nonce from another process"))
socket.send_fds(peer, [reply.SerializeToString()], [fd])
peer.recv(1)
"""


def listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(4)
    return listener


def test_descriptor_from_another_process_is_mapped_and_compared(short_folder: Path) -> None:
    listener = listen(short_folder / "s")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(listener.fileno())], pass_fds=[listener.fileno()], env=environment
    ) as other:
        listener.close()
        descriptors = DescriptorSocket.connect(str(short_folder / "s"), 5.0)
        assert probe_descriptors(descriptors, 30.0) == ""
        descriptors.close()
        assert other.wait(10) == 0


@pytest.fixture
def peer(short_folder: Path) -> Iterator[tuple[DescriptorSocket, socket.socket]]:
    listener = listen(short_folder / "s")
    descriptors = DescriptorSocket.connect(str(short_folder / "s"), 5.0)
    accepted, _ = listener.accept()
    yield descriptors, accepted
    descriptors.close()
    accepted.close()
    listener.close()


def answer(sock: socket.socket, *replies: pb.DescriptorResponse | bytes, fds: tuple[int, ...] = ()) -> None:
    for reply in replies:
        data = reply if isinstance(reply, bytes) else reply.SerializeToString()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
        sock.sendmsg([data], rights)


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_hello_passes_our_own_pidfd(peer: tuple[DescriptorSocket, socket.socket]) -> None:
    descriptors, server = peer
    answer(server, pb.DescriptorResponse(hello=pb.HelloReply(token="t", process_watched=True)))
    assert descriptors.hello(b"i" * 16, 1.0).token == "t"
    data, fds, _, _ = socket.recv_fds(server, 65536, 4)
    assert pb.DescriptorRequest.FromString(data).hello.instance_id == b"i" * 16
    assert f"Pid:\t{os.getpid()}" in Path(f"/proc/self/fdinfo/{fds[0]}").read_text()
    os.close(fds[0])


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"\xff\xff", BadReplyError),
        (pb.DescriptorResponse(segment=pb.Segment(bytes=1)), BadReplyError),
        (pb.DescriptorResponse(error=pb.DescriptorError(code=9, message="version 2")), ProtocolMismatchError),
        (pb.DescriptorResponse(error=pb.DescriptorError(code=7, message="no")), AccessDeniedError),
        (pb.DescriptorResponse(error=pb.DescriptorError(code=14, message="later")), ServiceUnavailableError),
    ],
)
def test_answers_to_hello(
    peer: tuple[DescriptorSocket, socket.socket], reply: pb.DescriptorResponse | bytes, kind: type[Exception]
) -> None:
    descriptors, server = peer
    answer(server, reply)
    with pytest.raises(kind):
        descriptors.hello(b"i" * 16, 1.0)


@pytest.mark.parametrize("count", [0, 2])
def test_descriptors_of_a_bad_reply_are_closed(peer: tuple[DescriptorSocket, socket.socket], count: int) -> None:
    descriptors, server = peer
    fd = memfd(4096)
    before = open_fds()
    answer(server, pb.DescriptorResponse(probe=pb.ProbeReply(nonce=b"n")), fds=(fd,) * count)
    with pytest.raises(BadReplyError, match=f"{count} descriptors"):
        descriptors.probe(1.0)
    assert open_fds() == before
    os.close(fd)


def test_late_answers_are_thrown_away(peer: tuple[DescriptorSocket, socket.socket]) -> None:
    descriptors, server = peer
    fd = memfd(4096)
    with pytest.raises(ServiceUnavailableError, match="in time"):
        DescriptorSource(descriptors, 0.05).fetch(1, writable=False)
    before = open_fds()
    answer(server, pb.DescriptorResponse(segment=pb.Segment(bytes=1)), fds=(fd,))
    answer(server, pb.DescriptorResponse(segment=pb.Segment(bytes=2)), fds=(fd,))
    segment, received = descriptors.open_slab(2, writable=False, timeout_s=1.0)
    with received:
        assert segment.bytes == 2
        assert open_fds() == before + 1
    os.close(fd)


def test_wrong_nonce_means_no_descriptors(peer: tuple[DescriptorSocket, socket.socket]) -> None:
    descriptors, server = peer
    fd = memfd(4096)
    answer(server, pb.DescriptorResponse(probe=pb.ProbeReply(nonce=b"nonce")), fds=(fd,))
    assert "does not hold" in probe_descriptors(descriptors, 1.0)
    answer(server, pb.DescriptorResponse(probe=pb.ProbeReply(nonce=b"n" * 4097)), fds=(fd,))
    assert "4096 bytes" in probe_descriptors(descriptors, 1.0)
    os.close(fd)


def test_closing_ends_an_exchange_under_way(peer: tuple[DescriptorSocket, socket.socket]) -> None:
    descriptors, _ = peer
    timer = threading.Timer(0.05, descriptors.close)
    timer.start()
    with pytest.raises(ServiceUnavailableError):
        descriptors.probe(5.0)
    timer.join()


def test_nobody_listens_and_no_permission(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServiceUnavailableError, match="kvstore serve"):
        DescriptorSocket.connect(str(short_folder / "none.fd"), 1.0)

    def refuse(self: socket.socket, path: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(AccessDeniedError, match="group"):
        DescriptorSocket.connect(str(short_folder / "s.fd"), 1.0)
