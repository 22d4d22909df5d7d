"""Whole requests of Claude Code and Codex, headers and bodies, as they reach `kedge serve`."""

from __future__ import annotations

import pytest

from kedge.types import TurnHints
from tests.coding_clients import CLAUDE_CODE, CODEX, SESSION, SUBAGENT, claude_code, codex, events, with_other_ids
from tests.server.talking import MODEL, Talking

RUN = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


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


def test_codexs_session_is_its_thread(told: Talking) -> None:
    told.text = "Done."
    events(f"{told.served.url}/v1/responses", codex(MODEL), CODEX)
    assert told.request().turn == TurnHints(CODEX["thread-id"], CODEX["x-codex-parent-thread-id"])


@pytest.mark.parametrize("case", with_other_ids(MODEL))
def test_of_several_ids_one_is_the_session(told: Talking, case: str) -> None:
    path, body, headers, session = with_other_ids(MODEL)[case]
    told.text = "Done."
    events(f"{told.served.url}{path}", body, headers)
    assert (told.request().turn.session, told.request().run) == (session, session)
