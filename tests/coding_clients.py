"""Requests of Claude Code and Codex as they send them, written by hand in the form of their public protocols.

Each is the second turn of a session: the client asked, the model called a tool, and its result comes back.
"""

import json
from typing import Any

import httpx

SESSION = "3f6c2a9e-0b57-4a3d-9b1e-6a1f7f0c2d11"
EPHEMERAL = {"type": "ephemeral"}
CLAUDE_CODE = {
    "user-agent": "claude-cli/2.1.0 (external, cli)",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,fine-grained-tool-streaming-2025-05-14",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
    "x-claude-code-session-id": SESSION,
}
"""Headers of a session's main agent"""
SUBAGENT = {
    **CLAUDE_CODE,
    "x-claude-code-agent-id": "agent-7",
    "x-claude-code-parent-agent-id": "main",
}
CODEX = {
    "user-agent": "codex_cli_rs/0.50.0 (Linux; x86_64)",
    "originator": "codex_cli_rs",
    "accept": "text/event-stream",
    "thread-id": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "x-codex-parent-thread-id": "0199a213-0000-7800-8aa1-bbab2a035a53",
}
EARLIER_CODEX = {
    "user-agent": "codex_cli_rs/0.36.0 (Linux; x86_64)",
    "originator": "codex_cli_rs",
    "accept": "text/event-stream",
    "session_id": SESSION,
}
"""Headers of a version that has sessions and no threads"""
OTHER = "b4d1e7c2-5a60-4f19-8c33-9e0d2b7a6f54"
"""An id that is neither a session's nor a thread's"""


def claude_code(model: str, max_tokens: int, *, thinks: bool = True) -> dict[str, Any]:
    """The body of `POST /v1/messages?beta=true`; vLLM takes no budget for thinking without a reasoning parser."""
    reminder = "<system-reminder>The user's files may have changed.</system-reminder>"
    return {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": 1,
        "stream": True,
        "metadata": {"user_id": f"user_0f2a_account__session_{SESSION}"},
        "thinking": {"type": "enabled", "budget_tokens": 1024} if thinks else {"type": "disabled"},
        "system": [
            {"type": "text", "text": "You are Claude Code.", "cache_control": EPHEMERAL},
            {"type": "text", "text": "You help with software. Be brief.", "cache_control": EPHEMERAL},
        ],
        "tools": [
            {
                "name": "Bash",
                "description": "Runs a command.",
                "input_schema": {
                    "$schema": "http://json-schema.org/draft-07/schema#",
                    "type": "object",
                    "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
                    "required": ["command"],
                    "additionalProperties": False,
                },
            },
            {"name": "TodoWrite", "description": "Keeps a list.", "input_schema": {"type": "object", "properties": {}}},
        ],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": reminder}, {"type": "text", "text": "Why does the test fail?"}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I run it.", "signature": "EqQBCkYIBBgC"},
                    {"type": "text", "text": "I run the test."},
                    {"type": "tool_use", "id": "toolu_01A", "name": "Bash", "input": {"command": "make test"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_01A",
                        "is_error": True,
                        "content": [{"type": "text", "text": "1 failed"}],
                        "cache_control": EPHEMERAL,
                    }
                ],
            },
        ],
    }


def codex(model: str, *, encrypted: str | None = "gAAAA") -> dict[str, Any]:
    """The body of `POST /v1/responses`, with reasoning as the server has encrypted it; vLLM encrypts none."""
    context = "<environment_context><cwd>/repo</cwd><shell>bash</shell></environment_context>"
    return {
        "model": model,
        "instructions": "You are Codex, a coding agent. Be brief.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask before writes."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": context}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Why does it fail?"}]},
            {
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": "Running it."}],
                "content": None,
                "encrypted_content": encrypted,
            },
            {
                "type": "function_call",
                "name": "shell",
                "arguments": '{"command":["make","test"]}',
                "call_id": "call_1",
            },
            {"type": "function_call_output", "call_id": "call_1", "output": '{"output":"1 failed"}'},
        ],
        "tools": [
            {
                "type": "function",
                "name": "shell",
                "description": "Runs a command.",
                "strict": False,
                "parameters": {
                    "type": "object",
                    "properties": {"command": {"type": "array", "items": {"type": "string"}}},
                    "required": ["command"],
                    "additionalProperties": False,
                },
            }
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": CODEX["thread-id"],
    }


def with_other_ids(model: str) -> dict[str, tuple[str, dict[str, Any], dict[str, str], str]]:
    """Requests with one id in their bodies and another in their headers: path, body, headers, and the session."""
    claude = {**claude_code(model, 32000), "metadata": {"user_id": f"user_0f2a_account__session_{OTHER}"}}
    keyed, named = {**codex(model), "prompt_cache_key": OTHER}, {**codex(model), "session_id": OTHER}
    both = {**EARLIER_CODEX, "conversation_id": CODEX["thread-id"]}
    return {
        "claude code": ("/v1/messages", claude, CLAUDE_CODE, SESSION),
        "claude code without a header": ("/v1/messages", claude, {}, ""),
        "codex": ("/v1/responses", keyed, CODEX, CODEX["thread-id"]),
        "earlier codex": ("/v1/responses", keyed, EARLIER_CODEX, SESSION),
        "earlier codex with a conversation": ("/v1/responses", keyed, both, CODEX["thread-id"]),
        "codex without a header": ("/v1/responses", keyed, {}, ""),
        "a session in the body": ("/v1/responses", named, EARLIER_CODEX, OTHER),
    }


def events(url: str, body: dict[str, Any], headers: dict[str, str]) -> list[dict[str, Any]]:
    """The events with which a server answers a request that is streamed."""
    answer = httpx.post(url, json=body, headers=headers, timeout=300)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
