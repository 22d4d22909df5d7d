"""The suite passes on the shipped fake, and notices engines that break the contract."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from unittest import SkipTest

import pytest

pytest.register_assert_rewrite("tests.engine.conformance")

from kedge.engine.echo import EchoEngine, EchoStream, _Job  # noqa: E402
from kedge.errors import RequestError  # noqa: E402
from kedge.types import GenerateRequest, RequestId, ReuseMode, SampleId, Segment, TenantId, Tokens, new_request_id  # noqa: E402
from kedge.workflow.forecast import AgentKey, Changes  # noqa: E402
from tests.engine.conformance import EngineConformance  # noqa: E402

TESTS = [name for part in reversed(EngineConformance.__mro__) for name in vars(part) if name.startswith("test_")]
"""In the order in which pytest runs them"""
COUNT = SampleId.parse("n")


class TestEchoEngine(EngineConformance):
    @pytest.fixture
    def engine(self) -> Iterator[EchoEngine]:
        with EchoEngine(delay_s=2e-4) as engine:
            yield engine

    def small_engine(self, engine: EchoEngine) -> EchoEngine:
        return type(engine)(delay_s=1e-4, capacity=self.small_capacity)

    def check_at_rest(self, engine: EchoEngine) -> None:
        engine.cache.check_integrity()
        assert engine.cache.stats().leased_blocks == 0
        assert not engine.in_flight


def change(request: GenerateRequest, **changes: object) -> GenerateRequest:
    return replace(request, **changes)


class NeverReuses(EchoEngine):
    def submit(self, request: GenerateRequest) -> EchoStream:
        return super().submit(change(request, reuse=ReuseMode.OFF))


class AlwaysReuses(EchoEngine):
    def submit(self, request: GenerateRequest) -> EchoStream:
        return super().submit(change(request, reuse=ReuseMode.EXACT))


class MixesTenants(EchoEngine):
    def submit(self, request: GenerateRequest) -> EchoStream:
        return super().submit(change(request, tenant=TenantId("all")))


class DropsTheFirstToken(EchoEngine):
    def submit(self, request: GenerateRequest) -> EchoStream:
        first, *rest = request.segments
        return super().submit(change(request, segments=(replace(first, tokens=first.tokens[1:]), *rest)))


class IgnoresStop(EchoEngine):
    def submit(self, request: GenerateRequest) -> EchoStream:
        return super().submit(change(request, sampling=replace(request.sampling, stop=())))


class TalksOn(EchoEngine):
    def submit(self, request: GenerateRequest) -> EchoStream:
        longer = replace(request.sampling, max_tokens=request.sampling.max_tokens + 1)
        return super().submit(change(request, sampling=longer))


class ForgetsCancel(EchoEngine):
    def cancel(self, request_id: RequestId) -> bool:
        return request_id in self.in_flight


class Renames(EchoEngine):
    def submit(self, request: GenerateRequest) -> EchoStream:
        return super().submit(change(request, request_id=RequestId(f"my-{request.request_id}")))


class AnswersByCount(EchoEngine):
    def submit(self, request: GenerateRequest) -> EchoStream:
        count = str(len(self.requests)).encode() * 99
        return super().submit(change(request, segments=(*request.segments, Segment(tuple(count), "n", COUNT))))


class TellsUnasked(EchoEngine):
    def submit(self, request: GenerateRequest) -> EchoStream:
        return super().submit(change(request, logprobs=1))


class TellsOneTooFew(EchoEngine):
    def submit(self, request: GenerateRequest) -> EchoStream:
        top = request.logprobs and request.logprobs - 1
        of_prompt = request.prompt_logprobs and request.prompt_logprobs - 1
        return super().submit(change(request, logprobs=top, prompt_logprobs=of_prompt))


class ScoresNoPrompt(EchoEngine):
    def submit(self, request: GenerateRequest) -> EchoStream:
        return super().submit(change(request, prompt_logprobs=None))


class AnswersAlways(EchoEngine):
    def submit(self, request: GenerateRequest) -> EchoStream:
        return super().submit(change(request, sampling=replace(request.sampling, max_tokens=9)))


class SpellsBadly(EchoEngine):
    def __init__(self, **options: float) -> None:
        super().__init__(**options)
        self.tokenizer.token_bytes = lambda token: self.tokenizer.decode((token,)).encode()


class AcceptsEverything(EchoEngine):
    def _validate(self, request: GenerateRequest) -> None:
        if not request.tokens:
            raise RequestError("tokens", (), "some other error")

    def _serve(self) -> None:
        """Nobody serves: it only matters what is refused."""


class AcceptsDuplicates(EchoEngine):
    def submit(self, request: GenerateRequest) -> EchoStream:
        stream = super().submit(change(request, request_id=new_request_id()))
        stream.request_id = request.request_id
        return stream


class CancelsEverything(EchoEngine):
    def cancel(self, request_id: RequestId) -> bool:
        found = [super(CancelsEverything, self).cancel(known) for known in list(self.in_flight)]
        return bool(found) and request_id is not None


class BelievesAnyHint(EchoEngine):
    def forecast(self, changes: Changes, prompts: Mapping[AgentKey, Tokens] = MappingProxyType({})) -> None:
        self.soonest = min((int(next_run.steps) for next_run in changes.values() if next_run), default=0)
        super().forecast(changes, prompts)


class DropsLargePrompts(EchoEngine):
    def _admit(self, job: _Job) -> bool:
        job.cancelled = job.request.prompt_tokens > self.cache.num_blocks // 2
        return super()._admit(job)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (NeverReuses, "test_exact_reuse_changes_no_token"),
        (AlwaysReuses, "test_exact_reuse_changes_no_token"),
        (MixesTenants, "test_reuse_never_crosses_tenants"),
        (DropsTheFirstToken, "test_receipt_accounts_for_every_prompt_token"),
        (IgnoresStop, "test_a_stop_string_ends_the_text_before_it"),
        (TalksOn, "test_max_tokens_is_honoured"),
        (ForgetsCancel, "test_cancel_ends_one_request_only"),
        (Renames, "test_ids_are_unique_and_kept"),
        (AnswersByCount, "test_greedy_is_deterministic"),
        (AnswersByCount, "test_requests_at_once_answer_as_one_by_one"),
        (TellsUnasked, "test_nobody_asked_nobody_is_told"),
        (TellsOneTooFew, "test_an_answer_is_told_with_its_log_probabilities"),
        (TellsOneTooFew, "test_a_prompt_is_told_with_its_log_probabilities"),
        (ScoresNoPrompt, "test_a_prompt_is_told_with_its_log_probabilities"),
        (AnswersAlways, "test_a_prompt_can_be_computed_without_an_answer"),
        (SpellsBadly, "test_a_text_is_the_bytes_of_its_tokens"),
        (AcceptsEverything, "test_numbers_and_stop_strings_that_cannot_be_are_refused"),
        (AcceptsEverything, "test_fields_that_cannot_be_are_refused"),
        (AcceptsEverything, "test_what_is_no_token_is_refused_wherever_it_stands"),
        (AcceptsEverything, "test_a_prompt_that_is_too_long_is_refused"),
        (AcceptsEverything, "test_tokens_outside_the_vocabulary_are_refused"),
        (AcceptsDuplicates, "test_a_duplicate_of_a_request_in_flight_is_refused"),
        (AcceptsDuplicates, "test_one_of_many_duplicates_at_once_is_accepted"),
        (CancelsEverything, "test_aborts_at_any_stage_leave_a_neighbour_alone"),
        (CancelsEverything, "test_many_clients_at_once_are_answered_as_one_by_one"),
        (ForgetsCancel, "test_an_abort_may_come_twice_and_after_the_end"),
        (ForgetsCancel, "test_many_aborts_at_once"),
    ],
)
def test_broken_engines_are_noticed(broken: type[EchoEngine], test: str) -> None:
    with broken(delay_s=1e-4) as engine, pytest.raises(AssertionError):
        getattr(EngineConformance(), test)(engine)


def test_hints_that_raise_are_noticed() -> None:
    with BelievesAnyHint() as engine, pytest.raises(ValueError, match="NaN"):
        EngineConformance().test_hints_that_cannot_be_meant_are_ignored(engine)


@pytest.mark.parametrize(
    "test",
    ["test_overload_on_a_small_pool_ends_every_request", "test_a_request_that_waits_in_a_full_queue_can_be_aborted"],
)
def test_requests_that_are_lost_in_a_full_cache_are_noticed(test: str) -> None:
    with DropsLargePrompts() as engine, pytest.raises(AssertionError):
        getattr(TestEchoEngine(), test)(engine)


def test_overload_is_skipped_where_no_small_engine_is_provided() -> None:
    with EchoEngine() as engine, pytest.raises(SkipTest, match="EchoEngine"):
        EngineConformance().test_overload_on_a_small_pool_ends_every_request(engine)


def test_a_wrong_error_is_not_taken_for_the_right_one() -> None:
    with AcceptsEverything() as engine, pytest.raises(RequestError, match="some other error"):
        EngineConformance().test_an_empty_prompt_is_refused(engine)


def test_closing_comes_last() -> None:
    assert TESTS[-1] == "test_close_cancels_refuses_and_is_idempotent"
