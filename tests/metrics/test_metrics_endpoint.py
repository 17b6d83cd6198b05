"""The endpoint by itself: what it answers when something behind it fails."""

import asyncio
import socket

import pytest

from kvstore.config import ConfigurationError
from kvstore.metrics.endpoint import MetricsEndpoint


async def ask(endpoint: MetricsEndpoint, path: str) -> str:
    port = int(endpoint.url.rsplit(":", 1)[1].split("/")[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    answer = (await asyncio.wait_for(reader.read(), 10)).decode()
    writer.close()
    return answer


def run(scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_metrics_that_fail_are_an_answer_and_the_next_request_is_served(caplog) -> None:
    def render() -> bytes:
        raise ValueError("no numbers")

    async def scenario() -> None:
        endpoint = MetricsEndpoint("127.0.0.1:0", render, lambda: None)
        await endpoint.start()
        answer = await ask(endpoint, "/metrics")
        assert answer.startswith("HTTP/1.1 500 ")
        assert "no numbers" not in answer
        assert (await ask(endpoint, "/healthz")).startswith("HTTP/1.1 200 ")
        endpoint.close()

    run(scenario)
    assert "no numbers" in caplog.text


def test_readiness_says_why_not_and_liveness_is_apart() -> None:
    async def scenario() -> None:
        endpoint = MetricsEndpoint("127.0.0.1:0", lambda: b"", lambda: "the device does not answer")
        await endpoint.start()
        answer = await ask(endpoint, "/readyz")
        assert answer.startswith("HTTP/1.1 503 ")
        assert answer.endswith("the device does not answer\n")
        assert (await ask(endpoint, "/healthz")).startswith("HTTP/1.1 200 ")
        endpoint.close()

    run(scenario)


def test_an_address_in_use_is_told_with_a_remedy() -> None:
    async def scenario() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            endpoint = MetricsEndpoint(f"127.0.0.1:{taken.getsockname()[1]}", lambda: b"", lambda: None)
            with pytest.raises(ConfigurationError, match="choose another one with --metrics"):
                await endpoint.start()

    run(scenario)
