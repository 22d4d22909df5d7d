"""KV of the same tokens in several contexts, by dense prefill."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from torch import Tensor

from benchmarks.lab.methods import method_named, open_engine
from benchmarks.lab.probe import Probe
from benchmarks.studies.study import StudySettings
from kedge.bench.shapes import load_model
from kedge.errors import ConfigError
from kedge.kv.segment import KVSegment
from kedge.settings import EngineSettings
from kedge.types import GenerateRequest, ReuseMode, SamplingParams, Segment, Tokens


class Contexts:
    """A model that prefills given tokens in given contexts. A context manager."""

    def __init__(self, settings: StudySettings) -> None:
        loaded = load_model(settings.model, EngineSettings())
        self.embeddings: Tensor = loaded[0].model.get_input_embeddings().weight.detach().float().cpu()
        """float32 [vocab, hidden]"""
        self.special: frozenset[int] = frozenset(loaded[1].inner.all_special_ids)
        dense = method_named("dense")
        self._probe = Probe(dense.components)
        self._engine = open_engine(dense, loaded, components=self._probe.components)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.close()

    def encode(self, text: str) -> Tokens:
        """Return the token ids of a text, with the tokens that begin a prompt."""
        return self._engine.tokenizer.encode(text)

    def start(self) -> Tokens:
        """Return the shortest possible context: the tokens that begin a prompt, else a line break."""
        return self.encode("") or self._engine.tokenizer.encode("\n", special=False)

    def bare(self, text: str) -> Tokens:
        """Return the token ids of a text alone."""
        return self._engine.tokenizer.encode(text, special=False)

    def kv(self, before: Tokens, tokens: Tokens) -> KVSegment:
        """Return the KV of `tokens` behind `before`, keys unrotated, float32 on the CPU. Raises `ConfigError` for an
        empty context.
        """
        if not before:
            raise ConfigError("before", before, "must not be empty: the first token of a prompt has no context")
        segments = (Segment(before, "p0"), Segment(tokens, "p1"))
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        seen = self._probe.submit(self._engine, GenerateRequest(segments, sampling, ReuseMode.OFF), kv=True).result()
        assert seen.kv is not None
        kept = seen.kv.slice(len(before))
        return KVSegment(kept.keys.float().cpu(), kept.values.float().cpu())
