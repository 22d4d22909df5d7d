"""Transformers' own `generate` up to its first token: the reference for dense prefill."""

from __future__ import annotations

import time
from functools import partial

import torch

from kedge.bench.shapes import random_llama
from kedge.engine.local import build
from kedge.types import Tokens


class ReferenceGenerate:
    """The model of `random_engine`, run by Transformers alone. Raises `ConfigError` for an unknown size."""

    def __init__(self, size: str, device: str) -> None:
        chosen = build.pick_device(device)
        dtype = torch.float32 if chosen.type == "cpu" else torch.bfloat16
        self._model = build.apart(partial(random_llama, size, chosen, dtype))

    def ttft_ms(self, prompt: Tokens) -> float:
        """Return milliseconds from the prompt to its first greedy token, on a thread of its own (`build.apart`)."""
        return build.apart(partial(self._time, prompt))

    def _time(self, prompt: Tokens) -> float:
        ids = torch.tensor([prompt], device=self._model.device)
        began = time.perf_counter()
        answer = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0
        )
        int(answer[0, -1])  # a GPU is done once a result has been read
        return (time.perf_counter() - began) * 1e3
