"""What the clients of a team under load saw: which calls and runs count, and by how much."""

from __future__ import annotations

from kedge.bench.load import LoadRecord, TeamRun, TimedCall, percentile
from kedge.types import Completion, FinishReason, Receipt, RequestId, ReuseMode, RunId, Source, Span

MEASURED = (
    "ttft_p50_ms", "ttft_p99_ms", "latency_p50_s", "latency_p99_s", "translated_share",
)  # fmt: skip


def call(run: str, began: float, ended: float, ttft: float = 1.0, translated: int = 0) -> TimedCall:
    """A call of 10 prompt tokens, some of them translated."""
    spans = (Span(0, translated, Source.TRANSLATED), Span(translated, 10, Source.COMPUTED))
    receipt = Receipt(RequestId("r"), ReuseMode.TRANSLATE, spans)
    done = Completion(RequestId("r"), "", (), FinishReason.STOP, receipt, ttft, 1.0)
    return TimedCall(RunId(run), began, ended, done)


def test_calls_count_by_the_share_of_their_time_that_lies_within_the_window() -> None:
    record = LoadRecord(began=100.0, seconds=60.0, calls_per_run=2)
    record.calls += [call("a", 100, 110), call("a", 110, 120), call("b", 140, 180), call("c", 150, 160)]
    figures = record.as_json()
    assert figures["teams_per_min"] == 3.5 / 2
    assert figures["calls"] == 3
    assert figures["teams_per_min_last_third"] == 1.5 / 2 * 3


def test_the_calls_of_a_run_that_failed_do_not_count_but_its_error_does() -> None:
    record = LoadRecord(began=0.0, seconds=60.0, calls_per_run=1)
    record.calls += [call("a", 0, 10), call("b", 10, 20)]
    record.runs += [
        TeamRun(RunId("a"), 10, 10),
        TeamRun(RunId("b"), 20, 10, "ToolError"),
        TeamRun(RunId("c"), 61, 10, "EngineClosed"),
    ]
    figures = record.as_json()
    assert (figures["teams_per_min"], figures["runs"], figures["latency_p50_s"]) == (1.0, 1, 10)
    assert (figures["errors"], figures["errors_by_kind"]) == (1, {"ToolError": 1})


def test_shares_are_of_all_prompt_tokens_and_add_up_to_one() -> None:
    record = LoadRecord(
        began=0.0, seconds=60.0, calls_per_run=1, calls=[call("a", 0, 9, translated=5), call("b", 0, 9)]
    )
    figures = record.as_json()
    assert (figures["translated_share"], figures["exact_share"], figures["computed_share"]) == (0.25, 0.0, 0.75)


def test_nothing_that_ended_has_no_percentiles() -> None:
    figures = LoadRecord(began=0.0, seconds=1.0, calls_per_run=5).as_json()
    assert figures["teams_per_min"] == 0
    assert {figures[name] for name in MEASURED} == {None}


def test_percentiles_are_values_of_the_nearest_rank() -> None:
    assert [percentile(list(map(float, range(101))), share, 1) for share in (0.0, 0.5, 0.99)] == [0.0, 50.0, 99.0]
