"""KV of 8 bits inside vLLM: answers as stock's, and what translation loses by it beside what vLLM loses by itself."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kedge.integrations.vllm.plugin.settings import SCHEDULER
from tests.integrations.vllm.conftest import SMALL, VOCABULARY, Driver, driver, prompt, receipt
from tests.integrations.vllm.test_translation import EXTRA, hints, tokens

if not torch.cpu._is_avx512_supported():
    pytest.skip("vLLM keeps 8 bits on a CPU with AVX-512 only", allow_module_level=True)

SEEN, VALUES = 6, [prompt(60, 100 + number) for number in range(24)]


class Answered(NamedTuple):
    """The first token's distribution after one prompt, computed and translated."""

    dense: Tensor
    translated: Tensor


@contextmanager
def engine(model: Path, kept: str, **more: Any) -> Iterator[Driver]:
    with driver(model, kv_cache_dtype=kept, max_logprobs=VOCABULARY, **more) as built:
        yield built


def asked(built: Driver, value: Sequence[int], **more: Any) -> tuple[Tensor, Any]:
    """The distribution after a prompt, and its receipt."""
    built.reset()
    output = built.ask(tokens(list(value)), 2, hints(list(value), **more), logprobs=VOCABULARY)
    found = output.outputs[0].logprobs[0]
    ranked = torch.tensor([found[token].logprob for token in range(VOCABULARY)], dtype=torch.float64)
    return ranked, receipt(output)


def answered(model: Path, kept: str) -> list[Answered]:
    """All values by an engine that learns from the first ones."""
    with engine(model, kept, extra=EXTRA, scheduler_cls=SCHEDULER) as built:
        for number, value in enumerate(VALUES):
            agent = "a" if number < SEEN else "stranger"
            built.ask(tokens(value), kedge=hints(value, agent=agent))
        results = []
        for value in VALUES:
            dense, (translated, found) = asked(built, value, reuse="off")[0], asked(built, value)
            assert found["tokens"]["translated"] == 170, found
            results.append(Answered(dense, translated))
        return results


@pytest.fixture(scope="module")
def exact(tiny_llama: Path) -> list[Answered]:
    """With KV in float32."""
    return answered(tiny_llama, "auto")


@pytest.fixture(scope="module", params=["fp8", "fp8_e5m2"])
def rounded(tiny_llama: Path, exact: object, request: pytest.FixtureRequest) -> list[Answered]:  # noqa: ARG001 - one engine at a time
    return answered(tiny_llama, request.param)


def divergence(one: Tensor, other: Tensor) -> float:
    return float((one.exp() * (one - other)).sum())


def test_translation_loses_no_more_by_8_bits_than_vllm_does(exact: list[Answered], rounded: list[Answered]) -> None:
    """The KL divergence of the first token from that of computed KV in float32."""
    pairs = list(zip(exact, rounded, strict=True))
    own = fmean(divergence(one.dense, two.dense) for one, two in pairs)
    plain = fmean(divergence(one.dense, one.translated) for one, _ in pairs)
    whole = fmean(divergence(one.dense, two.translated) for one, two in pairs)
    assert own > 0.001 and whole - plain <= own


def test_answers_are_stocks_and_blocks_come_back_from_the_host_as_they_were(tiny_llama: Path) -> None:
    with engine(tiny_llama, "fp8", plugged=False) as plain:
        expected = plain.cycle(turns=1)
    with engine(tiny_llama, "fp8", extra={"tiers": {"host_memory": "40 blocks"}}, **SMALL) as built:
        assert built.cycle(turns=3) == expected * 3
        totals = built.side.totals()
        assert totals["blocks_loaded"] > 0 and not totals.get("failed_copies")
