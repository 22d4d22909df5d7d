"""Log-probabilities of tokens: of the model's own distribution, before temperature and top-p."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kedge.types import TokenLogprob

LOGIT_ROWS = 256
"""Maximum rows of logits in one pass for prompts with log-probabilities: 154 MB as float32 with a vocabulary of
150,000.
"""


class Logprobs:
    """The log-probabilities of one request, as they become known; empty where the request does not ask for them."""

    def __init__(
        self,
        top: int | None = None,
        prompt_top: int | None = None,
        prompt: Sequence[int] = (),
        first: int | None = None,
    ) -> None:
        """Begin without tokens. `top` and `prompt_top` are as requests have them; of an answer only the `first` tokens
        count, unless that is None.
        """
        self._first, self._top, self._prompt_top = first, top, prompt_top
        self._prompt = tuple(prompt) if self.of_prompt else ()
        self.prompt: list[TokenLogprob | None] = [None] if self.of_prompt else []
        self.answer: list[TokenLogprob] = []
        self._told_prompt = self._told_answer = 0

    @property
    def of_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are asked for."""
        return self._prompt_top is not None

    def read_prompt(self, positions: Sequence[int], logits: Tensor) -> None:
        """Record the prompt's log-probabilities from logits [positions, vocab] after these neighbouring positions.

        This replaces what was recorded for these positions and later ones: a preempted request reads its prompt again.
        """
        following = self._prompt[positions[0] + 1 : positions[-1] + 2]
        if self._prompt_top is not None and following:
            noted = token_logprobs(logits[: len(following)], following, self._prompt_top)
            self.prompt[positions[0] + 1 :] = noted

    def read_answer(self, token: int, logits: Tensor) -> None:
        """Record the log-probability of `token`, drawn from logits [vocab]."""
        if self._top is not None and (self._first is None or len(self.answer) < self._first):
            self.answer += token_logprobs(logits[None], (token,), self._top)

    def news(self) -> tuple[tuple[TokenLogprob, ...], tuple[TokenLogprob | None, ...]]:
        """Return the log-probabilities since the last call: of the answer, and of the prompt."""
        answer, prompt = self.answer[self._told_answer :], self.prompt[self._told_prompt :]
        self._told_answer, self._told_prompt = len(self.answer), len(self.prompt)
        return tuple(answer), tuple(prompt)


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Return the log-probabilities of `tokens` from logits [tokens, vocab], each with the `top` likeliest alternatives.

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
