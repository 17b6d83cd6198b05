"""Log lines of the service: one line an event, on stderr, and a guard against the same line over and over."""

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MAX_KINDS = 256


class _LineFormatter(logging.Formatter):
    """`time level process: message` on one line, whatever the message holds."""

    # UTC; typeshed knows only the other signature.
    converter = time.gmtime  # type: ignore[assignment]

    def __init__(self, process: str) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s " + process + ": %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", "\\n")


class _JsonFormatter(_LineFormatter):
    """The same as one JSON object."""

    def __init__(self, process: str) -> None:
        super().__init__(process)
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "process": self._process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure_logging(process: str, *, as_json: bool, level: str) -> None:
    """Sends the log lines of this process to stderr. `process` names it in every line."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter(process) if as_json else _LineFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries tell of every socket at their lower levels.
    root.setLevel(logging.WARNING)
    logging.getLogger("kvstore").setLevel(level.upper())


@dataclass(slots=True)
class _Kind:
    logged_at: float
    suppressed: int


class LimitedLog:
    """Logs at most one line a kind of event in `period_s`; the next line says how many were left out.

    Remembers the MAX_KINDS kinds that were logged last.
    """

    def __init__(
        self, logger: logging.Logger, *, period_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kinds: OrderedDict[str, _Kind] = OrderedDict()
        self._logger = logger
        self._period_s = period_s
        self._clock = clock

    def log(self, level: int, kind: str, message: str, *, exc_info: BaseException | None = None) -> bool:
        """Logs `message` unless a line of this kind was logged less than `period_s` ago. Returns whether it did."""
        now = self._clock()
        seen = self._kinds.get(kind)
        if seen is not None and now - seen.logged_at < self._period_s:
            seen.suppressed += 1
            return False
        if seen is not None and seen.suppressed:
            message = f"{message} ({seen.suppressed} more of this kind in the last {now - seen.logged_at:.0f} s)"
        self._kinds[kind] = _Kind(now, 0)
        self._kinds.move_to_end(kind)
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        self._logger.log(level, "%s", message, exc_info=exc_info)
        return True
