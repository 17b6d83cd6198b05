"""What one request got from the cache, and why no more."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore_client.blocks import RequestTraffic

_REASONS = {
    "not-found": "not found",
    "in-flight": "another worker is still writing it",
    "damaged": "a block was damaged",
    "fidelity": "held with a larger error than this reader takes (min_fidelity)",
    "service-away": "service absent",
    "error": "the service answered with an error",
    "local-budget": "no local room for fetched blocks",
    "unmapped": "a slab could not be mapped",
    "not-shared": "this worker's blocks are local",
}


def describe(reason: str) -> str:
    """The text for a Match's one-word reason."""
    return _REASONS.get(reason, reason)


@dataclass(slots=True)
class RowReport:
    """One row of a batch. `why_no_more` is empty when all that may be reused was."""

    prompt_tokens: int
    reused_tokens: int = 0
    matched_tokens: int = 0
    """Tokens the cache holds; more than `reused_tokens` when other rows of the batch, or the last token, limit it."""
    written_by: list[tuple[str, int]] = field(default_factory=list)
    """(session name, tokens) in order."""
    why_no_more: str = ""


@dataclass(slots=True)
class HitReport:
    """One request: times in milliseconds, sizes in bytes. Complete when generate() has returned."""

    path: str
    """"kvstore", or "native" when the request ran on the model's own cache (`warnings` says why)."""
    rows: list[RowReport] = field(default_factory=list)
    shared_bytes: int = 0
    """Bytes of blocks read in place that somebody else wrote."""
    match_ms: float = 0.0
    wait_ms: float = 0.0
    """Part of match_ms spent waiting for blocks another worker was writing."""
    prefill_tokens: int = 0
    """Tokens computed before the first new one, over all rows, padding not counted."""
    prefill_ms: float = 0.0
    first_token_ms: float | None = None
    """From the call of generate() to the first new token; None if none came."""
    generated_tokens: int = 0
    committed_blocks: int = 0
    local_blocks: int = 0
    traffic: RequestTraffic | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def reused_tokens(self) -> int:
        """Tokens reused, over all rows."""
        return sum(row.reused_tokens for row in self.rows)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens, over all rows, padding not counted."""
        return sum(row.prompt_tokens for row in self.rows)

    def take(self, traffic: RequestTraffic) -> None:
        """What the request cost so far, and warnings of what fell short."""
        self.traffic = traffic
        self.local_blocks = traffic.local_blocks
        for reason in traffic.short_reasons:
            self.warn(reason)
        if traffic.blocks_not_shared_error:
            self.warn(f"{traffic.blocks_not_shared_error} blocks over the error bound stay private")

    def warn(self, text: str) -> None:
        """Adds a warning once; at most 32."""
        if text not in self.warnings and len(self.warnings) < 32:
            self.warnings.append(text)

    def __str__(self) -> str:
        if self.path == "native":
            return f"native cache: {'; '.join(self.warnings)}"
        text = f"reused {self.reused_tokens} of {self.prompt_tokens} prompt tokens, match {self.match_ms:.1f} ms"
        reasons = sorted({row.why_no_more for row in self.rows if row.why_no_more})
        return text + (f" (no more: {'; '.join(reasons)})" if reasons else "")
