"""Translation of models with windows in some layers, where vLLM keeps all of their KV in one group of blocks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kedge.kv.segment import KVSegment
from kedge.reuse.holes import Holes, between, joined
from tests.integrations.vllm.conftest import (
    VOCABULARY,
    Driver,
    driver,
    receipt,
)
from tests.integrations.vllm.lane_prompts import (
    HOLES,
    LENGTH,
    ONE,
    OTHER,
    PLAIN,
    WIDE,
    add,
    answers,
    ask,
    difference,
    first_logprobs,
    lane_engine,
    more_holes,
    recorded,
    solo,
    tokens,
)
from tests.integrations.vllm.test_cache_groups import (
    gemma2,
    gemma3,
    gpt_oss,
)
from tests.integrations.vllm.test_lanes import state

EXACT = 1e-4
LAYOUTS: dict[str, Holes] = {
    "the planner's": (),
    "over several blocks and a whole window": (range(60, 150),),
    "single tokens": tuple(range(at, at + 1) for at in range(50, 290, 20)),
    "right behind the exact prefix": (range(0, 70), range(120, 125)),
}


MODELS = {
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma3, a window longer than prompts": partial(gemma3, 512),
    "gpt_oss": gpt_oss,
    "gpt_oss, asynchronous": gpt_oss,
}


# what Transformers computes for holes in a prompt over given KV, whatever kinds of layers a model has -----------------


class HolesCache:
    """A cache of KV of all positions of a prompt, into which Transformers puts the KV of holes."""

    def __init__(self, keys: Tensor, values: Tensor, at: Tensor) -> None:
        """`keys` (rotated) and `values` are [layers, kv_heads, tokens, head_dim]; `at` are the positions of holes."""
        self.keys, self.values, self._at = keys.clone(), values.clone(), at

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep the KV of the holes in a layer; all KV of the layer."""
        self.keys[layer][:, self._at], self.values[layer][:, self._at] = keys[0], values[0]
        return self.keys[layer][None], self.values[layer][None]

    def get_seq_length(self, *_: Any) -> int:
        return 0


class Reference:
    """A model as Transformers runs it."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._model.eval()
        self._config = self._model.config
        self._kinds = self._config.layer_types

    @torch.no_grad()
    def compute(self, prompt: Sequence[int], kv: KVSegment, holes: Holes) -> tuple[KVSegment, Tensor]:
        """Compute the positions in `holes` over `kv` elsewhere: all KV, keys unrotated, and the last
        log-probabilities.
        """
        at = torch.tensor([position for hole in joined(holes) for position in hole])
        cache = HolesCache(self._turned(kv.keys.transpose(1, 2)), kv.values.transpose(1, 2), at)
        logits = self._model(
            input_ids=torch.tensor(prompt)[at][None],
            position_ids=at[None],
            attention_mask=self._masks(at, len(prompt)),
            past_key_values=cache,
        ).logits
        keys = self._turned(cache.keys, back=True).transpose(1, 2)
        return KVSegment(keys, cache.values.transpose(1, 2)), logits[0, -1].log_softmax(-1)

    def _masks(self, at: Tensor, length: int) -> dict[str, Tensor]:
        distance = at[:, None] - torch.arange(length)[None]
        seen = {"full_attention": distance >= 0}
        seen["sliding_attention"] = seen["full_attention"] & (distance < self._config.sliding_window)
        hidden = torch.finfo(torch.float32).min
        return {kind: torch.zeros(mask.shape).masked_fill(~mask, hidden)[None, None] for kind, mask in seen.items()}

    def _turned(self, keys: Tensor, back: bool = False) -> Tensor:
        """Keys [layers, kv_heads, tokens, head_dim], each layer rotated by the model's own function, or rotated
        back.
        """
        rotate = importlib.import_module(type(self._model).__module__).apply_rotary_pos_emb
        positions = torch.arange(keys.shape[2])[None]
        turned = []
        for layer, kind in zip(keys, self._kinds, strict=True):
            by_kind = [kind] if self._config.model_type == "gemma3_text" else []
            cos, sin = self._model.model.rotary_emb(keys, positions, *by_kind)
            if back:
                scale = cos[0, 0, 0] ** 2 + sin[0, 0, 0] ** 2
                cos, sin = cos / scale, -sin / scale
            turned.append(rotate(layer[None], layer[None], cos, sin)[1][0])
        return torch.stack(turned)


@dataclass
class Taught:
    """An engine that has learned, with what Transformers and stock vLLM say about its model."""

    engine: Driver
    reference: Reference
    stock: dict[Any, list[int]]


@pytest.fixture(scope="module", params=MODELS)
def taught(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Taught]:
    torch.manual_seed(0)
    folder: Path = tmp_path_factory.mktemp("windows")
    MODELS[request.param]().eval().save_pretrained(folder)
    prompts: dict[Any, list[int]] = {number: tokens(number) for number in (ONE, OTHER)}
    prompts.update({("plain", at): one for at, one in enumerate(PLAIN)})
    with driver(folder, plugged=False) as plain:
        stock = {name: plain.answer(one, count=40) for name, one in prompts.items()}
    with lane_engine(folder, asynchronous="async" in request.param, disable_hybrid_kv_cache_manager=True) as built:
        assert len(built.scheduler.kv_cache_config.kv_cache_groups) == 1
        yield Taught(built, Reference(folder), stock)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_holes_are_what_transformers_computes_over_translated_kv(taught: Taught, layout: str) -> None:
    holes = joined((*HOLES, *LAYOUTS[layout]), nearer_than=4)
    taught.engine.reset()
    with recorded(taught.engine) as recorder, more_holes(taught.engine, LAYOUTS[layout]):
        output = ask(taught.engine, OTHER, logprobs=VOCABULARY)
        found = recorder.read()
    assert recorder.admission() == [(hole.start, len(hole)) for hole in holes], "all in one pass"
    assert recorder.written is not None
    expected, logprobs = taught.reference.compute(tokens(OTHER), recorder.written, holes)
    assert difference(found, expected, holes) < EXACT
    assert difference(found, recorder.written, between(holes, 0)) == 0, "what was translated is left alone"
    assert float((first_logprobs(output) - logprobs).abs().max()) < EXACT
    computed = sum(map(len, holes))
    counts = {"device": 0, "host": 0, "translated": LENGTH - computed, "computed": computed}
    assert receipt(output)["tokens"] == counts
    full, _ = taught.reference.compute(tokens(OTHER), found, (range(LENGTH),))
    assert difference(found, full, holes) > 0.01, "else the comparison says nothing"


def test_over_true_kv_everything_is_as_in_dense_prefill(taught: Taught) -> None:
    taught.engine.reset()
    layers = len(taught.reference.compute(tokens(ONE), empty(taught), (range(LENGTH),))[0].keys)
    assert layers == taught.engine.worker._learner.pages.empty.keys.shape[0]
    true, logprobs = taught.reference.compute(tokens(OTHER), empty(taught), (range(LENGTH),))
    with recorded(taught.engine) as recorder, more_holes(taught.engine, WIDE):
        recorder.replacement = true
        output = ask(taught.engine, OTHER, logprobs=VOCABULARY)
        found = recorder.read()
    assert receipt(output)["tokens"]["translated"] > 0
    assert difference(found, true) < EXACT
    assert float((first_logprobs(output) - logprobs).abs().max()) < EXACT
    assert list(output.outputs[0].token_ids) == taught.stock[OTHER][:12]


def empty(taught: Taught) -> KVSegment:
    layers, _, *shape = taught.engine.worker._learner.pages.empty.keys.shape
    return KVSegment(torch.zeros(layers, LENGTH, *shape), torch.zeros(layers, LENGTH, *shape))


def test_a_busy_batch_answers_as_each_alone_and_pollutes_nothing(taught: Taught) -> None:
    engine = taught.engine
    alone = [solo(engine, ONE), solo(engine, OTHER)]
    engine.reset()
    before = state(engine)
    decoding = [engine.add(PLAIN[at], 40) for at in (0, 1)]
    for _ in range(5):
        engine.step()
    first, prefill, second = add(engine, ONE), engine.add(PLAIN[2], 40), add(engine, OTHER)
    engine.run()
    assert answers(engine, first, second) == alone
    assert answers(engine, *decoding, prefill) == [taught.stock["plain", at] for at in (0, 1, 2)]
    again = engine.ask(tokens(OTHER), 40)
    assert again.num_cached_tokens == 0, "no translated block has a hash"
    assert list(again.outputs[0].token_ids) == taught.stock[OTHER]
    assert state(engine) == before
