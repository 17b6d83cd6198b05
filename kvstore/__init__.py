"""The cache service: owns the memory of the KV cache and shares it between model workers."""

__all__ = ["version"]


def version() -> str:
    """Version of the installed distribution; "0+unknown" when run from a checkout that is not installed."""
    # Costs as much as the rest of the start; most processes never ask.
    from importlib import metadata

    try:
        return metadata.version("gpu-kvstore")
    except metadata.PackageNotFoundError:
        return "0+unknown"
