"""The command line `kvstore`."""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from kvstore import cli_admin, cli_doctor, version
from kvstore.config import ConfigurationError, StartError, check_memory, load_config, shorten

PROGRAMS = {
    "demo": "Shows two workers sharing one document with a real model.",
    "bench": "Runs the benchmarks.",
    "fidelity": "Measures what each codec costs a model.",
}


# The base of all mistakes in a command line; typer shows only this one of its children.
_WRONG_USAGE: Any = typer.BadParameter.__mro__[1]


def serve(
    address: Annotated[
        str | None, typer.Option(metavar="PATH", help="Path of the socket [default: below XDG_RUNTIME_DIR or /run].")
    ] = None,
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Also serve on TCP; loopback only.")] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Let --listen leave loopback, unprotected.")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Serve metrics for Prometheus over HTTP; loopback only."),
    ] = None,
    metrics_public: Annotated[
        bool | None, typer.Option("--metrics-public", help="Let --metrics leave loopback; they are read-only.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Holds the blocks: cpu, cuda, cuda:N or GPU-UUID [default: cpu].")
    ] = None,
    slab_kind: Annotated[
        str | None, typer.Option(help="How GPU memory travels: auto, vmm or legacy [default: auto = vmm].")
    ] = None,
    budget: Annotated[str | None, typer.Option(metavar="SIZE", help="Hard limit, e.g. 4GiB [default: 4GiB].")] = None,
    namespace_budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Limit of each namespace [default: the whole budget].")
    ] = None,
    max_sessions: Annotated[str | None, typer.Option(metavar="COUNT", help="Workers at a time [default: 64].")] = None,
    grace: Annotated[
        str | None, typer.Option(metavar="SECONDS", help="Seconds that calls get at the stop [default: 10].")
    ] = None,
    session_grace: Annotated[
        str | None,
        typer.Option(metavar="SECONDS", help="Seconds a TCP session outlives its stream [default: 10]."),
    ] = None,
    json_logs: Annotated[bool | None, typer.Option("--json-logs", help="Log JSON lines.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error [default: info].")] = None,
    ready_fd: Annotated[
        str | None, typer.Option(metavar="FD", help="Descriptor to write the addresses to when ready.")
    ] = None,
    exit_with_parent: Annotated[bool, typer.Option(help="Stop when the starting process dies.")] = False,
) -> None:
    """Runs the service until SIGTERM or Ctrl-C. Every option can be set as KVSTORE_<OPTION>, e.g. KVSTORE_BUDGET."""
    from kvstore.log import configure_logging
    from kvstore.supervisor.process import Supervisor

    given = {
        "address": address, "listen": listen, "insecure": insecure, "device": device,
        "metrics": metrics, "metrics_public": metrics_public,
        "slab_kind": slab_kind, "budget": budget,
        "namespace_budget": namespace_budget, "max_sessions": max_sessions, "grace": grace,
        "session_grace": session_grace, "json_logs": json_logs, "log_level": log_level,
    }  # fmt: skip
    config = load_config(given, os.environ)
    if config.device == "cpu":
        check_memory(config.budget_bytes)
    configure_logging("supervisor", as_json=config.json_logs, level=config.log_level)

    ready = None if ready_fd is None else _inherited(ready_fd)

    def announce(addresses: list[str]) -> None:
        # Whoever asked may have stopped listening; that is no reason not to serve.
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.write(f"kvstore: serving on {' and '.join(addresses)}\n")
            sys.stdout.flush()
        if ready is not None:
            with os.fdopen(ready, "wb", buffering=0) as stream:
                stream.write("".join(f"{address}\n" for address in addresses).encode())

    raise typer.Exit(Supervisor(config, announce=announce, watch_parent=exit_with_parent).run())


def _inherited(text: str) -> int:
    """The descriptor that --ready-fd names. ConfigurationError when there is none."""
    try:
        fd = int(text)
        os.fstat(fd)
    except (ValueError, OverflowError, OSError):
        raise ConfigurationError(
            f"--ready-fd {shorten(text)} is not open. Expected a descriptor inherited from the starter: pass its number"
        ) from None
    return fd


def show_version() -> None:
    """Prints the version."""
    sys.stdout.write(f"kvstore {version()}\n")


def build() -> typer.Typer:
    """The whole command line."""
    app = typer.Typer(
        help="A cache service that holds quantized KV blocks and shares them between model workers.",
        epilog="Example: kvstore serve --address /run/kvstore/kvstore.sock --budget 4GiB",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    example = "Example: kvstore serve --address /tmp/kv/kvstore.sock --budget 2GiB --listen 127.0.0.1:7400"
    app.command(epilog=example)(serve)
    app.command("version", epilog="Example: kvstore version")(show_version)
    cli_admin.add_commands(app)
    app.command(epilog="Example: kvstore doctor --address 127.0.0.1:7400")(cli_doctor.doctor)
    # These parse their own options and are imported only when called.
    for name, purpose in PROGRAMS.items():
        if importlib.util.find_spec(f"kvstore.{name}") is not None:
            app.command(
                name,
                add_help_option=False,
                context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
                help=purpose,
                epilog=f"Example: kvstore {name} --help",
            )(_program(f"kvstore.{name}.cli"))
    return app


def _program(module: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        raise typer.Exit(importlib.import_module(module).main(context.args))

    return run


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point: the user's own mistakes end in one line on stderr and a non-zero exit code."""
    try:
        status = build()(arguments, standalone_mode=False)
    except StartError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    except _WRONG_USAGE as error:
        # `kvstore` alone: its text is the help.
        alone = type(error).__name__ == "NoArgsIsHelpError"
        sys.stderr.write(f"{error.format_message()}\n" if alone else f"error: {_mistake(error)}\n")
        sys.exit(error.exit_code)
    except typer.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)


def _mistake(error: Any) -> str:
    """What is wrong with the command line, in one line with a remedy."""
    what = shorten(" ".join(error.format_message().split()).rstrip("."))
    context = error.ctx
    command = "kvstore" if context is None or context.parent is None else f"kvstore {context.info_name}"
    if isinstance(error, typer.BadParameter):
        expected = "a value that it takes"
    elif command == "kvstore":
        expected = f"one of {', '.join(sorted(context.command.commands))}" if context else "a command"
    else:
        expected = "options and arguments that it knows"
    return f"{command}: {what}. Expected {expected}: see `{command} --help`"
