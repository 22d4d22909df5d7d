"""Fair between tenants: a backlog is its owner's, and whoever comes beside it waits for a share of a pass at most."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from kedge.engine.local.sequence import RequestSequence, Work
from kedge.types import FinishReason, GenerateRequest, Namespace, ReuseMode, SamplingParams, Segment
from tests.engine.local.stepping import Stepped
from tests.engine.local.test_translation import tokens

NEIGHBOUR, STRANGER = "neighbour", "stranger"
BOTH_MODES = pytest.mark.parametrize("reuse", [ReuseMode.OFF, ReuseMode.EXACT])
_ids = count()


def call(
    tenant: str = NEIGHBOUR,
    seed: int = 1,
    size: int = 60,
    answer: int = 8,
    reuse: ReuseMode = ReuseMode.EXACT,
    prompt_logprobs: int | None = None,
) -> GenerateRequest:
    """A tenant's call; every seed is another prompt."""
    return GenerateRequest(
        (Segment(tokens(seed, size), "p0"),),
        SamplingParams(answer, ignore_eos=True),
        reuse,
        f"{seed}-{tenant}-{next(_ids)}",
        *Namespace.parse(tenant),
        logprobs=0,
        prompt_logprobs=prompt_logprobs,
    )


def alone(request: GenerateRequest, **settings: object) -> RequestSequence:
    """The same call with an engine of its own."""
    engine = Stepped(**settings)
    sequence = engine.submit(request)
    engine.rest()
    return sequence


def of_tenant(work: list[Work], tenant: str) -> list[Work]:
    return [item for item in work if item.sequence.tenant == tenant]


def backlog(engine: Stepped, many: int = 64, steps: int = 6, **kind: int) -> list[RequestSequence]:
    """A neighbour's calls, of which the first ones run."""
    sequences = [engine.submit(call(seed=seed, **kind)) for seed in range(many)]
    for _ in range(steps):
        engine.step()
    return sequences


# a place --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_running", [1, 4, 16])
def test_a_tenants_first_call_is_admitted_in_the_next_pass_whoever_runs(max_running: int) -> None:
    engine = Stepped(max_running=max_running, kv_memory="512 blocks")
    backlog(engine, answer=50)
    assert len(engine.core.scheduler.running) == max_running
    sequence = engine.submit(call(STRANGER, seed=99, answer=4))
    engine.step()
    assert sequence in engine.core.scheduler.running
    assert [item.sequence for item in of_tenant(engine.passes[-1], STRANGER)] == [sequence]


def test_partitions_of_a_tenant_are_one_tenant() -> None:
    engine = Stepped(max_running=4, kv_memory="512 blocks")
    backlog(engine, answer=50)
    other = engine.submit(call(f"{NEIGHBOUR}/part", seed=99))
    first = engine.submit(call(f"{STRANGER}/a", seed=98, answer=50))
    second = engine.submit(call(f"{STRANGER}/b", seed=97))
    for _ in range(5):
        engine.step()
    assert [one.admitted for one in (other, first, second)] == [False, True, False]


def test_only_twice_as_many_run_however_many_tenants_come() -> None:
    engine = Stepped(max_running=3, kv_memory="512 blocks")
    backlog(engine, answer=50)
    for at in range(10):
        engine.submit(call(f"tenant-{at}", seed=90 + at, answer=50))
    for _ in range(5):
        engine.step()
        assert len(engine.core.scheduler.running) <= 6
    assert len(engine.core.scheduler.running) == 6


# a share of a pass ----------------------------------------------------------------------------------------------------


BUSY = pytest.mark.parametrize("neighbours", [{"size": 60, "answer": 50}, {"size": 500, "answer": 2}])


def beside(request: GenerateRequest, neighbours: dict[str, int]) -> tuple[Stepped, list[list[Work]], list[list[Work]]]:
    """An engine, the passes from a call's arrival under a backlog to its end, and those that it takes alone."""
    settings = {"max_running": 16, "kv_memory": "1024 blocks", "max_batch_tokens": 256}
    lone, engine = Stepped(**settings), Stepped(**settings)
    lone.serve(request)
    backlog(engine, **neighbours)
    before, sequence = len(engine.passes), engine.submit(request)
    engine.until(lambda: sequence.is_over)
    return engine, engine.passes[before:], lone.passes


def filling(engine: Stepped) -> float:
    """What one token of one more sequence adds to a pass."""
    return engine.core.parts.costs.added_seconds(1, 1)


@BUSY
@pytest.mark.parametrize(("size", "answer"), [(60, 4), (5, 1), (70, 12)])
def test_beside_a_backlog_a_short_call_takes_as_many_passes_as_alone_each_at_most_twice_as_long(
    size: int, answer: int, neighbours: dict[str, int]
) -> None:
    """But for what fills a pass up: one token of one sequence."""
    engine, passes, lone = beside(call(STRANGER, 99, size, answer), neighbours)
    own, filled = [engine.cost(of_tenant(work, STRANGER)) for work in passes], filling(engine)
    assert own == pytest.approx([engine.cost(work) for work in lone])
    assert all(engine.cost(work) <= 2 * mine + filled for work, mine in zip(passes, own, strict=True))


@BUSY
@pytest.mark.parametrize(("size", "answer"), [(300, 10), (900, 1)])
def test_beside_a_backlog_a_long_call_takes_at_most_twice_its_time_and_one_pass(
    size: int, answer: int, neighbours: dict[str, int]
) -> None:
    engine, passes, lone = beside(call(STRANGER, 99, size, answer), neighbours)
    alone, longest = sum(engine.cost(work) for work in lone), max(engine.cost(work) for work in passes)
    assert sum(engine.cost(work) for work in passes) <= 2 * alone + longest


def test_a_tenant_with_long_prompts_holds_up_nobodys_answers() -> None:
    engine = Stepped(max_batch_tokens=256, kv_memory="1024 blocks")
    short = [engine.submit(call(NEIGHBOUR, seed, answer=40)) for seed in range(2)]
    engine.until(lambda: all(one.first_token for one in short))
    engine.submit(call(STRANGER, 99, size=900))
    while not all(one.is_over for one in short):
        engine.step()
        mine = of_tenant(engine.passes[-1], NEIGHBOUR)
        assert len(mine) == sum(not one.is_over or one.last_pass == engine.core.scheduler.passes for one in short)
        assert engine.cost(engine.passes[-1]) <= 2 * engine.cost(mine) + filling(engine)
        assert of_tenant(engine.passes[-1], STRANGER), "which goes on all the while"


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_short_request_waits_for_no_long_prompts_of_its_tenant(prompts: int) -> None:
    engine = Stepped(max_batch_tokens=256, kv_memory="1024 blocks")
    long = [engine.submit(call(seed=seed, size=900)) for seed in range(prompts)]
    engine.step()
    short = [engine.submit(call(seed=50 + at, size=60)) for at in range(4)]
    engine.step()
    assert [bool(one.first_token) for one in short] == [True, True, False, False], "they take half of a pass"
    assert sum(len(item.positions) for item in engine.passes[-1] if item.sequence is long[0]) == 256 - 2 * 60
    engine.step()
    assert all(one.first_token for one in short) and not any(one.first_token for one in long)
    engine.rest()
    assert all(len(one.response) == 8 for one in (*long, *short))


def test_a_tenant_alone_fills_its_passes() -> None:
    engine = Stepped(max_batch_tokens=256, kv_memory="1024 blocks")
    for part in "ab":
        engine.submit(call(f"{NEIGHBOUR}/{part}", size=400))
    engine.step()
    assert sum(len(item.positions) for item in engine.passes[-1]) == 256


@pytest.mark.parametrize("num_blocks", [40, 1024])
def test_the_neighbour_does_not_starve(num_blocks: int) -> None:
    """Under a tenant that always has a call in flight, on a full pool, too."""
    engine = Stepped(max_running=4, kv_memory=f"{num_blocks} blocks")
    calls = backlog(engine, many=12)
    sequence, done = engine.submit(call(STRANGER, 99)), 0
    while not all(one.is_over for one in calls):
        engine.step()
        assert of_tenant(engine.passes[-1], NEIGHBOUR)
        assert len(engine.passes) < 1000
        if sequence.is_over:
            done += 1
            sequence = engine.submit(call(STRANGER, 100 + done))
    assert done >= 3
    assert all(len(one.response) == 8 for one in calls)


# a full pool ----------------------------------------------------------------------------------------------------------

ROOM = {"kv_memory": "26 blocks", "max_batch_tokens": 64}
"""For three calls of `crowd`, but for no other one"""


def crowd(reuse: ReuseMode = ReuseMode.EXACT, prompt_logprobs: int | None = None) -> list[GenerateRequest]:
    """Calls of a neighbour, of which the youngest reads a long prompt."""
    sizes = (60, 60, 200)
    return [
        call(seed=at, size=size, answer=20, reuse=reuse, prompt_logprobs=prompt_logprobs)
        for at, size in enumerate(sizes)
    ]


def crowded(engine: Stepped, requests: list[GenerateRequest], steps: int) -> list[RequestSequence]:
    """The sequences of these calls, so many steps after the youngest was admitted."""
    sequences = [engine.submit(request) for request in requests]
    engine.until(lambda: sequences[-1].admitted)
    for _ in range(steps):
        engine.step()
    assert engine.core.scheduler.running == sequences
    return sequences


def logprobs(sequence: RequestSequence) -> list[tuple[int, float]]:
    """Of the prompt, then of the answer."""
    noted = (*sequence.logprobs.prompt, *sequence.logprobs.answer)
    return [(one.token, one.logprob) for one in noted if one is not None]


@BOTH_MODES
@pytest.mark.parametrize("steps", [0, 1, 2, 4, 8, 15])
@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_the_neighbours_youngest_call_steps_aside_and_ends_as_it_would_have_alone(
    steps: int, reuse: ReuseMode, prompt_logprobs: int | None
) -> None:
    """Whether it reads its prompt still or answers already."""
    requests, engine = crowd(reuse, prompt_logprobs), Stepped(**ROOM)
    sequences = crowded(engine, requests, steps)
    youngest, answered = sequences[-1], list(sequences[-1].response)
    requests.append(call(STRANGER, 99, reuse=reuse))
    stranger = engine.submit(requests[-1])
    engine.step()
    assert stranger in engine.core.scheduler.running
    assert list(engine.core.scheduler.preempted) == [youngest]
    assert youngest.response == answered, "what it has answered stays"
    engine.rest()
    for sequence, request in zip([*sequences, stranger], requests, strict=True):
        lone = alone(request)
        assert sequence.response == lone.response
        assert [token for token, _ in logprobs(sequence)] == [token for token, _ in logprobs(lone)]
        assert [value for _, value in logprobs(sequence)] == pytest.approx([v for _, v in logprobs(lone)], abs=1e-3)
    engine.learn()
    assert engine.leased == 0


def test_who_was_preempted_goes_on_before_later_calls_of_its_tenant() -> None:
    engine = Stepped(**ROOM)
    youngest = crowded(engine, crowd(), steps=5)[-1]
    later = engine.submit(call(seed=50, size=200, answer=20))
    engine.submit(call(STRANGER, 99))
    engine.step()
    assert list(engine.core.scheduler.preempted) == [youngest]
    engine.until(lambda: later.admitted)
    assert youngest.admitted or youngest.is_over


def test_nobodys_only_call_is_preempted() -> None:
    engine = Stepped(kv_memory="16 blocks")
    only = engine.submit(call(size=200, answer=20))
    engine.until(lambda: only.first_token)
    stranger = engine.submit(call(STRANGER, 99))
    while not only.is_over:
        assert not stranger.admitted and not engine.core.scheduler.preempted
        engine.step()
    engine.rest()
    assert (only.response, stranger.response) == (alone(only.request).response, alone(stranger.request).response)


def test_a_tenant_takes_nothing_for_its_second_call() -> None:
    engine = Stepped(**ROOM)
    crowded(engine, crowd(), steps=5)
    first = engine.submit(call(STRANGER, 98, answer=20))
    engine.step()
    second = engine.submit(call(STRANGER, 99, size=200))
    engine.step()
    assert (first.admitted, second.admitted, len(engine.core.scheduler.preempted)) == (True, False, 1)


def by_cancel(engine: Stepped, sequence: RequestSequence) -> None:
    assert engine.core.requests.cancel(sequence.request.request_id)


def by_shut(engine: Stepped, sequence: RequestSequence) -> None:  # noqa: ARG001
    engine.core.shut(None)


@pytest.mark.parametrize("end", [by_cancel, by_shut])
def test_who_was_preempted_can_be_ended(end: Callable[[Stepped, RequestSequence], None]) -> None:
    engine = Stepped(**ROOM)
    youngest = crowded(engine, crowd(), steps=8)[-1]
    engine.submit(call(STRANGER, 99))
    engine.step()
    answered = tuple(youngest.response)
    assert answered and youngest in engine.core.scheduler.preempted
    end(engine, youngest)
    done = youngest.stream.result(0)
    assert (done.finish_reason, done.tokens) == (FinishReason.CANCELLED, answered)
    engine.rest()
    engine.learn()
    assert engine.leased == 0


def test_many_tenants_on_a_small_pool_all_end_as_they_would_have_alone() -> None:
    engine = Stepped(kv_memory="24 blocks", max_running=4, max_batch_tokens=48)
    kinds = [(f"tenant-{at % 5}", at, 20 + 11 * (at % 7), 3 + at % 9) for at in range(30)]
    requests = [call(*kind) for kind in kinds]
    sequences = []
    for request in requests:
        sequences.append(engine.submit(request))
        engine.step()
    engine.rest()
    assert [one.response for one in sequences] == [alone(request).response for request in requests]
    assert engine.leased == 0
