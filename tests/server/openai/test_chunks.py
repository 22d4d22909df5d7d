"""Chunks that are encoded around their text are the bytes that encoding them whole gives."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kedge.engine.echo import ByteTokenizer
from kedge.server.http import event
from kedge.server.openai.responses import ChatFormat, ChunkEncoder, CompletionFormat, Format
from kedge.types import GenerateRequest, TokenDelta

FORMS = (ChatFormat('model"\\é', ByteTokenizer()), CompletionFormat('model"\\é', ByteTokenizer()))
TEXTS = st.lists(st.text(st.characters(exclude_categories=())), min_size=1, max_size=4)


@given(texts=TEXTS, choice=st.integers(0, 3), fields=st.sampled_from([{}, {"usage": None}]))
def test_chunks_are_what_encoding_them_whole_gives(texts: list[str], choice: int, fields: dict[str, Any]) -> None:
    for form in FORMS:
        encoder, chunks = ChunkEncoder(form, **fields), _choices(form, choice, texts)
        assert [encoder.event(one) for one in chunks] == [event(form.chunk(one, **fields)) for one in chunks]


def _choices(form: Format, at: int, texts: list[str]) -> list[dict[str, Any]]:
    writer = form.writer(at, GenerateRequest(()))
    return [choice for text in texts for choice in writer.chunks(TokenDelta(text, (1,)))]
