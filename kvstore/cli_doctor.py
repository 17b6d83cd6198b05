"""`kvstore doctor`: what works between this machine's workers and a service, and why the rest does not."""

import dataclasses
import json
import logging
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.config import StartError, default_address

if TYPE_CHECKING:
    from kvstore_client.diagnosis import Diagnosis


def doctor(
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="ADDRESS", help="The service's socket, or HOST:PORT [env: KVSTORE_ADDRESS]."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tries every transport from this process, as a worker would. Exit code 1 when none works."""
    # An operator's tool that is a worker for a moment: the only command that needs the client.
    from kvstore_client.diagnosis import diagnose
    from kvstore_client.errors import UsageError

    # What goes wrong is in the diagnosis.
    logging.getLogger("kvstore_client").setLevel(logging.CRITICAL)
    try:
        found = diagnose(str(default_address(os.environ)) if address is None else address)
    except UsageError as error:
        raise StartError(str(error)) from None
    if as_json:
        sys.stdout.write(json.dumps({**dataclasses.asdict(found), "works": found.works}, indent=2) + "\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in _lines(found)))
    if not found.works:
        raise typer.Exit(1)


def _lines(found: "Diagnosis") -> list[str]:
    lines = [f"address    {found.address}"]
    versions = f"client {found.client_version}" + (f", service {found.server_version}" if found.server_version else "")
    lines.append(f"versions   {versions}")
    lines.append(f"this       pid {found.pid}, CUDA devices: {found.cuda_here}")
    if found.device:
        here = f" = {found.device_here} here" if found.device_here else ", not visible here"
        uuid = f" {found.device_uuid}{here}" if found.device_uuid else ""
        lines.append(f"device     {found.device}{uuid}, memory {found.memory}")
        watched = "watched by its pidfd" if found.process_watched else "not watched"
        lines.append(f"worker     {watched}")
    lines.extend(f"{c.transport:<10} {'works' if c.works else f'no: {c.reason}'}" for c in found.candidates)
    if found.chosen:
        why = f" ({found.chosen_reason})" if found.chosen_reason else ""
        lines.append(f"chosen     {found.chosen}{why}")
    if found.error:
        lines.append(f"error      {found.error}")
    lines.extend(f"note       {remark}" for remark in found.remarks)
    return lines
