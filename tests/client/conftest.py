"""Stores that are closed at the end, and a service in this process."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvstore_client import Store, connect
from kvstore_client.namespace import Namespace
from kvstore_client.testing import FAST, PATIENT, FakeService, identity, plan


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def fake() -> Iterator[FakeService]:
    service = FakeService().start()
    try:
        yield service
    finally:
        service.stop()


@pytest.fixture
def opened() -> Iterator[Callable[..., Store]]:
    """connect(), closed at the end."""
    stores: list[Store] = []

    def open_store(address: str, **options: Any) -> Store:
        options.setdefault("config", PATIENT)
        store = connect(address, **options)
        stores.append(store)
        return store

    yield open_store
    for store in stores:
        store.close(2.0)


@pytest.fixture
def namespace(fake: FakeService, opened: Callable[..., Store]) -> tuple[Store, Namespace]:
    store = opened(fake.address)
    return store, store.namespace_for(identity(), plan)


@pytest.fixture
def impatient(fake: FakeService, opened: Callable[..., Store]) -> tuple[Store, Namespace]:
    """Like `namespace`, with short deadlines."""
    store = opened(fake.address, config=FAST)
    return store, store.namespace_for(identity(), plan)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for sockets: their paths hold 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="kv-"))
    yield folder
    shutil.rmtree(folder)
