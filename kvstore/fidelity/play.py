"""The order of what is measured, and what is left when something can't be."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvstore.demo.claims import Row
from kvstore.demo.program import terminate_is_interrupt
from kvstore.fidelity import models
from kvstore.fidelity.caches import OwnCache, own_caches
from kvstore.fidelity.ours import open_store
from kvstore.fidelity.peers import schemes
from kvstore.fidelity.settings import Settings
from kvstore.fidelity.stage import Stage
from kvstore.fidelity.variant_run import VariantRun
from kvstore.fidelity.variants import VariantError, check_lossless, difference, make_variant

_ALIKE_TOKENS = 256


def play(settings: Settings, console: Console, keep: Callable[[list[Row]], None] = lambda _: None) -> list[Row]:
    """Measures all variants and returns the rows; `keep` gets all rows so far after each variant.

    The service it starts is gone when it returns or raises. OptionError for what the model or the text can't be.
    """
    text = models.read_text(settings.text_file)
    peers = schemes() if settings.peers else []
    caches = [cache for cache in own_caches() if settings.peers and not cache.why_not()]
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with terminate_is_interrupt(), Progress(*columns, console=console) as progress:
        stage = Stage(settings, progress, len(peers), len(caches))
        if text.note:
            stage.say(f"note: {text.note}")
        model, tokenizer = models.load_model(settings.folder, settings.device)
        models.check_window(model, settings.window)
        windows = models.cut_windows(tokenizer, text.body, settings.windows, settings.window)
        stage.add(
            "model",
            model=settings.model_name,
            text=text.title,
            windows=len(windows),
            window=settings.window,
            layers=int(model.config.num_hidden_layers),
        )
        for cache in own_caches() if settings.peers else []:
            _note_missing(stage, cache)
        for number, name in enumerate(settings.variants):
            if number and stage.over:
                stage.skip("all", name, "out of time (--max-minutes)")
                continue
            stage.begin_variant(name)
            try:
                variant = make_variant(name, model)
                found = difference(model, variant, windows[0][:, :_ALIKE_TOKENS].to(model.device))
                check_lossless(name, found)
            except VariantError as error:
                stage.skip("all", name, str(error))
                continue
            with open_store(settings.device) as store:
                run = VariantRun(stage, name, variant, tokenizer, store, peers, caches)
                try:
                    run.measure_windows(windows, found)
                    stage.say(f"{name}: {run.windows} of {len(windows)} windows measured")
                    run.measure_layers(windows[0])
                    if settings.greedy:
                        run.measure_greedy(windows[0])
                    if settings.needle:
                        run.measure_needles(text.body)
                finally:
                    run.close()
            keep(stage.rows)
        stage.finish()
        return stage.rows


def _note_missing(stage: Stage, cache: OwnCache) -> None:
    reason = cache.why_not()
    if reason:
        stage.skip(cache.name, "", reason)
