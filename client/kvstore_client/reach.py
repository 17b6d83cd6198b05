"""Whether a model's device can use the service's slabs where they lie."""

from __future__ import annotations

from kvstore_client.core import Core
from kvstore_client.errors import TransportUnavailableError
from kvstore_client.namespace import Namespace


def check_reach(core: Core, namespace: Namespace) -> None:
    """Says it when a model's device can't reach the slabs in place, though another one could. With `require_transport`
    that is TransportUnavailableError.
    """
    link = core.connection.link
    if link is None or link.transport_for(namespace) is link.transport:
        return
    text = (
        f"{namespace.identity.model_name} computes on {namespace.compute_device}, the service's blocks lie on "
        f"{link.memory.device}: they are copied over the bytes transport"
    )
    required = core.who.require_transport
    if required is not None:
        raise TransportUnavailableError(
            f"transport {required} is required, but {text}; compute on that device, use a service that holds its "
            "blocks on yours or on the cpu, or leave require_transport out"
        )
    core.notices.warn_condition("elsewhere", text)
