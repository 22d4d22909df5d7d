"""Prompts with holes in the middle, engines that fill them by lanes, and what these have done."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kedge.integrations.vllm.plugin.requests import TranslationQuery, TranslationVerdict
from kedge.integrations.vllm.plugin.settings import SCHEDULER
from kedge.kv.segment import KVSegment
from kedge.reuse.holes import Holes
from tests.integrations.vllm.conftest import BLOCK, VOCABULARY, Answers, Driver, driver, prompt

SETTINGS = {
    "anchors": {"min_anchors": 4, "max_error": 50.0, "weak_error": 90.0},
    "planner": {"recompute_head": 2, "by_cost": False},
}
"""Every value is translated but for its first two tokens, and so is the template behind it"""
PARTS = [prompt(BLOCK + 9, 1), prompt(70, 2), prompt(79, 3)]
BASE_CONTEXT, PLACEHOLDER = prompt(5, 4), prompt(4, 5)
QUESTIONS = [prompt(60, 100 + number) for number in range(7)]
FACTS = [prompt(50, 200 + number) for number in range(7)]
PLAIN = [prompt(150, 300 + number) for number in range(4)]
"""Prompts without hints"""
LENGTH = 300
HOLES: Holes = (range(41, 43), range(101, 103), range(171, 173), range(221, 223), range(299, 300))
"""Where the planner has `SETTINGS`: in front of each translated segment, and the last token"""
WIDE: Holes = (range(60, 80), range(150, 151), range(200, 215))
"""More holes, for `more_holes`"""
ONE, OTHER = 5, 6
"""Numbers of prompts with values from which nothing was learned"""


def tokens(number: int) -> list[int]:
    return PARTS[0] + QUESTIONS[number] + PARTS[1] + FACTS[number] + PARTS[2]


def hints(number: int, **more: Any) -> dict[str, Any]:
    segments = [
        {"name": "p0", "length": len(PARTS[0])},
        {"name": "q", "length": 60, "sample": "q@0", "base_context": BASE_CONTEXT, "placeholder_text": PLACEHOLDER},
        {"name": "p1", "length": len(PARTS[1])},
        {"name": "f", "length": 50, "sample": "f@0", "base_context": BASE_CONTEXT, "placeholder_text": PLACEHOLDER},
        {"name": "p2", "length": len(PARTS[2])},
    ]
    return {"workflow": "w", "run": f"r{number}", "agent": "a", "segments": segments, **more}


@cache
def stock_of(model: Path) -> Answers:
    """Return answers of 40 tokens of stock vLLM: to prompts by number, and to the plain ones."""
    prompts: Answers = {number: tokens(number) for number in (0, ONE, OTHER)}
    prompts.update({("plain", at): one for at, one in enumerate(PLAIN)})
    with driver(model, plugged=False) as plain:
        return {name: plain.answer(one, count=40) for name, one in prompts.items()}


def ask(engine: Driver, number: int, count: int = 12, **more: Any) -> Any:
    return engine.ask(tokens(number), count, hints(number), **more)


def teach(engine: Driver, seen: int = 5) -> None:
    """Dense calls with the first values, and base KV of all values."""
    for number in range(seen):
        ask(engine, number, count=1)
    for number in range(seen, len(QUESTIONS)):
        engine.ask(tokens(number), 1, hints(number, agent="stranger"))
    engine.reset()


@contextmanager
def asynchronously(ahead: bool) -> Iterator[None]:
    """Lets vLLM's scheduler run ahead of the device, which the CPU platform switches off, if asked."""
    from vllm.platforms.cpu import CpuPlatform

    checked = CpuPlatform.check_and_update_config

    def check(_: type, config: Any) -> None:
        checked(config)
        config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patched:
        if ahead:
            patched.setattr(CpuPlatform, "check_and_update_config", classmethod(check))
        yield


@contextmanager
def lane_engine(model: Path, *, asynchronous: bool, is_taught: bool = True, **more: Any) -> Iterator[Driver]:
    """Starts vLLM with lanes: with its scheduler ahead of the device and its worker asked at once, as on one GPU, or
    asked in every step, as workers in processes of their own are.
    """
    is_v2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
    settings = {"extra": SETTINGS, "scheduler_cls": SCHEDULER, "max_logprobs": VOCABULARY, "max_num_seqs": 24}
    with asynchronously(asynchronous), driver(model, async_scheduling=asynchronous, **{**settings, **more}) as built:
        assert built.scheduler.use_v2_model_runner == is_v2
        assert type(built.scheduler).__name__ == ("AsyncStepScheduler" if asynchronous else "StepScheduler")
        if not asynchronous:
            built.connector.judge_at_once = lambda _: None
        if is_taught:
            teach(built)
        yield built


def add(engine: Driver, number: int, count: int = 40) -> str:
    return engine.add(tokens(number), count, hints(number))


def answers(engine: Driver, *names: str) -> list[list[int]]:
    return [list(engine.finished[name].outputs[0].token_ids) for name in names]


def solo(engine: Driver, number: int, count: int = 40) -> list[int]:
    """The answer of a request alone in an engine with an empty prefix cache."""
    engine.reset()
    return list(ask(engine, number, count).outputs[0].token_ids)


@contextmanager
def leaving_nothing(engine: Driver, *, knows_nothing: bool = True) -> Iterator[None]:
    """Begin with an idle engine without caches, anchors and base KV, unless it keeps these; it ends as idle."""
    engine.reset()
    if knows_nothing:
        engine.worker._learner.clear()
        engine.worker._learner.rotation.trust()
    yield
    check_rest(engine)


def check_rest(engine: Driver) -> None:
    """Check that an engine comes to rest, and that neither it nor its workers have kept anything of a request."""
    engine.run()
    engine.ask(prompt(40, 9), 1)  # a step tells the workers what has finished
    engine.check_rest()
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    known = runner.requests if hasattr(runner, "requests") else runner.req_states.req_id_to_index
    translations = engine.side.translations
    assert not [one for one in known if one.startswith("lane-")]
    assert not engine.worker._learner.planned and not engine.scheduler.deferred_frees
    assert not translations.lanes.prefills and not translations.held.block_ids


class Recorder:
    """Records of an engine: the batches of its steps, the blocks of finished requests, and KV before the pass."""

    def __init__(self, engine: Driver) -> None:
        self._engine = engine
        self.steps: list[dict[str, tuple[int, int]]] = []
        """Per step: request id -> (computed tokens, scheduled tokens)"""
        self.finished: set[str] = set()
        """All ids that the workers were given as finished"""
        self.blocks: list[int] = []
        """Blocks of the request that finished last"""
        self.written: KVSegment | None = None
        """KV of the prompt that was translated last, after the write and before the pass"""
        self.hits = 0
        """Tokens that vLLM counts as hits of the connector"""
        self.replacement: KVSegment | None = None
        """KV of a whole prompt to be written instead of what is translated"""
        self._schedule, self._finish = engine.scheduler.schedule, engine.side.request_finished_all_groups
        engine.scheduler.schedule, engine.side.request_finished_all_groups = self.schedule, self.finish
        learner = engine.worker._learner
        self._write, learner.write = learner.write, self.write

    def close(self) -> None:
        del self._engine.scheduler.schedule, self._engine.side.request_finished_all_groups
        del self._engine.worker._learner.write

    def schedule(self, *args: Any, **more: Any) -> Any:
        stats = self._engine.scheduler.connector_prefix_cache_stats
        hits = stats.hits
        output = self._schedule(*args, **more)
        self.hits += stats.hits - hits
        by_source = getattr(stats, "hits_by_source", {"all": stats.hits})  # since 0.32
        assert stats.hits == sum(by_source.values())
        assert output.kv_connector_metadata.scheduled == output.total_num_scheduled_tokens
        assert output.kv_connector_metadata.rows == len(output.num_scheduled_tokens)
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed.update({new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs})
        scheduled = output.num_scheduled_tokens
        assert output.total_num_scheduled_tokens == sum(scheduled.values())
        if scheduled:
            self.steps.append({one: (computed[one], count) for one, count in scheduled.items()})
        self.finished |= output.finished_req_ids
        return output

    def finish(self, request: Any, blocks: tuple[list[int], ...]) -> Any:
        self.blocks = list(blocks[0])
        return self._finish(request, blocks)

    def write(self, order: Any) -> None:
        self._write(order)
        if self.replacement is not None:
            pages = self._engine.worker._learner.pages
            pages.write(pages.table(order.blocks, only=order.spans), 0, self.replacement, None)
        self.written = self.read(order.blocks)

    def read(self, blocks: Sequence[int] | None = None) -> KVSegment:
        """KV of a prompt's tokens in these blocks, else in those of the last request; keys unrotated."""
        pages, blocks = self._engine.worker._learner.pages, blocks or self.blocks
        return pages.read(pages.table(blocks), 0, min(LENGTH, len(blocks) * BLOCK))

    @property
    def lanes(self) -> set[str]:
        return {one for step in self.steps for one in step if one.startswith("lane-")}

    def admission(self) -> list[tuple[int, int]]:
        """Computed and scheduled tokens of all rows of the first step with lanes."""
        return next(sorted(step.values()) for step in self.steps if any(one.startswith("lane-") for one in step))


@contextmanager
def recorded(engine: Driver) -> Iterator[Recorder]:
    recorder = Recorder(engine)
    try:
        yield recorder
    finally:
        recorder.close()


@contextmanager
def more_holes(engine: Driver, holes: Holes) -> Iterator[None]:
    """Lets verdicts have these holes besides the planner's own: a translated token may always be computed."""
    learner = engine.worker._learner
    judge = learner.judge

    def judged(query: TranslationQuery) -> TranslationVerdict:
        found = judge(query)
        return found.merged(TranslationVerdict(holes)) if len(found.holes) > 1 else found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(learner, "judge", judged)
        yield


def first_logprobs(output: Any) -> Tensor:
    """The log-probabilities of the first token over the whole vocabulary."""
    found = output.outputs[0].logprobs[0]
    return torch.tensor([found[token].logprob for token in range(len(found))])
