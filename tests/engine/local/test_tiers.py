"""The host tier and forecasts inside the engine: not one token changes, whatever fails."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kedge.cache import Copied, Direction
from kedge.engine.local import build
from kedge.engine.local.engine import LocalEngine
from kedge.errors import ConfigError, PromptTooLong
from kedge.kv.copy import PoolCopier
from kedge.settings import TierSettings
from kedge.types import (
    AgentId,
    ClientId,
    GenerateRequest,
    Namespace,
    RunId,
    SamplingParams,
    Segment,
    Source,
    TenantId,
)
from kedge.workflow.forecast import AgentKey, ForecastBoard, RunProgress
from kedge.workflow.steps import NextRun
from tests.engine.local.conftest import engine_of
from tests.engine.local.test_engine import prompt
from tests.engine.local.tiering import (
    AGENTS,
    AMPLE,
    BLOCK,
    FIXED,
    GRAPH,
    OUT,
    ROOM,
    RUN,
    VARYING,
    ask,
    engine_with,
    expected,
    figures,
    fixed,
    model,
    put_on_host,
    serve_cycle,
    settle,
)

# output and receipts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_blocks", [0, 2, AMPLE])
@pytest.mark.parametrize("policy", ["steps", "lru"])
@pytest.mark.parametrize("prefetch_window", [-1.0, 2.0])
def test_output_is_that_of_transformers(policy: str, host_blocks: int, prefetch_window: float) -> None:
    with engine_with(policy=policy, host_blocks=host_blocks, prefetch_window=prefetch_window) as engine:
        serve_cycle(engine)
        stats = figures(engine)["cache"]
    assert (stats["blocks_offloaded"] > 0) == (host_blocks == AMPLE)
    assert (stats["blocks_loaded"] > 0) == (host_blocks == AMPLE)


def test_a_cycle_is_prefetched_ahead_of_its_agents() -> None:
    with engine_with(host_blocks=AMPLE) as engine:
        progress = RunProgress(GRAPH, RUN, ForecastBoard())
        engine.forecast(progress.begin(0.0))
        for asked in range(3 * AGENTS):
            request = ask(asked % AGENTS, asked)
            stream = engine.submit(request)
            engine.forecast(progress.started(request.agent, float(asked)))
            done = stream.result(60)
            engine.forecast(progress.finished(request.agent, asked + 0.5))
            engine.wait_idle(60)  # so that no prefetch is late
            assert done.receipt.exact == (FIXED if asked >= AGENTS else 0)
        stats = figures(engine)
    assert stats["cache"]["prefetched_hit_tokens"] > 4 * FIXED
    assert stats["cache"]["transfers"]["prefetch"]["completed"] > 4
    assert (stats["cache"]["host_hit_tokens"], stats["loading"]["waited"]) == (0, 0)


def test_what_was_waited_for_is_host_in_the_receipt_and_load_in_its_parts() -> None:
    with engine_with(policy="lru", host_blocks=AMPLE, throttle=2e-3, prefetch_window=-1) as engine:
        served = serve_cycle(engine, rounds=2)
        done, stats = served[-1], figures(engine)
    host = [span for span in done.receipt.spans if span.source is Source.HOST]
    assert [(span.start, span.stop) for span in host] == [(0, FIXED)]
    assert done.receipt.exact == done.receipt.tokens(Source.HOST) == FIXED
    assert done.receipt.parts_ms["load"] > 0
    assert sum(done.receipt.parts_ms.values()) == pytest.approx(done.ttft_ms)
    assert all(ms >= 0 for ms in done.receipt.parts_ms.values())
    assert stats["cache"]["host_hit_tokens"] == stats["loading"]["waited"] * FIXED
    loads = [one.receipt.parts_ms.get("load", 0.0) for one in served]
    assert 1e3 * stats["loading"]["stall_s"] == pytest.approx(sum(loads))


# faults -------------------------------------------------------------------------------------------------------------


class Failing(PoolCopier):
    """Half of its copies fail, and leave dirt where they should have written."""

    def _copy(self, order: Any, piece: slice) -> tuple[int, ...]:
        if order.copy.copy_id % 2:
            return super()._copy(order, piece)
        for pool in (pools[order.copy.direction is Direction.LOAD] for pools in self._pools):
            for block in order.copy.targets:
                pool[:, block * BLOCK : (block + 1) * BLOCK] = float("nan")
        raise OSError("the host has gone")


class AlwaysFailing(PoolCopier):
    """No load ever works."""

    def _copy(self, order: Any, piece: slice) -> tuple[int, ...]:
        if order.copy.direction is Direction.LOAD:
            raise OSError("no load works")
        return super()._copy(order, piece)


class Reordering(PoolCopier):
    """Reports copies in another order than they ended in, and some of them late."""

    _rng = random.Random(0)
    _kept: tuple[Copied, ...] = ()

    def drain(self) -> list[Copied]:
        ended = [*self._kept, *super().drain()]
        self._rng.shuffle(ended)
        late = self._rng.randrange(2) if len(ended) > 1 else 0
        self._kept = tuple(ended[:late])
        return ended[late:]


@pytest.mark.parametrize("copier", [Failing, AlwaysFailing, Reordering])
@pytest.mark.parametrize("tiers", [{}, {"policy": "lru", "prefetch_window": -1}], ids=["full", "reactive"])
@pytest.mark.parametrize("throttle", [0.0, 1e-3])
def test_faulty_copiers_change_no_token(
    copier: type[PoolCopier], tiers: dict[str, object], throttle: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "PoolCopier", copier)
    with engine_with(host_blocks=AMPLE, throttle=throttle, **tiers) as engine:
        serve_cycle(engine)
        failed = figures(engine)["cache"]["failed_copies"]
    assert (failed > 0) == (copier is not Reordering)


# sizes and hints ----------------------------------------------------------------------------------------------------


def test_a_prompt_that_fills_the_device_comes_and_goes() -> None:
    blocks = 16
    whole = blocks * BLOCK
    long = [prompt(n, whole - OUT) for n in (1, 2)]
    with engine_with(host_blocks=AMPLE, num_blocks=blocks, backup_hits=0) as engine:
        for n in (0, 1, 0, 1):
            request = GenerateRequest((Segment(long[n], "p0"),), SamplingParams(OUT, ignore_eos=True))
            assert engine.submit(request).result(60).tokens == expected(long[n])
            settle(engine)
        assert figures(engine)["cache"]["host_hit_tokens"] > 0


def test_a_fixed_prompt_larger_than_the_device_is_refused_and_as_a_hint_ignored() -> None:
    blocks = 16
    huge = prompt(5, 2 * blocks * BLOCK)
    with engine_with(host_blocks=AMPLE, num_blocks=blocks) as engine:
        key = AgentKey(*RUN, AgentId("a0"))
        engine.forecast({key: NextRun(0.0)}, {key: huge})
        with pytest.raises(PromptTooLong):
            engine.submit(GenerateRequest((Segment(huge, "p0"),), agent=AgentId("a0")))
        assert engine.submit(ask(0, 1)).result(60).tokens == expected(ask(0, 1).tokens)


@pytest.mark.parametrize("marker", [None, -1, 10_000, 17])
def test_what_the_request_says_is_fixed_is_what_is_backed_up(marker: int | None) -> None:
    with engine_with(host_blocks=AMPLE) as engine:
        engine.forecast({AgentKey(*RUN, AgentId("a0")): NextRun(1.0)})
        request = ask(0, 1)
        engine.submit(
            GenerateRequest(
                request.segments, request.sampling, client=request.client, run=request.run, agent=request.agent,
                fixed=marker,
            )
        ).result(60)  # fmt: skip
        engine.wait_idle(60)
        assert figures(engine)["cache"]["host_cached_blocks"] * BLOCK == (16 if marker == 17 else FIXED)


def test_plain_requests_are_watched_for_what_they_have_in_common() -> None:
    with engine_with(host_blocks=AMPLE, backup_hits=None) as engine:
        engine.forecast({AgentKey(*RUN, AgentId("a0")): NextRun(1.0)})
        for asked in range(5):
            tokens = (*fixed(0), *prompt(asked, VARYING))
            request = GenerateRequest(
                (Segment(tokens, "p0"),), SamplingParams(1), client=ClientId("client"), run=RUN.run_id,
                agent=AgentId("a0"),
            )  # fmt: skip
            engine.submit(request).result(60)
            engine.wait_idle(60)
        assert figures(engine)["cache"]["host_cached_blocks"] * BLOCK == FIXED


def test_requests_without_an_agent_have_no_fixed_prompt() -> None:
    with engine_with(host_blocks=AMPLE, policy="steps") as engine:
        engine.forecast({AgentKey(Namespace(TenantId("default")), "", RunId(""), AgentId("")): NextRun(1.0)})
        engine.submit(GenerateRequest(ask(0, 1).segments, SamplingParams(1))).result(60)
        engine.wait_idle(60)
        assert figures(engine)["cache"]["host_cached_blocks"] == 0


def test_prompts_that_are_cached_already_are_fetched_when_a_run_begins() -> None:
    with engine_with(host_blocks=AMPLE) as engine:
        put_on_host(engine)
        key = AgentKey(Namespace(TenantId("default")), "client", RunId("next run"), AgentId("a0"))
        engine.forecast({AgentKey(*RUN, AgentId("a0")): None})
        engine.forecast({key: NextRun(0.0)}, {key: fixed(0)})
        engine.wait_idle(60)
        assert engine.query(lambda parts: parts.cache.status(RUN.namespace, fixed(0)).device_tokens) == FIXED


def test_the_size_of_the_host_tier() -> None:
    with engine_with(host_memory="1MiB") as engine:
        stats = figures(engine)["cache"]
        assert stats["host_free_blocks"] == (1 << 20) // (engine.runner.spec.bytes_per_token * BLOCK)
    with pytest.raises(ConfigError, match=r"engine\.tiers\.host_memory=5"):
        engine_of(model(), tiers=TierSettings(host_memory=5))


def test_a_policy_of_ones_own() -> None:
    seen = []

    def newest_first(node: Any) -> tuple[float, ...]:
        seen.append(node)
        return (-node.last_access,)

    with torch.inference_mode():
        engine = engine_of(model(), kv_memory=f"{ROOM} blocks", block_size=BLOCK)
    engine.close()
    with LocalEngine.from_runner(engine.runner, engine.tokenizer, engine.config, newest_first) as engine:
        for n in (0, 1, 2, 3, 0):
            done = engine.submit(ask(n, n)).result(60)
        assert seen and done.receipt.exact == FIXED + VARYING - 1
