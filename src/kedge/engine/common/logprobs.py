"""Log-probabilities of tokens: of the model's own distribution, before temperature and top-p."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kedge.types import GenerateRequest, TokenLogprob

LOGIT_ROWS = 256
"""Rows of logits that one pass computes for prompts whose log-probabilities are asked for. With a vocabulary of
150,000 they take 154 MB as float32; all rows of a long prompt would take gigabytes."""


class Logprobs:
    """Those of one request, as they come. It asks for none where the request does not."""

    def __init__(self, request: GenerateRequest) -> None:
        self._top, self._prompt_top = request.logprobs, request.prompt_logprobs
        self._prompt = request.tokens if self.of_prompt else ()
        self.prompt: list[TokenLogprob | None] = [None] if self.of_prompt else []
        self.answer: list[TokenLogprob] = []
        self._told_prompt = self._told_answer = 0

    @property
    def of_prompt(self) -> bool:
        return self._prompt_top is not None

    def read_prompt(self, positions: Sequence[int], logits: Tensor) -> None:
        """Logits [positions, vocab] after these neighbouring positions; what they say of the prompt is noted.

        It takes the place of what was noted of these positions and those behind them: after a request has stepped
        aside its prompt is read again.
        """
        following = self._prompt[positions[0] + 1 : positions[-1] + 2]
        if self._prompt_top is not None and following:
            noted = token_logprobs(logits[: len(following)], following, self._prompt_top)
            self.prompt[positions[0] + 1 :] = noted

    def read_answer(self, token: int, logits: Tensor) -> None:
        """`token` was drawn from logits [vocab]."""
        if self._top is not None:
            self.answer += token_logprobs(logits[None], (token,), self._top)

    def news(self) -> tuple[tuple[TokenLogprob, ...], tuple[TokenLogprob | None, ...]]:
        """Return what nobody has been told yet: of the answer, of the prompt."""
        answer, prompt = self.answer[self._told_answer :], self.prompt[self._told_prompt :]
        self._told_answer, self._told_prompt = len(self.answer), len(self.prompt)
        return tuple(answer), tuple(prompt)


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Return what logits [tokens, vocab] say of `tokens`, and of the `top` likeliest in their places.

    A token that is among the likeliest has the same number in both places, bit for bit.
    """
    total = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(-1, torch.tensor(tokens, device=logits.device)[:, None]) - total
    best, ids = logits.topk(min(top, logits.shape[-1]), dim=-1)
    rows = zip(tokens, chosen[:, 0].tolist(), ids.tolist(), (best - total).tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, tuple(zip(best_ids, best_logprobs, strict=True)))
        for token, logprob, best_ids, best_logprobs in rows
    ]
