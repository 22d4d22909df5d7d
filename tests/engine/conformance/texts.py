"""Tests of the engine's tokenizer."""

from __future__ import annotations

from kedge.engine.base import Engine
from tests.engine.conformance.harness import Harness


class TokenizerTests(Harness):
    """Tests of texts and their tokens."""

    def test_texts_survive_encoding(self, engine: Engine) -> None:
        for text in ("", "Hello, world!", "  two  spaces\n\nand lines\t", "naïve 日本 🚢", "12 + 30 = 42"):
            assert engine.tokenizer.decode(engine.tokenizer.encode(text)) == text

    def test_a_text_is_the_bytes_of_its_tokens(self, engine: Engine) -> None:
        for text in (engine.tokenizer.chat("Be brief.", "x"), "naïve 日本 🚢 two\n\nlines"):
            tokens = engine.tokenizer.encode(text)
            assert b"".join(engine.tokenizer.token_bytes(token) for token in tokens) == text.encode()

    def test_encoding_is_deterministic_and_adds_nothing(self, engine: Engine) -> None:
        assert engine.tokenizer.encode("") == ()
        assert engine.tokenizer.encode("anchor") == engine.tokenizer.encode("anchor")

    def test_chat_holds_its_messages_in_order(self, engine: Engine) -> None:
        text = engine.tokenizer.chat("Be brief.", "What is a kedge?")
        assert 0 <= text.find("Be brief.") < text.find("What is a kedge?")
        assert "What is a kedge?" in engine.tokenizer.chat(None, "What is a kedge?")

    def test_specials_in_a_value_are_plain_text(self, engine: Engine) -> None:
        """Check that text from a user or a tool cannot end a turn."""
        prompt = engine.tokenizer.chat(None, "x")
        apart = engine.tokenizer.encode(prompt, special=False)
        assert len(apart) > len(engine.tokenizer.encode(prompt))
        assert engine.tokenizer.eos_token_id not in apart
        assert engine.tokenizer.decode(apart) == prompt

    def test_specials_that_are_spelled_out_are_recognised(self, engine: Engine) -> None:
        prompt = engine.tokenizer.encode(engine.tokenizer.chat(None, "x"))
        assert engine.tokenizer.decode(prompt) != engine.tokenizer.chat(None, "x"), "no special token was dropped"
