"""vLLM as an engine: the conformance suite, and prefetches by forecast."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kedge.errors import ConfigError, ForwardFailed, RequestError
from kedge.integrations.vllm.engine.driver import StreamedResponse
from kedge.integrations.vllm.engine.engine import VLLMEngine
from kedge.settings import EngineSettings
from kedge.types import (
    AgentKey,
    Completion,
    FinishReason,
    GenerateRequest,
    Namespace,
    ReuseMode,
    SampleId,
    SamplingParams,
    Segment,
    Tokens,
)
from kedge.workflow.steps import NextRun
from tests.engine.conformance import EngineConformance
from tests.integrations.vllm.conftest import BLOCK, prompt, save_tiny_nano
from tests.server import conftest as servers

PATIENCE = 120.0
wait_until = partial(servers.wait_until, patience=PATIENCE)
FIXED = 8 * BLOCK
TENANT = "tests"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_nano(tmp_path_factory.mktemp("tiny-nano"))


def opened(model: Path) -> VLLMEngine:
    own = {"max_model_len": 1280, "num_gpu_blocks_override": 48, "max_num_seqs": 8, "max_num_batched_tokens": 1280}
    settings = EngineSettings(backend="vllm", tiers={"host_memory": "256 blocks"}, planner={"by_cost": False}, vllm=own)
    return VLLMEngine(model, settings)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[VLLMEngine]:
    with opened(model) as built:
        yield built


@pytest.fixture
def fresh(model: Path) -> Iterator[VLLMEngine]:
    """An engine without sessions of other tests, whose prompts it would prefetch."""
    with opened(model) as built:
        yield built


def ask(engine: VLLMEngine, tokens: Tokens, count: int = 4, **more: Any) -> Completion:
    sampling = SamplingParams(count, ignore_eos=True, **more.pop("sampling", {}))
    request = GenerateRequest((Segment(tokens, "p0"),), sampling, tenant=TENANT, **more)
    return engine.submit(request).result(PATIENCE)


def counted(engine: VLLMEngine) -> dict[str, int]:
    """Return the plug-in's counters."""
    return engine.inspect()["plugin"]


ONE_ANSWER = """
import sys
from pathlib import Path
from tests.integrations.vllm.engine.test_engine import ask, opened

with opened(Path(sys.argv[1])) as engine:
    assert len(ask(engine, (1, 2, 3)).tokens) == 4
"""


@pytest.mark.slow
def test_it_starts_where_there_is_no_compiler(model: Path, tmp_path: Path) -> None:
    """vLLM compiles what ranks log-probabilities, which the guard asks for."""
    without = {"TORCHDYNAMO_DISABLE": "0", "CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-c", ONE_ANSWER, str(model)], check=True, timeout=240, env={**os.environ, **without}
    )


def test_a_stop_string_costs_no_receipt(engine: VLLMEngine) -> None:
    """vLLM sends no output for a request that was aborted: the receipt comes with its statistics."""
    tokens = tuple(prompt(4 * BLOCK, 20))
    free = ask(engine, tokens, 12)
    stop = engine.tokenizer.decode(free.tokens[3:5]).strip("\ufffd")
    for reuse in (ReuseMode.EXACT, ReuseMode.TRANSLATE):
        done = ask(engine, tokens, 200, reuse=reuse, sampling={"stop": (stop,)})
        assert done.finish_reason is FinishReason.STOP and len(done.tokens) < 12
        assert (done.receipt.exact, done.receipt.computed) == (3 * BLOCK, BLOCK)


def test_an_answer_that_others_read_is_as_long_as_it_was_wanted(engine: VLLMEngine) -> None:
    tokens = tuple(prompt(50, 21))
    plain = ask(engine, tokens, 6)
    read = ask(engine, tokens, 6, produces=SampleId.parse("a@0"), run="r", reuse=ReuseMode.TRANSLATE)
    assert (read.tokens, read.text, read.finish_reason) == (plain.tokens, plain.text, FinishReason.LENGTH)


def test_requests_that_vllm_would_refuse_are_refused_at_submission(engine: VLLMEngine) -> None:
    for sampling, key in (({"temperature": 9.0}, "temperature"), ({"top_p": 0.0}, "top_p")):
        with pytest.raises(RequestError, match=key):
            ask(engine, (5, 6), sampling=sampling)
    with pytest.raises(RequestError, match="^logprobs=99"):
        ask(engine, (5, 6), logprobs=99)


@pytest.mark.parametrize("part", ["take", "end"])
def test_an_error_in_a_response_ends_that_request_only(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Whether its text cannot be read, or its completion cannot be put together: its stream ends with a typed error."""
    real = getattr(StreamedResponse, part)
    marked = f"marked-{part}"

    def fails(response: StreamedResponse, *args: Any) -> None:
        if response.request.request_id == marked:
            raise UnicodeDecodeError("utf-8", b"x", 0, 1, "a fault")
        real(response, *args)

    alone = ask(engine, (5, 6, 7), 12).tokens
    monkeypatch.setattr(StreamedResponse, part, fails)
    sampling = SamplingParams(12, ignore_eos=True)
    requests = [GenerateRequest((Segment((5, 6, 7), "p0"),), sampling, tenant=TENANT) for _ in range(3)]
    streams = [
        engine.submit(request) for request in (requests[0], replace(requests[1], request_id=marked), requests[2])
    ]
    with pytest.raises(ForwardFailed, match="a fault"):
        streams[1].result(PATIENCE)
    assert streams[0].result(PATIENCE).tokens == streams[2].result(PATIENCE).tokens == alone
    assert not engine.cancel(marked)
    monkeypatch.undo()
    again = replace(requests[1], request_id=marked)
    assert engine.submit(again).result(PATIENCE).tokens == alone, "its id is free again"


def test_a_forecast_prefetches_before_the_request(fresh: VLLMEngine) -> None:
    """An agent's fixed prompt is evicted, comes back from the host as its turn comes nearer, and is hit on the device;
    between the two requests, the plug-in gets nothing but the forecast."""
    engine, tokens = fresh, tuple(prompt(FIXED + 40, 30))
    key = AgentKey(Namespace(TENANT), "", "flow", "reader")
    whose = {"run": key.run_id, "agent": key.agent, "fixed": FIXED}
    engine.forecast({key: NextRun(0.0)}, {key: tokens[:FIXED]})
    first = ask(engine, tokens, 4, **whose)
    wait_until(lambda: counted(engine).get("blocks_offloaded", 0) >= FIXED // BLOCK)
    engine.forecast({key: NextRun(50.0)})
    for seed in (31, 32, 33):
        ask(engine, tuple(prompt(1100, seed)), 1)
    wait_until(lambda: counted(engine).get("evictions_labelled", 0) >= FIXED // BLOCK)  # counts follow answers
    before = counted(engine)
    engine.forecast({key: NextRun(0.0)})
    wait_until(lambda: counted(engine).get("prefetches_completed", 0) > before.get("prefetches_completed", 0))
    again = ask(engine, tokens, 4, **whose)
    assert again.tokens == first.tokens
    assert [(span.source, len(span)) for span in again.receipt.spans] == [("device", FIXED), ("computed", 40)]
    engine.forecast({key: None})
    engine.end_run(key.run)
    ask(engine, (5, 6, 7))
    assert not counted(engine).keys() & {"ignored_hints", "ignored_labels", "ignored_forecasts"}


def test_arguments_that_vllm_refuses_are_named(model: Path) -> None:
    config = EngineSettings(backend="vllm", vllm={"max_model_len": 10**6})
    with pytest.raises(ConfigError, match="engine.vllm.*max_model_len"):
        VLLMEngine(model, config)


class TestVLLMEngine(EngineConformance):
    """Its last test closes the engine."""

    timeout_s = PATIENCE
    small_capacity = 1280
    """It holds little more than its longest prompt."""

    def small_engine(self, engine: VLLMEngine) -> AbstractContextManager[VLLMEngine]:
        return nullcontext(engine)

    def check_at_rest(self, engine: VLLMEngine) -> None:
        """vLLM's figures come with its steps: a last request shows what all before it have left."""
        self.serves(engine)
        wait_until(lambda: engine.inspect()["requests"] == {"running": 0, "waiting": 0, "base_prefills": 0})
