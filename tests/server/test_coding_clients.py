"""Whole requests of Claude Code and Codex, headers and bodies, as they reach `kedge serve`."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kedge.types import TurnHints
from tests.coding_clients import CLAUDE_CODE, CODEX, SESSION, SUBAGENT, claude_code, codex, events, with_other_ids
from tests.server.talking import MODEL, Talking, talking

RUN = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


@pytest.fixture(scope="module")
def told() -> Iterator[Talking]:
    with talking() as running:
        yield running


def test_claude_code_is_answered_with_a_call(told: Talking) -> None:
    told.text = "I look. " + RUN % ("Bash", '{"command": "git log"}')
    seen = events(f"{told.served.url}/v1/messages?beta=true", claude_code(MODEL, 32000), CLAUDE_CODE)
    kinds = [one["type"] for one in seen if one["type"] != "ping"]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    blocks = [one["content_block"]["type"] for one in seen if one["type"] == "content_block_start"]
    assert blocks == ["text", "tool_use"] and kinds.count("content_block_stop") == 2
    assert next(one for one in seen if one["type"] == "message_delta")["delta"]["stop_reason"] == "tool_use"
    parts = [one["delta"] for one in seen if one["type"] == "content_block_delta"]
    given = "".join(one["partial_json"] for one in parts if one["type"] == "input_json_delta")
    assert json.loads(given) == {"command": "git log"}
    said = told.prompt()
    assert all(
        text in said for text in ("You are Claude Code.", "Be brief.", "system-reminder", "make test", "1 failed")
    )


@pytest.mark.parametrize(
    ("headers", "turn"),
    [
        (CLAUDE_CODE, TurnHints(SESSION, keep_for=300)),
        (SUBAGENT, TurnHints(f"{SESSION}/agent-7", f"{SESSION}/main", keep_for=300)),
    ],
    ids=["main", "subagent"],
)
def test_claude_codes_session_is_that_of_its_headers(told: Talking, headers: dict[str, str], turn: TurnHints) -> None:
    told.text = "Done."
    events(f"{told.served.url}/v1/messages?beta=true", claude_code(MODEL, 32000), headers)
    assert told.request().turn == turn and told.request().is_plain


def test_codex_is_answered_with_a_call_in_its_thread(told: Talking) -> None:
    told.text = RUN % ("shell", '{"command": ["git", "log"]}')
    seen = events(f"{told.served.url}/v1/responses", codex(MODEL), CODEX)
    kinds = [one["type"] for one in seen]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    (call,) = (one for one in seen[-1]["response"]["output"] if one["type"] == "function_call")
    assert call["name"] == "shell" and json.loads(call["arguments"]) == {"command": ["git", "log"]}
    done = [one["item"]["call_id"] for one in seen if one["type"] == "response.output_item.done"]
    assert done == [call["call_id"]]
    assert told.request().turn == TurnHints(CODEX["thread-id"], CODEX["x-codex-parent-thread-id"])
    assert all(text in told.prompt() for text in ("You are Codex", "Ask before writes.", "<cwd>", "1 failed"))


@pytest.mark.parametrize("case", with_other_ids(MODEL))
def test_of_several_ids_one_is_the_session(told: Talking, case: str) -> None:
    path, body, headers, session = with_other_ids(MODEL)[case]
    told.text = "Done."
    events(f"{told.served.url}{path}", body, headers)
    assert (told.request().turn.session, told.request().run) == (session, session)
