"""The whole experiment on the bundled model: a few questions, all kinds of methods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from benchmarks.lab import comparison
from benchmarks.lab.comparison import JUDGED, Lab, LabSettings, MethodBench, MethodRuns, run_pairs
from benchmarks.lab.methods import METHODS
from kedge.bench.probe import Method, Probe, ProbeResult, method_named
from kedge.bench.shapes import load_model
from kedge.errors import ConfigError
from kedge.settings import EngineSettings
from kedge.types import GenerateRequest, ReuseMode, Source, TenantId
from kedge.workloads.miniature import TASKS
from tests.engine.local.test_translation import request, tokens

CHOICE = TASKS["choice"]
OPEN = {"min_anchors": 1, "max_error": 1e9, "weak_error": 1e9}
CPU = {"device": "cpu", "kv_memory": "400 blocks"}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def runs() -> dict[str, MethodRuns]:
    settings = LabSettings(agents=3, judged=True, anchors=OPEN, engine=CPU)
    questions = islice(TASKS["choice"].questions("test", 4), 3)
    return run_pairs(CHOICE, questions, ("dense", "rotation", "cacheblend", "token"), settings)


def test_dense_again_is_the_ceiling(runs: dict[str, MethodRuns]) -> None:
    summary = runs["dense"].summary()
    assert summary.questions == 3
    assert summary.accuracy == summary.accuracy_dense
    assert (summary.same_final_answer, summary.judge_consistency) == (1, 1)
    assert (summary.flips, summary.reuse_rate, summary.reused_tokens) == (0, 0, 0)


def test_methods_reuse_and_pay_for_it(runs: dict[str, MethodRuns]) -> None:
    for name in ("rotation", "cacheblend", "token"):
        receipts = [pair.other.completion.receipt for pair in runs[name].answers if pair.question == 2]
        assert [one.translated > 0 for one in receipts] == [False, True, True], (
            "nobody has seen the first one's question"
        )
        assert 0.2 < sum(one.computed for one in receipts) / sum(one.prompt_tokens for one in receipts) < 0.8
    assert runs["cacheblend"].summary().reused_tokens < runs["rotation"].summary().reused_tokens


def test_a_method_with_a_guard_is_watched_and_judges_nobody() -> None:
    settings = LabSettings(agents=3, judged=True, engine=CPU)
    questions = islice(TASKS["choice"].questions("test", 4), 2)
    (served,) = run_pairs(CHOICE, questions, ["served:fidelity=strict"], settings).values()
    receipts = [pair.other.completion.receipt for pair in served.answers]
    assert all(one.fidelity and not one.translated for one in receipts), "nothing is proved by two questions"
    assert served.summary().same_final_answer == 1 and served.summary().judge_consistency is None


def test_methods_without_anchors_answer_side_by_side_and_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which makes a study with many of them several times as fast, and changes no figure."""
    monkeypatch.setattr(comparison, "AT_ONCE", 2)
    names = ("epic", "cacheblend", "relay")
    assert not any(METHODS[name].learns for name in ("dense", "exact", *names))
    settings = LabSettings(agents=3, judged=True, engine=CPU)

    def run() -> dict[str, MethodRuns]:
        return run_pairs(CHOICE, islice(TASKS["choice"].questions("test", 4), 4), names, settings)

    short = run()
    monkeypatch.setattr(Method, "keeps", True)
    full = run()
    for name in names:
        ours, theirs = short[name], full[name]
        spans, others = ([one.other.completion.receipt.spans for one in runs.answers] for runs in (ours, theirs))
        assert spans == others
        assert (ours.finals, ours.choices) == (theirs.finals, theirs.choices)


def test_every_agent_is_there_in_order(runs: dict[str, MethodRuns]) -> None:
    for one in runs.values():
        assert [pair.agent for pair in one.answers] == ["expert", "searcher", "final"] * 3
        assert len(one.finals) == len(one.choices) == 3
        assert {pair.dense.text for pair in one.answers} == {pair.dense.text for pair in runs["dense"].answers}
        assert one.summary().questions == 3


def test_the_judges_candidates_are_said_shuffled_and_partly_wrong() -> None:
    with Lab(CHOICE, {}, LabSettings(agents=4, judged=True, engine=CPU)) as lab:
        seen = []
        lab._judge, inner = lambda *args: seen.append(inner(*args)), lab._judge  # type: ignore[method-assign]
        lab.ask(list(enumerate(islice(TASKS["choice"].questions("test", 5), 3))))
        decode = lab._dense.engine.tokenizer.decode
    said = 0
    for judge in seen:
        by_sample = {segment.sample: segment.tokens for segment in judge.request.segments}
        for producer, answer in judge.candidates.items():
            assert by_sample[producer.produces] == answer
            said += 1
        assert all(decode(answer) for answer in judge.candidates.values())
    assert said == 3 * 3
    orders = {tuple(s.sample for s in j.request.segments if s.name.startswith("agent_")) for j in seen}
    assert len(orders) > 1


def test_a_judges_candidates_are_answered_only_where_something_reads_what_they_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: Counter[ReuseMode] = Counter()
    look = MethodBench.look

    def counted(bench: MethodBench, request: GenerateRequest, tenant: TenantId, *args: Any, **how: Any) -> ProbeResult:
        seen[bench.reuse] += tenant == JUDGED
        return look(bench, request, tenant, *args, **how)

    monkeypatch.setattr(MethodBench, "look", counted)
    settings = LabSettings(agents=3, judged=True, engine=CPU)
    questions = islice(TASKS["choice"].questions("test", 4), 1)
    runs = run_pairs(CHOICE, questions, ("dense", "exact", "epic"), settings)
    assert seen == {ReuseMode.OFF: 1 + 1, ReuseMode.EXACT: 1, ReuseMode.TRANSLATE: 2 + 1}
    assert all(one.summary().judge_consistency == 1 for name, one in runs.items() if name != "epic")


def test_decisions_that_differ_are_flips(monkeypatch: pytest.MonkeyPatch) -> None:
    decisions = iter(["sell", "keep"] * 2)
    monkeypatch.setattr(comparison, "first_decision", lambda answer: answer.strip() and next(decisions))
    questions = islice(TASKS["choice"].questions("test", 4), 1)
    settings = LabSettings(agents=2, engine=CPU)
    summary = run_pairs(CHOICE, questions, ("dense",), settings)["dense"].summary()
    assert (summary.flips, summary.same_final_answer) == (1, 1)


def test_nothing_is_written_past_a_methods_assembler() -> None:
    """Work ahead of a request is the engine's own translation: an ablation would not be one."""
    with Lab(CHOICE, {"rotation": METHODS["rotation"]}, LabSettings(agents=3, engine=CPU)) as lab:
        lab.ask(list(enumerate(islice(TASKS["choice"].questions("test", 6), 2))))
        bench = lab._benches["rotation"]
        preassembled = bench.engine.inspect()["preassembly"]
    assert any(pair.other.completion.receipt.translated for pair in lab.runs["rotation"].answers)
    assert not any(preassembled.values())
    assert not bench.probe.watched


def test_a_probe_forces_reads_and_teaches() -> None:
    loaded = load_model(None, EngineSettings(device="cpu"))
    probe = Probe()
    with METHODS["token"].open(loaded, OPEN, components=probe.components, **CPU) as engine:
        natural = probe.submit(engine, request(tokens(50, 30), reuse=ReuseMode.OFF), kv=True).result()
        forced = probe.submit(engine, request(tokens(50, 30), reuse=ReuseMode.OFF), (5, 6, 7), kv=True).result()
        assert forced.completion.tokens == (5, 6, 7)
        assert torch.allclose(natural.logits[0], forced.logits[0], atol=1e-4)
        assert torch.allclose(natural.kv.keys, forced.kv.keys, atol=1e-4)
        assert natural.kv.tokens == natural.request.prompt_tokens
        assert len(forced.logits) == 3
        probe.teaching = True
        for seed in (50, 51, 52, 52):
            taught = probe.submit(engine, request(tokens(seed, 30))).result()
            engine.wait_idle(60)
            assert taught.completion.receipt.tokens(Source.TRANSLATED) == 0
        assert engine.inspect()["anchors"]["observed"] == 4
        probe.teaching = False
        probe.submit(engine, request(tokens(53, 30), agent="critic")).result()  # leaves base KV behind
        engine.wait_idle(60)
        again = probe.submit(engine, request(tokens(53, 30))).result()
        assert again.completion.receipt.translated > 0
        assert not probe.watched


def test_methods_have_names() -> None:
    with pytest.raises(ConfigError, match="method='magic'"):
        method_named("magic", METHODS)
    assert METHODS["kvcomm"].anchors == {"estimator": "interpolate"}
    assert method_named("exact").reuse is ReuseMode.EXACT
    for name, method in METHODS.items():
        assert method.config({"capacity": 3}, {}, device="cpu").anchors.capacity == 3, name
