"""A worker process of the demo: `python -m kvstore.demo.worker FD`.

One JSON command a line on stdin, one JSON answer a line on descriptor FD. Everything else that is printed goes to the
log. The process ends when stdin does, so it never outlives a demo that was killed.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.demo.program import CommandProgram

if TYPE_CHECKING:
    from kvstore.demo.arms import NativeArm, SharedArm


class _Warnings(logging.Handler):
    """Collects the warnings of the client in `lines`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class WorkerProgram(CommandProgram):
    """The commands."""

    def __init__(self, answers: int) -> None:
        super().__init__(answers)
        self._store: Any = None
        self._tokenizer: Any = None
        self._arms: dict[str, NativeArm | SharedArm] = {}
        self._warnings = _Warnings()
        logging.getLogger("kvstore_client").addHandler(self._warnings)

    def load(
        self, name: str, model: str, folder: str | None, address: str | None, arms: list[str], device: str
    ) -> dict[str, Any]:
        """Imports, loads the model on `device`, connects, attaches one copy of it (weights shared) for each arm."""
        start = time.perf_counter()
        from kvstore.demo import models
        from kvstore.demo.arms import NativeArm, SharedArm

        imported = time.perf_counter()
        base, self._tokenizer = models.load(model, Path(folder) if folder else None, device)
        base.config.name_or_path = model
        loaded = time.perf_counter()
        if address is not None:
            from kvstore_client import connect

            self._store = connect(address, name=name)
        for arm in arms:
            twin = _twin(base)
            self._arms[arm] = NativeArm(twin) if arm == "native" else SharedArm(self._store, twin, self._tokenizer, arm)
        config = base.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return {
            "import_s": imported - start,
            "load_s": loaded - imported,
            "attach_s": time.perf_counter() - loaded,
            "head_dim": head_dim,
            "layers": config.num_hidden_layers,
            "kv_heads": config.num_key_value_heads,
        }

    def prompts(self, document_tokens: int, start: int, questions: list[str]) -> dict[str, Any]:
        """Token ids of one prompt a question about `document_tokens` tokens of the text from token `start`."""
        from kvstore.demo import texts

        text = texts.find_text()
        document = ""
        if document_tokens:
            # One character is at least part of a token: no need to tokenize a whole play for the tiny models.
            everything = self._tokenizer(text.body, add_special_tokens=False).input_ids
            document = self._tokenizer.decode(texts.cut(everything, document_tokens, start))
        prompts = [texts.prompt_tokens(self._tokenizer, document, question) for question in questions]
        return {"prompts": prompts, "title": text.title, "note": text.note}

    def run(
        self,
        arm: str,
        tokens: list[int],
        new_tokens: int,
        exact: bool = False,
        gaps: bool = False,
        split: int = 0,
        announce: bool = False,
    ) -> dict[str, Any]:
        """One prompt. `announce` sends the line {"event": "first-token"} when it comes."""
        from kvstore.demo.arms import NativeArm

        chosen = self._arms[arm]
        tell = self._announce if announce else None
        seen = len(self._warnings.lines)
        if isinstance(chosen, NativeArm):
            answer = chosen.run(tokens, new_tokens, exact=exact, gaps=gaps, split=split, announce=tell)
        else:
            answer = chosen.run(tokens, new_tokens, exact=exact, gaps=gaps, announce=tell)
        text = self._tokenizer.decode(answer.tokens, skip_special_tokens=True)
        return {**asdict(answer), "text": text, "warnings": self._warnings.lines[seen:]}

    def batch(self, arm: str, rows: list[list[int]], new_tokens: int, split: int = 0) -> dict[str, Any]:
        """A left-padded batch."""
        from kvstore.demo.arms import NativeArm

        chosen = self._arms[arm]
        pad = self._tokenizer.pad_token_id
        if isinstance(chosen, NativeArm):
            return asdict(chosen.batch(rows, new_tokens, pad, split=split))
        return asdict(chosen.batch(rows, new_tokens, pad))

    def threads(self, arm: str, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """All prompts at the same moment, a thread each, on one attached model: the tokens of each."""
        found: list[list[int] | None] = [None] * len(prompts)
        errors: list[BaseException] = []

        def work(index: int) -> None:
            try:
                found[index] = self._arms[arm].run(prompts[index], new_tokens).tokens
            except BaseException as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=600)
        if errors:
            raise errors[0]
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError("a thread did not finish within 600 s")
        return [tokens for tokens in found if tokens is not None]

    def warnings_so_far(self) -> list[str]:
        """All warnings of the client since the process started."""
        return self._warnings.lines

    def flush(self, timeout: float = 10.0) -> bool:
        """Waits until commits and releases have reached the service."""
        return bool(self._store.flush(timeout))

    def close(self) -> None:
        """Ends the connection."""
        if self._store is not None:
            self._store.close()

    def _announce(self) -> None:
        self.write({"event": "first-token"})


def _twin(model: Any) -> Any:
    """A copy that shares all weights: attaching one leaves the other as it is."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


if __name__ == "__main__":
    WorkerProgram.main()
