"""Log-probabilities against Transformers' own log-softmax."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedModel

from kedge.engine.common.logprobs import token_logprobs
from kedge.engine.common.tokenizer import Spelling
from kedge.types import TokenLogprob
from tests.engine.local.conftest import engine_of, tiny_model, tiny_tokenizer
from tests.engine.local.test_engine import prompt, request


def log_softmax(model: PreTrainedModel, tokens: tuple[int, ...]) -> Tensor:
    """[tokens, vocab] as Transformers computes it."""
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].float()
    model.set_attn_implementation("kedge")
    return logits.log_softmax(-1)


def agree(entries: tuple[TokenLogprob | None, ...], tokens: tuple[int, ...], expected: Tensor, top: int) -> None:
    """`entries` are those of `tokens` by rows of `expected`, with the `top` likeliest."""
    assert len(entries) == len(tokens)
    for entry, token, row in zip(entries, tokens, expected, strict=True):
        assert entry is not None and entry.token == token
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
        best = row.topk(top)
        assert [logprob for _, logprob in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [token for token, _ in entry.top] == best.indices.tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-sliding"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.7, "top_p": 0.8, "seed": 3}])
def test_answers_and_prompts_as_transformers_has_them(family: str, sampling: dict[str, float]) -> None:
    """Whatever the temperature: it is the model's distribution, not the sampler's."""
    model = tiny_model(family)
    lengths = (1, 5, 90, 600)
    asked = [replace(request(prompt(n, n), **sampling), logprobs=4, prompt_logprobs=3) for n in lengths]
    with engine_of(model, max_batch_tokens=400) as engine:
        done = [stream.result(60) for stream in [engine.submit(one) for one in asked]]
    for one, answer in zip(asked, done, strict=True):
        expected = log_softmax(model, one.tokens + answer.tokens)
        assert answer.prompt_logprobs[0] is None
        size = one.prompt_tokens
        agree(answer.prompt_logprobs[1:], one.tokens[1:], expected[: size - 1], 3)
        agree(answer.logprobs, answer.tokens, expected[size - 1 : -1], 4)


@given(st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=20), st.integers(0, 25), st.data())
def test_the_chosen_and_the_likeliest_agree_bit_for_bit(row: list[float], top: int, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(row) - 1))
    (entry,) = token_logprobs(torch.tensor([row]), [token], top)
    assert entry.logprob == pytest.approx(torch.tensor(row).log_softmax(-1)[token].item(), abs=1e-5)
    assert len(entry.top) == min(top, len(row))
    assert all(logprob == entry.logprob for other, logprob in entry.top if other == token)
    if top and row[token] == max(row):
        assert entry.logprob == entry.top[0][1]


def test_spelling_of_byte_level_tokens() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("<s>é ∆</s>")
    assert [tokenizer.token_bytes(token) for token in ids] == [
        b"<s>", b"\xc3", b"\xa9", b" ", b"\xe2", b"\x88", b"\x86", b"</s>",
    ]  # fmt: skip
    assert tokenizer.token_bytes(10**6) == b""


def test_spelling_of_tokens_with_marks_for_spaces_and_bytes() -> None:
    raw = Tokenizer(models.BPE(vocab={"\u2581ship": 0, "<0xE2>": 1, "é": 2, "<s>": 3}, merges=[]))
    raw.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    raw.add_special_tokens(["<s>"])
    assert [Spelling(raw)(token) for token in range(5)] == [b" ship", b"\xe2", "é".encode(), b"<s>", b""]
