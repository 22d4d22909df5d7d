"""`kedge run` on the echo engine: what it shows, what it writes, and what it refuses."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kedge.cli import run as command
from kedge.engine.echo import EchoEngine
from kedge.errors import RequestError
from kedge.guard import FidelityNote
from kedge.runner.run import run
from kedge.settings import Settings
from kedge.types import AgentId, ReuseMode
from kedge.workflow.spec import load_workflow
from tests.cli.commands import assert_refused, kedge, shown
from tests.server.conftest import FLOW

ANSWERS = {AgentId("first"): "one [red]and[/red]", AgentId("last"): "the end"}
QUESTION = ["--input", "user_question=a=b?"]


class Opened:
    """Stands for the embedded engine and keeps what it was opened with."""

    def __init__(self) -> None:
        self.engine = EchoEngine(ANSWERS)
        self.settings: list[Settings] = []

    def __call__(self, settings: Settings) -> EchoEngine:
        self.settings.append(settings)
        return self.engine


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Opened]:
    monkeypatch.chdir(tmp_path)
    Path("flow.yaml").write_text(FLOW, encoding="utf-8")
    stand_in = Opened()
    monkeypatch.setattr(command, "open_engine", stand_in)
    yield stand_in
    stand_in.engine.close()


def test_answers_and_receipts_are_shown(opened: Opened) -> None:
    text = shown("run", "flow.yaml", *QUESTION)
    told = [line for line in text.splitlines() if line.startswith(("›", "✓", "one", "the end"))]
    steps = ["› first", "✓ first", "one [red]and[/red]", "› last", "✓ last", "the end"]
    assert [line.split("  ")[0] for line in told] == steps
    assert "where the prompt tokens came from" in text
    assert "· not in the cache: p0 of first" in text
    assert opened.settings[0] == Settings()


def test_json_holds_answers_and_receipts_that_sum(opened: Opened) -> None:
    Path("link.json").symlink_to("out.json")
    assert kedge("run", "flow.yaml", *QUESTION, "--json", "link.json").exit_code == 0
    assert Path("link.json").is_symlink()
    data = json.loads(Path("out.json").read_text(encoding="utf-8"))
    assert (data["workflow"], data["reuse"], data["answer"]) == ("pair", "translate", "the end")
    assert [(agent["agent"], agent["text"]) for agent in data["agents"]] == list(ANSWERS.items())
    for agent, request in zip(data["agents"], opened.engine.requests, strict=True):
        assert sum(agent["tokens"].values()) == request.prompt_tokens == agent["spans"][-1]["stop"]


@pytest.mark.parametrize(
    ("note", "rung", "mean"),
    [
        (FidelityNote(0.002, "anchors 0.1", 0.00125, 0.0019, 7), "anchors 0.1", "0.0013"),
        (FidelityNote(0.002, "", None, None, 3), "computed; 3 compared", ""),
        (None, "", ""),
    ],
)
def test_receipts_say_how_an_agent_is_translated_and_how_far_off_it_is(
    opened: Opened, note: FidelityNote | None, rung: str, mean: str
) -> None:
    opened.engine.close()
    with EchoEngine(ANSWERS) as engine:
        result = run(engine, load_workflow(Path("flow.yaml")), {"user_question": "why?"})
    answers = [
        replace(one, completion=replace(one.completion, receipt=replace(one.completion.receipt, fidelity=note)))
        for one in result.results
    ]
    told = replace(result, results=tuple(answers))
    table: Any = command.receipts(told).renderables[-1]
    way, kl = table.columns[-2:]
    assert list(zip(way.cells, kl.cells, strict=True)) == [(rung, mean)] * len(ANSWERS)
    assert command.run_json(told)["agents"][0]["fidelity"] == (note and asdict(note))


def test_flags_win_over_the_settings_file(opened: Opened) -> None:
    Path("own.toml").write_text("[server]\nreuse = 'off'\n[engine]\nmodel = 'a'\ndevice = 'cuda'\n", encoding="utf-8")
    assert kedge("run", "flow.yaml", *QUESTION, "--config", "own.toml", "--model", "b").exit_code == 0
    engine = opened.settings[0].engine
    assert (engine.model, engine.device) == (Path("b"), "cuda")
    assert opened.engine.requests[0].reuse is ReuseMode.OFF


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["flow.yaml"], "inputs.user_question=None"),
        (["flow.yaml", "-i", "user_question= "], "inputs.user_question=' '"),
        (["flow.yaml", "-i", "nothing"], "--input='nothing': must be NAME=VALUE"),
        (["flow.yaml", "-i", "=x"], "--input='=x': must be NAME=VALUE"),
        (["flow.yaml", *QUESTION, *QUESTION], "--input='user_question': duplicate: the input is given twice"),
        (["flow.yaml", "-i", "other=1"], "inputs='other'"),
        (["flow.yaml", *QUESTION, "--device", "tpu"], "engine.device='tpu'"),
        (["flow.yaml", *QUESTION, "--json", "no/where.json"], "--json='no/where.json': cannot be written"),
        (["flow.yaml", *QUESTION, "--config", "none.toml"], "file='none.toml'"),
        (["flow.yaml", "--inputs", "none.jsonl"], "--inputs='none.jsonl': no such file"),
    ],
)
def test_bad_input_is_one_line(opened: Opened, args: list[str], message: str) -> None:  # noqa: ARG001
    assert_refused(message, "run", *args)


# many questions -------------------------------------------------------------------------------------------------------


def many(*lines: str) -> str:
    Path("questions.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return "questions.jsonl"


def test_many_questions_run_on_one_engine(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[None] = []
    monkeypatch.setattr(opened.engine, "wait_idle", lambda: waited.append(None))
    asked = [f"line\u2028number {at}?" for at in range(3)]
    file = many(*(json.dumps({"user_question": one}, ensure_ascii=False) for one in asked), "")
    text = shown("run", "flow.yaml", "--inputs", file, "--json", "out.json")
    assert len(opened.settings) == 1
    assert [line[:7] for line in text.splitlines() if "the end" in line] == ["1 of 3,", "2 of 3,", "3 of 3,"]
    tokens = sum(request.prompt_tokens for request in opened.engine.requests)
    assert f"all questions: 0% of {tokens:,} prompt tokens translated" in text
    last = text.split("in the last question")[1]
    assert [line.split()[0] for line in last.splitlines() if line.split()[:1] in (["first"], ["last"])] == [*ANSWERS]
    assert len(waited) == 3
    data = json.loads(Path("out.json").read_text(encoding="utf-8"))
    assert [one["inputs"]["user_question"] for one in data["questions"]] == asked
    assert [one["answer"] for one in data["questions"]] == ["the end"] * 3


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "--inputs='questions.jsonl': has no line with inputs"),
        (["{"], "--inputs='questions.jsonl:1': is not a JSON object"),
        (["", "[" * 200_000], "--inputs='questions.jsonl:2': is not a JSON object"),
        (['{"user_question": "a"}', '["a"]'], "--inputs='questions.jsonl:2': is not a JSON object"),
        (['{"user_question": "a"}', "{}"], "inputs.user_question=None"),
        (['{"user_question": 1}'], "inputs.user_question=1"),
        (['{"user_question": "a", "x": "b"}'], "inputs='x'"),
    ],
)
def test_a_bad_line_is_told_before_anything_runs(opened: Opened, lines: list[str], message: str) -> None:
    assert_refused(message, "run", "flow.yaml", "--inputs", many(*lines))
    assert not opened.settings


def test_what_was_answered_before_an_error_is_kept(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, calls = opened.engine.submit, []

    def failing(request: object) -> object:
        calls.append(request)
        if len(calls) > 2:
            raise RequestError("prompt", 1, "too long")
        return submit(request)

    monkeypatch.setattr(opened.engine, "submit", failing)
    flow = FLOW.replace('"Q: {user_question}"', '"W: {user_word} Q: {user_question}"')
    Path("flow.yaml").write_text(f"inputs: [user_question, user_word]{flow}", encoding="utf-8")
    file = many('{"user_question": "a"}', '{"user_question": "b", "user_word": "other"}')
    result = kedge("run", "flow.yaml", "-i", "user_word=same", "--inputs", file, "--json", "out.json")
    assert result.exit_code == 2
    read = [opened.engine.tokenizer.decode(one.tokens) for one in opened.engine.requests[::2]]
    assert "W: same" in read[0], "an input of all questions is given once"
    assert "question 2 of 2" in result.stderr
    assert len(json.loads(Path("out.json").read_text(encoding="utf-8"))["questions"]) == 1
