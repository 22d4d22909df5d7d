"""The quality guard on vLLM: wrong translations in the worker are found, and the plug-in translates no more."""

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.utils.system_utils import get_mp_context

from kedge.engine.common.guarding import check
from kedge.engine.common.guarding.check import dense_check
from kedge.engine.common.model_folder import model_path
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.guard import EVERYTHING, GuardMode, GuardOrders, GuardState
from kedge.integrations.vllm.engine import driver
from kedge.integrations.vllm.engine.engine import VLLMEngine
from kedge.integrations.vllm.forced_answers import ForcedAnswers
from kedge.reuse.guard.fidelity import LEAST, RUNGS
from kedge.reuse.planner import UNPROVED, UNREAD, WITHHELD
from kedge.settings import EngineSettings
from kedge.types import Completion, GenerateRequest, ReuseMode, SampleId, SamplingParams, Segment, new_request_id
from tests.integrations.vllm.conftest import SCHEDULING, prompt, save_tiny_nano
from tests.integrations.vllm.engine.test_engine import PATIENCE, wait_until
from tests.integrations.vllm.test_cache_groups import gemma3

FAULT = "KEDGE_TEST_FAULT"
WORKER = f"""
import os
from kedge.kv import storage

right = storage.add_offsets

def add_offsets(base, offsets, out):
    right(base, offsets * -9.0 if os.path.exists(os.environ["{FAULT}"]) else offsets, out)

storage.add_offsets = add_offsets
"""
"""What every Python process of the engine runs first: offsets are scaled once the file of the fault exists"""
HEAD, TAIL = (tuple(prompt(size, seed)) for size, seed in ((41, 1), (70, 2)))
LEAD_IN, STAND_IN = (tuple(prompt(size, seed)) for size, seed in ((5, 3), (4, 4)))
VALUES = range(5)
TOP = 5
AS_SET = GuardOrders()
PROCESSOR = f"{ForcedAnswers.__module__}:{ForcedAnswers.__name__}"


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file that makes the workers' translations wrong, once it exists."""
    folder = tmp_path_factory.mktemp("fault")
    (folder / "sitecustomize.py").write_text(WORKER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setenv(FAULT, str(folder / "fault"))
        patch.setattr("vllm.v1.engine.utils.get_mp_context", get_mp_context)  # else they are forked
        patch.setattr(check, "FAR", 0.02)  # of a random model's flat distributions few tokens show little
        yield folder / "fault"


@pytest.fixture(scope="module", params=SCHEDULING, ids=["sync", "async"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, fault: Path
) -> Iterator[VLLMEngine]:
    """An engine whose workers obey the fault, and that gives few log-probabilities."""
    fault.unlink(missing_ok=True)
    folder = save_tiny_nano(tmp_path_factory.mktemp("model"))
    own = {
        "max_model_len": 384, "num_gpu_blocks_override": 16, "max_num_seqs": 4, "max_logprobs": TOP,
        "async_scheduling": request.param, "logits_processors": [PROCESSOR],
    }  # fmt: skip
    config = {
        "backend": "vllm", "vllm": own, "planner": {"by_cost": False},
        "guard": {"share": 1.0, "budget": 1.0},
        "anchors": {"min_anchors": 4, "max_error": 50.0, "weak_error": 50.0},
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patched, VLLMEngine(folder, EngineSettings.model_validate(config)) as built:
        for one in (check, driver):
            patched.setattr(one, "COMPARED_TOKENS", 4)
        yield built


def question(
    number: int, agent: str = "a", run: str = "", orders: GuardOrders = AS_SET, count: int = 8
) -> GenerateRequest:
    """One call of an agent, in a run of its own."""
    value = Segment(tuple(prompt(60, 100 + number)), "q", SampleId.parse("q@0"), LEAD_IN, STAND_IN)
    return GenerateRequest(
        (Segment(HEAD, "p0"), value, Segment(TAIL, "p1")),
        SamplingParams(count, ignore_eos=True), ReuseMode.TRANSLATE, new_request_id(),
        workflow="w", agent=agent, run=run or f"run {time.monotonic()}", guard=orders,
    )  # fmt: skip


def ask(engine: VLLMEngine, number: int, agent: str = "a", orders: GuardOrders = AS_SET) -> Completion:
    """An answer, and the end of its run."""
    request = question(number, agent, orders=orders)
    done = engine.submit(request).result(PATIENCE)
    engine.end_run(request.run_key)
    return done


def guard(engine: VLLMEngine) -> dict[str, Any]:
    """The guard's figures."""
    return engine.inspect()["guard"]


def record(engine: VLLMEngine) -> dict[str, Any]:
    """What it knows of the placeholder of the agent without a budget."""
    known = (one for one in guard(engine)["agents"] if one["agent"] == "a")
    return next(known, {"checks": 0, "withheld": False})


def is_at_rest(engine: VLLMEngine) -> bool:
    figures = engine.inspect()
    return not any(figures["requests"].values()) and not figures["cache"]["leased_blocks"]


def test_no_log_probabilities_no_guard(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_max_logprobs", 0)
    assert ask(engine, 0).receipt.guard == () and guard(engine)["agents"] == []


def test_a_check_is_compared_at_all_tokens(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "COMPARED_TOKENS", 6)
    asked = GenerateRequest(
        (Segment(HEAD, "p0"),), SamplingParams(8, ignore_eos=True), ReuseMode.TRANSLATE, logprobs=TOP
    )  # fmt: skip
    other = tuple(prompt(8, 7))  # an answer that a translation far off could have given
    served = replace(engine.submit(asked).result(PATIENCE), tokens=other)
    forced = dense_check(asked, served, []).requests[0]
    found = engine.submit(replace(forced, logprobs=TOP)).result(PATIENCE)
    whole = replace(asked, segments=(Segment(HEAD + other, "p0"),), request_id=new_request_id(), prompt_logprobs=TOP)
    text = engine.submit(whole).result(PATIENCE).prompt_logprobs[len(HEAD) :]
    assert found.tokens == forced.forced == other[:6] and len(found.logprobs) == 6
    assert [one.logprob for one in found.logprobs] == pytest.approx([one.logprob for one in text[:6]], abs=1e-3)


def test_a_budget_is_proved_before_anything_is_translated(engine: VLLMEngine) -> None:
    """Any rung is within one so large; what is tried leaves no trace in an answer."""
    receipts = []

    def is_translated() -> bool:
        number = len(receipts) % (2 * LEAST)  # one prompt twice proves nothing more, but a value has base KV then
        done = ask(engine, number, "b", GuardOrders(fidelity=15.0))
        wait_until(lambda: is_at_rest(engine))
        assert done.logprobs == () and done.receipt.fidelity is not None
        receipts.append(done.receipt)
        return done.receipt.translated > 0

    wait_until(is_translated)
    *others, last = receipts
    before = [one for one in others if one.fidelity.rung == ""]  # once one serves, it may still cost more than it saves
    assert len(before) >= LEAST and not any(one.translated for one in others)
    assert {UNPROVED, UNREAD} & {miss.reason for one in before for miss in one.misses}
    known, others = (engine.inspect_tenants(lambda _, own=own: own, [])["guard"]["agents"] for own in (True, False))
    assert "b" in {one["agent"] for one in known} and not others, "a tenant sees its own"
    assert last.fidelity.rung in {rung.name for rung in RUNGS} and last.fidelity.checks >= LEAST
    assert last.fidelity.mean <= last.fidelity.bound <= 15


def test_a_fault_in_the_worker_ends_translation(engine: VLLMEngine, fault: Path) -> None:
    def is_translated(number: int) -> bool:
        done = ask(engine, number)
        assert done.logprobs == (), "the guard's log-probabilities are no client's"
        return done.receipt.translated > 0

    computed = GuardOrders(GuardMode.OFF, withheld=frozenset((EVERYTHING,)))
    for _ in range(2):  # the first call of all checks the model's rotation, and teaches nothing
        for number in VALUES:
            ask(engine, number, orders=computed)
    wait_until(lambda: sum(is_translated(number) for number in VALUES) > 1)
    wait_until(lambda: is_at_rest(engine) and record(engine)["checks"] > 0)
    clean = record(engine)
    assert (clean["changed"], clean["withheld"], clean["state"]) == (0, False, GuardState.CANARY)
    done, dropped = guard(engine)["checks_done"], guard(engine)["checks_dropped"]
    assert done >= clean["checks"] and not dropped, "checks stay within vLLM's max_logprobs"

    fault.touch()
    asked = itertools.cycle(VALUES)
    wait_until(lambda: ask(engine, next(asked)) is not None and record(engine)["withheld"])
    receipts = [ask(engine, number).receipt for number in VALUES]
    assert not any(one.translated for one in receipts)
    assert ("q", WITHHELD) in {(miss.segment, miss.reason) for one in receipts for miss in one.misses}
    assert all(note.state is GuardState.SHADOW for one in receipts for note in one.guard)
    wait_until(lambda: is_at_rest(engine))


def test_where_nothing_is_translated_no_prompt_is_tried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Trials would compute every prompt once more, and never say anything."""
    gemma3().eval().save_pretrained(tmp_path)
    HFTokenizer.load(model_path(None)).inner.save_pretrained(tmp_path)
    own = {"max_model_len": 384, "max_num_seqs": 4, "num_gpu_blocks_override": 64, "block_size": 32, "dtype": "float32"}
    with VLLMEngine(tmp_path, EngineSettings(backend="vllm", vllm=own)) as engine:
        assert "nothing is translated: the model has 3 KV cache groups" in caplog.text
        for number in range(3):
            done = engine.submit(question(number)).result(PATIENCE)
            assert not done.receipt.translated and done.receipt.fidelity is None
        engine.wait_idle()
        guard: Any = engine.inspect()["guard"]
        assert guard["checks_done"] == guard["checks_dropped"] == 0
