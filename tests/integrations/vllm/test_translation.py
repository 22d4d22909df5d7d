"""Translation inside vLLM: captures and writes, which stay out of the prefix cache, and refusals."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kedge.integrations.vllm.plugin.settings import SCHEDULER
from kedge.integrations.vllm.plugin.translations import request_refusal
from tests.integrations.vllm.conftest import BLOCK, Driver, driver, prompt, receipt

HEAD, TAIL = prompt(BLOCK + 9, 1), prompt(70, 2)
LEAD_IN, STAND_IN = prompt(5, 3), prompt(4, 4)
VALUES = [prompt(60, 100 + number) for number in range(6)]
EXTRA = {
    "anchors": {"min_anchors": 4, "max_error": 50.0, "weak_error": 90.0},
    "planner": {"by_cost": False, "recompute_head": 0, "recompute_short": 0, "move": "never"},
}
"""Every value is translated as a whole, and so is the template behind it"""


def tokens(value: list[int]) -> list[int]:
    return HEAD + value + TAIL


def hints(value: list[int], **more: Any) -> dict[str, Any]:
    segments = [
        {"name": "p0", "length": len(HEAD)},
        {"name": "q", "length": len(value), "sample": "q@0", "base_context": LEAD_IN, "placeholder_text": STAND_IN},
        {"name": "p1", "length": len(TAIL)},
    ]
    return {"workflow": "w", "run": "r", "agent": "a", "segments": segments, **more}


def teach(engine: Driver, value: list[int]) -> Any:
    """A dense call. Base prefills follow it."""
    return engine.ask(tokens(value), kedge=hints(value))


@pytest.fixture(scope="module")
def dense(tiny_llama: Path) -> list[list[int]]:
    """Answers of stock vLLM."""
    with driver(tiny_llama, plugged=False) as plain:
        return [plain.answer(tokens(value), count=12) for value in VALUES]


@pytest.fixture(scope="module")
def taught(tiny_llama: Path, dense: object) -> Iterator[Driver]:  # noqa: ARG001 - one engine at a time: stock goes first
    """An engine that has seen all values but the last, in chunks of 64 tokens."""
    with driver(tiny_llama, extra=EXTRA, scheduler_cls=SCHEDULER, max_num_batched_tokens=64) as built:
        for value in VALUES[:-1]:
            found = receipt(teach(built, value))
            assert found["tokens"]["translated"] == 0
        yield built


def test_a_value_seen_before_is_answered_as_by_stock(taught: Driver, dense: list[list[int]]) -> None:
    for number, value in enumerate(VALUES[:-1]):
        taught.reset()
        output = taught.ask(tokens(value), count=12, kedge=hints(value))
        assert receipt(output)["tokens"] == {"device": 0, "host": 0, "translated": 170, "computed": 1}
        assert list(output.outputs[0].token_ids) == dense[number]


def test_a_prompt_is_read_after_its_first_token(taught: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    taught.reset()
    drawn: list[int] = []
    learner = taught.worker._learner

    def capture(order: Any, *_: object) -> None:
        if order.request.agent:  # base prefills have none
            drawn.append(len(request.output_token_ids))

    monkeypatch.setattr(learner, "capture", capture)
    taught.add(tokens(prompt(60, 999)), kedge=hints(prompt(60, 999), agent="newcomer"))
    request = next(iter(taught.scheduler.requests.values()))
    taught.run()
    assert drawn == [1]
    taught.check_rest()


@pytest.mark.parametrize(
    ("given", "sampling", "reason"),
    [
        ({}, {"skip_reading_prefix_cache": True}, ["the request does not read the prefix cache"]),
        ({"agent": "stranger"}, {}, ["the agent's template has no base KV yet"]),
        ({"reuse": "exact"}, {}, []),
        ({"reuse": "off"}, {}, []),
    ],
)
def test_dense_with_the_reason(
    taught: Driver, dense: list[list[int]], given: dict[str, Any], sampling: dict[str, Any], reason: list[str]
) -> None:
    taught.reset()
    output = taught.ask(tokens(VALUES[0]), count=12, kedge=hints(VALUES[0], **given), **sampling)
    assert [miss["reason"] for miss in receipt(output)["misses"]][:1] == reason
    assert receipt(output)["tokens"]["translated"] == 0
    assert list(output.outputs[0].token_ids) == dense[0]


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"lora_request": object()}, "LoRA"),
        ({"mm_features": [object()]}, "multimodal"),
        ({"prompt_embeds": object()}, "embeddings"),
        ({"sampling_params": SimpleNamespace(prompt_logprobs=0)}, "prompt_logprobs"),
        ({"pooling_params": object()}, "pooling"),
        ({"resumable": True}, "may grow"),
    ],
)
def test_requests_that_are_never_translated(odd: dict[str, Any], reason: str) -> None:
    plain = {
        "lora_request": None, "mm_features": [], "prompt_embeds": None, "skip_reading_prefix_cache": False,
        "pooling_params": None, "resumable": False,
        "sampling_params": SimpleNamespace(prompt_logprobs=None),
    }  # fmt: skip
    assert request_refusal(SimpleNamespace(**plain)) is None  # type: ignore[arg-type]
    assert reason in (request_refusal(SimpleNamespace(**{**plain, **odd})) or "")  # type: ignore[arg-type]
