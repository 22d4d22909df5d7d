"""Models with layers unlike each other in every tier, estimator and file that their KV goes through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from kedge.anchors.estimators import ESTIMATORS
from kedge.anchors.translator import in_chunks, in_one_pass, translate_into
from kedge.engine.local.batch import flatten
from kedge.engine.local.model.graphs import StepGraphs, on_gpu
from kedge.engine.local.model.loading import checked_runner
from kedge.engine.local.model.runner import ModelRunner
from kedge.kv.segment import KVSegment
from kedge.kv.storage import PagedStorage
from kedge.settings import AnchorSettings, TierSettings
from tests.engine.local.conftest import DEVICE, engine_of
from tests.engine.local.model.test_architectures import model_of
from tests.engine.local.model.test_graphs import BLOCK, STEPS, Graphs, attend, prefilled, work
from tests.engine.local.test_engine import greedy, prompt
from tests.engine.local.test_engine import request as plain
from tests.engine.local.test_translation import OPEN, SETTINGS, Driver, relative, request, tokens

NAMES = ["Gemma 3", "Gemma 4", "gpt-oss, attention sinks", "MiMo V2, sinks and narrow values", "DeepSeek-V2, MLA"]
NARROW = ["Gemma 4", "MiMo V2, sinks and narrow values"]
"""Those with layers that do not fill the pool"""


@pytest.mark.parametrize("name", NAMES)
def test_kv_comes_back_from_the_host(name: str) -> None:
    model = model_of(name)
    asked = [prompt(i, 100) for i in range(4)]
    wanted = [greedy(model, one, 8) for one in asked]
    tiers = TierSettings(host_memory="100 blocks", backup_hits=0, policy="lru")
    with engine_of(model, kv_memory="16 blocks", tiers=tiers) as engine:
        for again in range(2):
            for one, answer in zip(asked, wanted, strict=True):
                done = engine.submit(plain(one, max_tokens=8)).result(60)
                engine.wait_idle(60)
                assert done.tokens == answer
                assert done.receipt.exact == (96 if again else 0)


ASKED = ((70, None), (80, None), (70, 81))


def ask(engine, seed: int, hint: int | None = None) -> tuple[str, int]:  # noqa: ANN001
    done = engine.submit(request(tokens(seed, 20), tokens(hint or seed + 1, 8))).result(60)
    engine.wait_idle(60)
    return done.text, done.receipt.translated


@pytest.mark.parametrize("name", NAMES)
def test_what_was_learned_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    with engine_of(model_of(name), **SETTINGS) as teacher:
        for seed in (50, 60):
            ask(teacher, seed)
        teacher.save(tmp_path)
        wanted = [ask(teacher, *one) for one in ASKED]
    assert wanted[2][1] > 0
    with engine_of(model_of(name), **SETTINGS) as pupil:
        assert pupil.load(tmp_path).pools == 2
        assert [ask(pupil, *one) for one in ASKED] == wanted


@pytest.mark.parametrize("name", [*NARROW, "DeepSeek-V2, MLA"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_takes_what_a_layer_does_not_fill_as_zero(name: str, estimator: str) -> None:
    driver = Driver(model_of(name), anchors=AnchorSettings(**OPEN, estimator=estimator))
    asked = request(tokens(50, 30), tokens(51, 12))
    for seed in (60, 61):
        driver.serve(request(tokens(seed, 30), tokens(seed + 5, 12)))
    _, dense = driver.serve(asked)
    again, translated = driver.serve(replace(asked, request_id="again"))
    assert again.plan.translates
    assert relative(translated.values, dense.values) < 0.02
    for storage in (translated, dense):
        for number, shape in enumerate(driver.runner.spec.shapes):
            require_zero_beyond(storage, number, shape.kv_heads, shape.key_dim, shape.value_dim)


def require_zero_beyond(kv: KVSegment, layer: int, kv_heads: int, key_dim: int, value_dim: int) -> None:
    for pool, dim in ((kv.keys[layer], key_dim), (kv.values[layer], value_dim)):
        assert not pool[:, kv_heads:].any()
        assert not pool[..., dim:].any()


@pytest.mark.parametrize("name", ["Gemma 3", "gpt-oss, attention sinks", "DeepSeek-V2, MLA"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_replayed_pass_is_the_pass(name: str, step: list[tuple[list[int], int, list[int]]]) -> None:
    if DEVICE.type == "cuda" and name != "Gemma 3":
        pytest.skip("PyTorch's loop over experts reads which of them are chosen: such a pass cannot be captured")
    runner = checked_runner(model_of(name).to(DEVICE))
    plain, replayed = (zeroed(runner) for _ in range(2))
    for storage in (plain, replayed):
        prefilled(runner, storage)
    wanted = runner.forward(flatten([work(*one) for one in step], plain))
    runner.graphs = StepGraphs(runner.run, replayed, 200, attend, capture := Graphs())
    got = runner.forward(flatten([work(*one) for one in step], replayed))
    assert capture.replays == 1
    torch.testing.assert_close(got, wanted, atol=5e-4, rtol=1e-3)


def zeroed(runner: ModelRunner) -> PagedStorage:
    storage = PagedStorage(runner.spec, 32, BLOCK, runner.device, runner.rotary)
    storage.keys.zero_()
    storage.values.zero_()
    return storage


@pytest.mark.parametrize("name", ["Gemma 4", "DeepSeek-V2, MLA"])
def test_keys_of_several_shapes_and_latents_have_no_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedStorage, "has_kernels", True)
    runner = checked_runner(model_of(name))
    assert on_gpu(runner.run, zeroed(runner), 200) is None


@pytest.mark.parametrize(
    ("name", "how"), [("Llama", in_one_pass), ("Gemma 3", in_chunks), ("DeepSeek-V2, MLA", in_chunks)]
)
def test_the_kernel_that_translates_takes_one_rotation_of_the_first_dimensions(
    name: str, how: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PagedStorage, "has_kernels", True)
    chosen = translate_into(zeroed(checked_runner(model_of(name))))
    assert isinstance(chosen, partial)
    assert chosen.func is how
