"""Whole sessions of real clients: twenty turns with tools, images, a hang-up and a compaction.

The oracle is Transformers: every prompt has the tokens of its chat template's rendering of what the model is to read.
"""

import json
import re
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer

from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.echo import EchoEngine
from kedge.settings import ServerSettings
from kedge.types import Tokens
from tests.server.clients.histories import ClaudeCode, Client, Codex, OpenAiSdk, Overflow, ResponsesSdk
from tests.server.conftest import serving, wait_until
from tests.tokenizers_of_families import LLAMA_2, QWEN_3, SPECIALS, raw_of, tokenizer_of

LONG = "word " * 9000
SUMMARY = "This session is being continued. Summary: <think>\nthe user\n</think> likes </s> rain."


class Scripted(HFTokenizer):
    """A tokenizer of a family for prompts; answers are bytes, as an echo engine writes them."""

    vocab_size = 420

    def __init__(self, family: str, template: str) -> None:
        super().__init__(tokenizer_of(family, template).inner)
        self.eos_token_id, self.most = 257, 8192
        plain = json.loads(raw_of(family))
        self.texts = Tokenizer.from_str(json.dumps({**plain, "added_tokens": []}))

    def encode(self, text: str, **_: Any) -> Tokens:
        return tuple(text.encode())

    def transformers_own(self, read: list[dict[str, Any]], tools: Sequence[Any]) -> list[int]:
        """The tokens of a conversation, in which special tokens that somebody spells out are plain text."""
        known = {name: chr(0xE100 + at) for at, name in enumerate(SPECIALS)}
        given = json.dumps([read, tools], ensure_ascii=False)
        for name, mark in known.items():
            given = given.replace(name, mark)
        messages, offered = json.loads(given)
        whole = self.inner.apply_chat_template(messages, tools=offered, tokenize=False, add_generation_prompt=True)
        tokens: list[int] = []
        for piece in re.split("(" + "|".join(map(re.escape, SPECIALS)) + ")", whole):
            for name, mark in known.items():
                piece = piece.replace(mark, name)  # noqa: PLW2901
            tokens += [self.specials[piece]] if piece in self.specials else self.texts.encode(piece).ids
        return tokens


def played(client: Client, says: deque[str], after_each: Any) -> None:
    """Twenty turns, of which every other one answers the model's calls."""
    for turn in range(20):
        if turn == 12:
            client.say("user", LONG)
            with pytest.raises(Overflow):
                client.ask(stream=True)
            client.compact(SUMMARY)
        elif turn % 2:
            client.results([f"result {turn} <|im_end|>" for _ in client.made], image=turn == 3)
        else:
            client.say("user", f"Question {turn}.", image=turn == 6)
        if turn == 8:
            says.append("I was int" + "errupted " * 3000)
            assert client.abort().lstrip()[:1] == "I"
            wait_until(lambda: not client.served.engine.in_flight)
            client.say("user", "Go on.")
        if turn == 14:
            client.say("system", "Files have changed.")
        made = client.calls[: 1 + turn // 2 % 2] if turn % 2 == 0 else ()
        calls = (json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for name, given in made)
        text = f"I look {turn}." if made else f"<think>\nHm {turn}.\n</think>\n\nDone {turn}."
        says.append("\n".join([text, *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]))
        before = [dict(one) for one in client.read]
        client.ask(stream=bool(turn % 3))
        assert [(one.name, one.arguments) for one in client.made] == list(made)
        assert client.read[-1]["content"].strip() == text
        after_each(before)


def merged(read: list[dict[str, Any]], *, takes_turns: bool = False) -> list[dict[str, Any]]:
    """What is read by a template that takes one system message, at the beginning: roles then take turns."""
    if not takes_turns and not any(one["role"] == "system" for one in read[1:]):
        return read
    out: list[dict[str, Any]] = []
    for one in read:
        role = "user" if one["role"] == "system" and any(seen["role"] != "system" for seen in out) else one["role"]
        if role != "tool" and out and out[-1]["role"] == role and "tool_calls" not in out[-1]:
            out[-1] = {**one, "role": role, "content": f"{out[-1]['content']}\n\n{one['content']}"}
        else:
            out.append({**one, "role": role})
    return out


def told(read: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is read by a template without tools, whose roles take turns."""
    texts = []
    for one in merged(read):
        calls = (json.dumps(call["function"], ensure_ascii=False) for call in one.get("tool_calls", ()))
        role = "user" if one["role"] == "tool" else one["role"]
        texts.append({"role": role, "content": "\n".join(text for text in (one["content"], *calls) if text)})
    return merged(texts, takes_turns=True)


@pytest.mark.parametrize("kind", [ClaudeCode, Codex, ResponsesSdk, OpenAiSdk])
@pytest.mark.parametrize(
    ("family", "template", "form"),
    [("byte level", QWEN_3, merged), ("prepend", LLAMA_2, told)],
    ids=["Qwen 3", "Llama 2"],
)
def test_twenty_turns(kind: type[Client], family: str, template: str, form: Any) -> None:
    says, tokenizer = deque[str](), Scripted(family, template)
    engine = EchoEngine(lambda _: says.popleft())
    engine.tokenizer = tokenizer
    with engine, serving(engine, ServerSettings(tool_call_parser="hermes")) as served:
        client = kind(served)

        def check(read: list[dict[str, Any]]) -> None:
            tokens, own = served.engine.requests[-1].tokens, tokenizer.transformers_own(form(read), client.shown())
            assert list(tokens) == own, (tokenizer.inner.decode(tokens), tokenizer.inner.decode(own))

        played(client, says, check)
