"""The bound on a codec's error: measured on the model, kept by the codecs that are chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvstore_client.hook import AttachError, attach
from kvstore_client.hook.calibration import calibrate
from kvstore_client.hook.choice import HEADROOM
from kvstore_client.hook.plan import model_plan
from kvstore_client.hook.probe import cheapest, layer_errors
from kvstore_kernels.codecs import names


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_errors_of_each_codec_and_layer(kit: Any, family: str) -> None:
    model = kit.build(family)
    plan = model_plan(model)
    calibrated = calibrate(model, plan, "int8")
    implementation = model.config._attn_implementation
    errors = layer_errors(model, plan, calibrated, names())
    assert model.config._attn_implementation == implementation
    assert errors == layer_errors(model, plan, calibrated, names())
    assert max(errors["passthrough"]) < 1e-5
    for layer in range(plan.layers):
        int8, k8v4, int4, k4v3, k4v2 = (errors[name][layer] for name in names()[1:])
        assert 0 < int8 < k8v4 < k4v3 < k4v2 < 1
        assert int8 < int4 < k4v3


def test_the_smallest_that_holds_is_chosen() -> None:
    errors = {"passthrough": [0.0, 0.0], "int8": [0.01, 0.02], "int4": [0.1, 0.3], "k4v2": [0.25, 0.5]}
    assert cheapest(errors, 0.3) == (["k4v2", "int4"], [0.25, 0.3])
    assert cheapest(errors, 0.05) == (["int8", "int8"], [0.01, 0.02])
    assert cheapest(errors, 0.015) == (["int8", "passthrough"], [0.01, 0.0])
    assert cheapest({"int8": [float("nan")]}, 0.1) == (["passthrough"], [0.0])


def test_attach_with_a_bound(kit: Any, store: Any, llama: Any) -> None:
    ids = kit.ids_of(140, 3)
    with attach(store, llama, max_error=0.0) as exact:
        assert exact.codec == "passthrough"
    errors = layer_errors(llama, model_plan(llama), calibrate(llama, model_plan(llama), "int8"), names())
    bound = HEADROOM * (max(errors["k4v3"]) + min(errors["k4v2"])) / 2
    with attach(store, llama, max_error=bound) as attachment:
        assert set(attachment.codec.replace(":1", "").split(",")) <= {"k4v3", "k4v2"}
        assert 0 < max(attachment.errors) <= bound
        assert attach(store, llama, max_error=bound) is attachment
        with pytest.raises(AttachError, match="max_error="):
            attach(store, llama, max_error=bound / 2)
        cold = llama.generate(ids, max_new_tokens=4, do_sample=False)
        assert torch.equal(cold[:, :140], ids)
        llama.generate(ids, max_new_tokens=4, do_sample=False)
        assert store.last_report.reused_tokens == 128


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_error": -0.1}, "max_error=-0.1: expected a part of the attention output"),
        ({"max_error": 1.0}, "max_error=1.0: expected a part of the attention output"),
        ({"max_error": "x"}, "max_error='x': expected a number"),
        ({"min_fidelity": "x"}, "min_fidelity='x': expected a number"),
        ({"max_error": 0.1, "codec": "int4"}, "it chooses the codecs"),
        ({"max_error": 0.1, "overrides": {0: "int8"}}, "it chooses the codecs"),
        ({"codec": None}, "codec=None: expected a codec's name"),
        ({"overrides": [1]}, r"overrides=\[1\]: expected layers and their codecs"),
    ],
)
def test_what_attach_refuses(store: Any, llama: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(AttachError, match=text):
        attach(store, llama, **options)
