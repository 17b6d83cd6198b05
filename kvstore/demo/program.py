"""What the measuring commands (`kvstore demo`, `kvstore bench`) and their worker processes share as programs."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from kvstore.demo.errors import DemoError

_PR_SET_PDEATHSIG = 1


def run_app(app: Callable[..., Any], name: str, arguments: Sequence[str]) -> int:
    """Runs a typer app with `arguments` and returns the exit code; errors are one text on stderr."""
    try:
        app(args=list(arguments), prog_name=name)
    except SystemExit as end:
        # The framework's own way to end: 0 for --help, 2 for a bad option, or the code of typer.Exit.
        return end.code if isinstance(end.code, int) else 0
    except DemoError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"error: {error}. Expected room and permission to write there\n")
        return 1
    return 0


@contextmanager
def terminate_is_interrupt() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that the child processes are ended too."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class CommandProgram(ABC):
    """A worker process: one JSON command a line on stdin, one JSON answer a line on descriptor `answers`.

    Public methods of a subclass are commands: keyword arguments in, something JSON can hold out. The process ends when
    stdin does, or with its parent, even in the middle of a long forward pass.
    """

    def __init__(self, answers: int) -> None:
        self._answers = answers

    @classmethod
    def main(cls) -> None:
        """Entry point: the descriptor is the only argument."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        logging.basicConfig(level=logging.INFO)
        cls(int(sys.argv[1])).serve()

    def serve(self) -> None:
        """Answers commands until stdin ends."""
        for line in sys.stdin:
            command = json.loads(line)
            do = command.pop("do")
            try:
                self.write({"result": getattr(self, do)(**command)})
            except Exception as error:  # the whole program's boundary: the parent decides what a failed command means
                logging.getLogger(__name__).exception("%s failed", do)
                self.write({"error": f"{type(error).__name__}: {error}"})
        self.close()

    def write(self, answer: dict[str, Any]) -> None:
        """One line for the parent."""
        data = json.dumps(answer).encode() + b"\n"
        while data:
            data = data[os.write(self._answers, data) :]

    @abstractmethod
    def close(self) -> None:
        """Gives back what the program holds."""
