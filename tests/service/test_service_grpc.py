"""What every gRPC server of the service must do, whatever it serves: health, reflection, refusals, limits."""

import os
import random
import subprocess
import sys
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kvstore_proto import PROTOCOL_VERSION
from kvstore_proto.v1 import admin_pb2, blocks_pb2, session_pb2

from kvstore.testing_client import DEADLINE_S, ModelShape, RawClient, admin_channel

SERVING = health_pb2.HealthCheckResponse.SERVING
RPCS = [
    f"/{service.full_name}/{method.name}"
    for file in (blocks_pb2, session_pb2, admin_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if not method.client_streaming and not method.server_streaming
]


@pytest.fixture(scope="module", params=["unix", "tcp", "admin"])
def channel(request, shared_service):
    target = {
        "unix": f"unix:{shared_service.address}",
        "tcp": shared_service.listen,
        "admin": f"unix:{shared_service.address}.admin",
    }[request.param]
    with grpc.insecure_channel(target, options=(("grpc.enable_http_proxy", 0),)) as channel:
        yield channel


def status(error):
    return error.value.code(), error.value.details()


def test_health_knows_live_and_ready(channel):
    stub = health_pb2_grpc.HealthStub(channel)
    for name in ("", "live", "kvstore.v1.BlockService", "kvstore.v1.SessionService", "kvstore.v1.AdminService"):
        assert stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=DEADLINE_S).status == SERVING
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="other"), timeout=DEADLINE_S)
    assert status(caught)[0] is grpc.StatusCode.NOT_FOUND


def test_health_watches_are_bounded_and_end(channel):
    stub = health_pb2_grpc.HealthStub(channel)
    watches = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S) for _ in range(64)]
    assert {next(watch).status for watch in watches} == {SERVING}
    with pytest.raises(grpc.RpcError) as caught:
        next(stub.Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S))
    assert status(caught)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    for watch in watches:
        watch.cancel()
    deadline = time.monotonic() + 5
    while True:
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        try:
            assert next(watch).status == SERVING
            break
        except grpc.RpcError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    watch.cancel()


def test_reflection_lists_the_services(channel):
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (reply,) = stub.ServerReflectionInfo(iter([request]), timeout=DEADLINE_S)
    assert "grpc.health.v1.Health" in {service.name for service in reply.list_services_response.service}


@pytest.mark.parametrize("rpc", RPCS)
def test_b152_random_bytes_are_an_invalid_argument(shared_service, rpc):
    rng = random.Random(rpc)
    channel = grpc.insecure_channel(f"unix:{shared_service.address}")
    if "Admin" in rpc:
        channel = admin_channel(shared_service.address)
    with channel:
        call = channel.unary_unary(rpc)
        metadata = (("kvstore-session", rng.randbytes(16).hex()),)
        for _ in range(5):
            with pytest.raises(grpc.RpcError) as caught:
                call(b"\xff" + rng.randbytes(200), metadata=metadata, timeout=DEADLINE_S)
            assert status(caught)[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        ((), grpc.StatusCode.UNAUTHENTICATED),
        ((("kvstore-session", "zz"),), grpc.StatusCode.INVALID_ARGUMENT),
        ((("kvstore-session", "00" * 15),), grpc.StatusCode.INVALID_ARGUMENT),
        ((("kvstore-session", "00" * 16),), grpc.StatusCode.UNAUTHENTICATED),
    ],
)
@pytest.mark.parametrize("rpc", [rpc for rpc in RPCS if "Admin" not in rpc])
def test_a_call_without_a_living_session_is_refused(shared_service, rpc, metadata, code):
    with grpc.insecure_channel(f"unix:{shared_service.address}") as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(rpc)(VALID.get(rpc.rsplit("/")[-1], b""), metadata=metadata, timeout=DEADLINE_S)
    assert status(caught)[0] is code


VALID = {
    "RegisterModel": ModelShape().request().SerializeToString(),
    "GetCodecPlan": session_pb2.GetCodecPlanRequest(model_fingerprint=bytes(32), codec="int8").SerializeToString(),
    "Pin": blocks_pb2.PinRequest(digest=bytes(32)).SerializeToString(),
    "Lookup": blocks_pb2.LookupRequest(queries=[blocks_pb2.Query(digests=bytes(32))]).SerializeToString(),
    "LookupAndLease": blocks_pb2.LookupAndLeaseRequest(
        queries=[blocks_pb2.Query(digests=bytes(32))]
    ).SerializeToString(),
    "ReportDamage": blocks_pb2.ReportDamageRequest(digests=bytes(32)).SerializeToString(),
}


def test_the_unix_socket_wants_the_token_of_a_hello_once(shared_service):
    with pytest.raises(grpc.RpcError) as caught:
        RawClient(shared_service.address, token="00" * 16)
    assert status(caught)[0] is grpc.StatusCode.UNAUTHENTICATED
    assert "hello" in status(caught)[1]


def test_b220_another_protocol_version_is_refused_with_both_named(shared_service):
    with pytest.raises(grpc.RpcError) as caught:
        RawClient(shared_service.listen, protocol_version=PROTOCOL_VERSION + 1)
    code, text = status(caught)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert f"version {PROTOCOL_VERSION + 1}, the service {PROTOCOL_VERSION}" in text


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"instance_id": bytes(15)}, "instance_id has 15 bytes"),
        ({"transport": "carrier pigeon"}, "carrier pigeon"),
        ({"transport": "fd"}, "over TCP"),
        ({"name": "x" * 201}, "201 characters"),
        ({"name": "a\nb"}, "control characters"),
    ],
)
def test_a_wrong_open_is_refused(shared_service, fields, part):
    opening = session_pb2.OpenSession(
        **{"instance_id": bytes(16), "protocol_version": PROTOCOL_VERSION, "transport": "bytes", **fields}
    )
    with grpc.insecure_channel(shared_service.listen) as channel:
        call = channel.stream_stream("/kvstore.v1.SessionService/Session", session_pb2.SessionRequest.SerializeToString)
        with pytest.raises(grpc.RpcError) as caught:
            next(call(iter([session_pb2.SessionRequest(open=opening)]), timeout=DEADLINE_S))
    code, text = status(caught)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert part in text


def test_a_stream_that_does_not_begin_with_open_is_refused(shared_service):
    wrong = session_pb2.SessionRequest(slabs_unmapped=session_pb2.SlabsUnmapped(slab_ids=[1]))
    for first in ([wrong.SerializeToString()], [b"\xff\xff"], []):
        with grpc.insecure_channel(shared_service.listen) as channel, pytest.raises(grpc.RpcError) as caught:
            next(channel.stream_stream("/kvstore.v1.SessionService/Session")(iter(first), timeout=DEADLINE_S))
        assert status(caught)[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_b168_a_message_over_the_limit_is_refused_and_harms_nobody(shared_service):
    with RawClient(shared_service.address) as client:
        with pytest.raises(grpc.RpcError) as caught:
            client.call(
                client.blocks.Lookup, blocks_pb2.LookupRequest(queries=[blocks_pb2.Query(digests=bytes(5 << 20))])
            )
        assert status(caught)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert client.call(client.blocks.Lookup, blocks_pb2.LookupRequest()).matches == []


def test_b169_a_client_that_pings_often_is_not_thrown_out(shared_service):
    options = (
        ("grpc.keepalive_time_ms", 300),
        ("grpc.keepalive_timeout_ms", 2000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    seen = []
    with grpc.insecure_channel(shared_service.listen, options=options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        channel.subscribe(seen.append)
        time.sleep(2)
        stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    assert grpc.ChannelConnectivity.TRANSIENT_FAILURE not in seen
    assert grpc.ChannelConnectivity.CONNECTING not in seen


def test_b172_a_proxy_in_the_environment_changes_nothing(shared_service):
    dead = "http://127.0.0.1:9"
    env = {**os.environ, "http_proxy": dead, "https_proxy": dead, "grpc_proxy": dead}
    command = [sys.executable, "-m", "kvstore", "stats", "--json", "--address", str(shared_service.address)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20, env=env)
    assert result.returncode == 0, result.stderr
    code = "import sys; from kvstore.testing_client import RawClient; RawClient(sys.argv[1]).close()"
    subprocess.run([sys.executable, "-c", code, shared_service.listen], env=env, timeout=20, check=True)
