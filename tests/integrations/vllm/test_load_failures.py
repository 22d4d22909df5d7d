"""A translation that cannot be written on Model Runner V2: its request ends, and nothing else. On V1 the tests of lanes
say so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kedge.integrations.vllm.plugin.settings import SCHEDULER
from tests.integrations.vllm import model_runner_v2
from tests.integrations.vllm.conftest import driver, prompt, receipt
from tests.integrations.vllm.test_translation import EXTRA, VALUES, hints, teach, tokens

ANSWER = 6
NEIGHBOUR = prompt(40, 9)


def outcome(model: str, is_async: bool) -> dict[str, Any]:
    """Let one translation fail beside a request that is decoding."""

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    settings: dict[str, Any] = {"max_num_batched_tokens": 256, "max_num_seqs": 4, "num_gpu_blocks_override": 48}
    extra = {**EXTRA, "guard": {"fidelity": "any"}}  # another process than the tests'
    with driver(Path(model), extra=extra, scheduler_cls=SCHEDULER, async_scheduling=is_async, **settings) as engine:
        for value in VALUES[:-1]:
            teach(engine, value)
        engine.reset()
        writes = engine.worker._learner.writes
        neighbour = engine.add(NEIGHBOUR, count=12)
        request = next(iter(engine.scheduler.requests.values()))
        engine.run(until=lambda: len(request.output_token_ids) > 1)
        write, writes._translate_into = writes._translate_into, fail
        name = engine.add(tokens(VALUES[0]), ANSWER, hints(VALUES[0]))
        engine.run()
        writes._translate_into = write
        failed = engine.finished[name].outputs[0]
        is_idle = engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1 and not engine.side.requests
        engine.reset()
        again = engine.ask(tokens(VALUES[0]), ANSWER, hints(VALUES[0]))
        runner = type(engine.core.model_executor.driver_worker.worker.model_runner).__module__
        return {
            "runner": [runner, engine.scheduler.vllm_config.scheduler_config.async_scheduling],
            "failed": [failed.finish_reason, list(failed.token_ids), is_idle],
            "answers": [list(one.outputs[0].token_ids) for one in (again, engine.finished[neighbour])],
            "translated": receipt(again)["tokens"]["translated"],
        }


@pytest.fixture(scope="module")
def dense(tiny_llama: Path) -> list[list[int]]:
    """Answers of stock vLLM: to the prompt that is translated, and to its neighbour's."""
    with driver(tiny_llama, plugged=False) as plain:
        return [plain.answer(tokens(VALUES[0]), ANSWER), plain.answer(NEIGHBOUR, 12)]


@pytest.mark.slow  # the interpreter of its kernels takes minutes
@pytest.mark.parametrize("is_async", [False, True])
def test_the_request_ends_and_nothing_else(tiny_llama: Path, dense: list[list[int]], is_async: bool) -> None:
    found = model_runner_v2.call(outcome, str(tiny_llama), is_async, is_async=is_async)
    assert found["runner"] == ["vllm.v1.worker.cpu.model_runner", is_async]
    assert found["failed"] == ["error", [], True]
    assert found["answers"] == dense and found["translated"] == 170
