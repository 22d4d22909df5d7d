"""The check whether sequences may decode together in recurrent layers: what passes, what does not, and what then is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kedge.engine.local.model.loading import checked_runner
from kedge.engine.local.model.probe import stacking_refusal
from kedge.engine.local.model.replica import random_model, trial
from tests.engine.local.conftest import engine_of
from tests.engine.local.model.test_architectures import BY_NAME, HYBRID, ON_PUSH, model_of
from tests.engine.local.test_engine import greedy, prompt, request
from tests.marks import on_push

NAME = "Qwen3-Next, linear attention"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", on_push(HYBRID, ON_PUSH))
def test_every_family_decodes_together(name: str, dtype: torch.dtype) -> None:
    assert checked_runner(model_of(name).to(dtype)).recurrent.stacking_refusal is None


Change = Callable[[nn.Module, Callable[..., Tensor]], Callable[..., Tensor]]


def one_row_only(_: nn.Module, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Give every row that decodes what the first one gets."""

    def changed(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        out = forward(hidden_states, **kwargs)
        return out[:1].expand(out.shape) if out.shape[1] == 1 else out

    return changed


def failing(_: nn.Module, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def changed(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        if len(hidden_states) > 1 and hidden_states.shape[1] == 1:
            raise ValueError("one row at a time")
        return forward(hidden_states, **kwargs)

    return changed


def replacing(module: nn.Module, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Put new tensors where the states were, instead of writing to them: a sequence's own are then those of before."""

    def changed(hidden_states: Tensor, cache_params: Any = None, **kwargs: Any) -> Tensor:
        if cache_params is not None:
            layer = cache_params.layers[module.layer_idx]
            for kept in (layer.conv_states, layer.recurrent_states):
                kept.update({key: value.clone() for key, value in kept.items() if value is not None})
        return forward(hidden_states, cache_params=cache_params, **kwargs)

    return changed


WRONG: dict[str, tuple[Change, str]] = {
    "the first row's result for all": (one_row_only, "its logits differ by"),
    "an error": (failing, "its code fails with the states of two sequences stacked: ValueError: one row at a time"),
    "states that are replaced": (replacing, "its logits differ by"),
}


def changed_model(change: Change) -> nn.Module:
    model = model_of(NAME)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.forward = change(layer.linear_attn, layer.linear_attn.forward)
    return model


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("change", "why"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_stacked_decodes_one_by_one(
    change: Change, why: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        runner = checked_runner(changed_model(change).to(dtype))
    assert why in str(runner.recurrent.stacking_refusal)
    assert f"requests decode one by one in recurrent layers: {runner.recurrent.stacking_refusal}" in caplog.text


@pytest.mark.parametrize("change", [change for change, _ in WRONG.values()], ids=WRONG)
def test_its_answers_are_right(change: Change) -> None:
    prompts = [prompt(seed, 5 + 20 * seed) for seed in range(4)]
    expected = [greedy(model_of(NAME), one, 24) for one in prompts]
    with engine_of(changed_model(change)) as engine:
        streams = [engine.submit(request(one, max_tokens=24)) for one in prompts]
        assert [stream.result(60).tokens for stream in streams] == expected


def test_without_memory_the_error_is_that(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = checked_runner(model_of(NAME))

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(runner.recurrent._stack, "of", full)
    with pytest.raises(torch.OutOfMemoryError):
        stacking_refusal(runner)


def test_a_trial_says_how_a_model_decodes() -> None:
    assert [trial(BY_NAME[name].config()).stacking_refusal for name in (NAME, "Llama")] == [None, None]


def test_a_model_without_such_layers_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.engine.local.model.loading.stacking_refusal", lambda _: pytest.fail("it was"))
    checked_runner(random_model(BY_NAME["Llama"].config()))
