"""The experts that a mixture chooses for tokens of translated and dense prompts, and what that does to the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import mean, stdev
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from kedge.engine.local.model.replica import random_model
from kedge.engine.local.scheduler import Work
from kedge.engine.local.sequence import BaseJob, RequestSequence, Sequence
from kedge.kv.segment import KVSegment
from kedge.types import GenerateRequest, RequestId, ReuseMode, Tokens
from tests.engine.local.model.test_architectures import BY_NAME, distribution, divergence, words
from tests.engine.local.test_translation import Driver, request

_topk = torch.topk


class Chosen(NamedTuple):
    """What `torch.topk` returns."""

    values: Tensor
    indices: Tensor


class ExpertChoices:
    """The experts that are chosen for each token of each sequence; a request can be made to choose as another has."""

    def __init__(self, driver: Driver) -> None:
        self.taken: dict[tuple[RequestId, int, int], frozenset[int]] = {}
        """By sequence, position and router"""
        self.margins: dict[tuple[RequestId, int, int], float] = {}
        """By how much the last one chosen is ahead of the first one that is not"""
        self.as_in: dict[RequestId, RequestId] = {}
        """Requests that choose what another one has chosen"""
        self.base_jobs: dict[RequestId, Tokens] = {}
        self.before_pass: Callable[[Work], None] = lambda _: None
        self._rows: list[tuple[Sequence, int]] = []
        modules = driver.runner.model.modules()
        self.routers = [one for one in modules if type(one).__name__.lower().endswith("topkrouter")]
        for number, router in enumerate(self.routers):
            self._watch(number, router)
        self._forward = driver.core._forward
        driver.core._forward = self._noted  # type: ignore[method-assign]

    def _noted(self, work: list[Work]) -> tuple[Tensor, ...]:
        for item in work:
            self.before_pass(item)
            if isinstance(item.sequence, BaseJob):
                self.base_jobs[item.sequence.key] = tuple(item.sequence.tokens)
        self._rows = [(item.sequence, at) for item in work for at in item.positions]
        return self._forward(work)

    def _watch(self, number: int, router: nn.Module) -> None:
        forward, experts, count = router.forward, router.weight.shape[0], router.top_k

        def topk(scores: Tensor, k: int, dim: int = -1, **kwargs: Any) -> Any:
            found = _topk(scores, k, dim, **kwargs)
            if scores.shape[-1] != experts or k != count or len(scores) != len(self._rows):
                return found  # of groups, or at load
            indices = self._choose(number, scores, found.indices)
            return Chosen(scores.gather(-1, indices), indices)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "topk", topk)
                return forward(*args, **kwargs)

        router.forward = watched

    def _choose(self, number: int, scores: Tensor, own: Tensor) -> Tensor:
        chosen, ordered = own.clone(), scores.sort(-1, descending=True).values
        for row, (sequence, at) in enumerate(self._rows):
            forced = self.taken.get((self.as_in.get(sequence.key, RequestId("")), at, number))
            if forced is not None:
                chosen[row] = torch.tensor(sorted(forced))
            key = (sequence.key, at, number)
            self.taken[key] = frozenset(chosen[row].tolist())
            self.margins[key] = float(ordered[row, own.shape[1] - 1] - ordered[row, own.shape[1]])
        return chosen

    def flips(self, one: RequestId, other: RequestId, positions: Iterable[int]) -> list[bool]:
        """Whether two sequences chose differently, for each router and each of the positions that both computed."""
        keys = [(at, n) for at in positions for n in range(len(self.routers)) if (one, at, n) in self.taken]
        return [self.taken[one, *key] != self.taken[other, *key] for key in keys if (other, *key) in self.taken]


@dataclass
class Findings:
    """What was found over all prompts."""

    tokens: list[float] = field(default_factory=list)
    """By random model: the KL of the first token from dense prefill"""
    questions: list[float] = field(default_factory=list)
    """By random model: the KL between two questions"""
    computed: list[bool] = field(default_factory=list)
    """Of tokens computed in translated prompts, by router: whether they chose other experts than in dense prefill"""
    last: list[bool] = field(default_factory=list)
    """Of the last tokens: whether any router chose other experts"""

    @property
    def mean(self) -> float:
        """The KL of the first token, in units of that between two questions."""
        return mean(self.tokens) / mean(self.questions)

    @property
    def deviation(self) -> float:
        """The standard error of that."""
        errors = [token / question for token, question in zip(self.tokens, self.questions, strict=True)]
        return stdev(errors) / len(errors) ** 0.5


@dataclass(frozen=True)
class Study:
    """What is done to the translated prompts of a model."""

    name: str
    changes: dict[str, object] = field(default_factory=dict)
    forced: bool = False
    """Whether tokens that are computed go to the experts that dense prefill has chosen for them"""
    share: float = 0.0
    """Share of the translated tokens that get the KV of dense prefill, as if they had been computed"""
    order: str = "thin"
    """Which: those whose choice was the closest when their base KV was computed, or `random` ones"""

    def run(self, models: int) -> Findings:
        findings = Findings()
        for seed in range(models):
            self._model(seed, findings)
        return findings

    def _model(self, seed: int, findings: Findings) -> None:
        one = BY_NAME[self.name]
        driver = Driver(random_model(replace(one, values={**one.values, **self.changes}).config(), seed))
        choices = ExpertChoices(driver)
        for i in range(6):
            values = words(50 + i, 35 - 3 * i), words(80 + i, 24 - i)
            driver.serve(request(*values, agent="critic", max_tokens=1))
            driver.serve(request(*values, max_tokens=1))
        of_token, questions = [], []
        for i in range(5):
            values = words(70 + i, 27), words(90 + i, 18)
            driver.serve(request(*values, agent="critic", max_tokens=1))  # leaves base KV behind
            asked = replace(request(*values, max_tokens=1), logprobs=264, request_id=RequestId(f"translated-{i}"))
            dense, real = driver.serve(replace(asked, reuse=ReuseMode.OFF, request_id=RequestId(f"dense-{i}")))
            if self.forced:
                choices.as_in[asked.request_id] = dense.key
            with self._some_computed(driver, choices, asked, real, seed):
                translated, _ = driver.serve(asked)
            assert translated.receipt().translated > 50
            of_token.append(divergence(dense, translated))
            questions.append(distribution(dense))
            self._note(findings, choices, translated, dense)
        findings.tokens.append(mean(of_token))
        pairs = zip(questions, questions[1:], strict=False)
        findings.questions.append(mean(float((q.exp() * (q - p)).sum()) for p, q in pairs))

    @staticmethod
    def _note(findings: Findings, choices: ExpertChoices, translated: RequestSequence, dense: RequestSequence) -> None:
        size = translated.request.prompt_tokens
        findings.computed += choices.flips(translated.key, dense.key, range(size))
        findings.last.append(any(choices.flips(translated.key, dense.key, [size - 1])))

    @contextmanager
    def _some_computed(
        self, driver: Driver, choices: ExpertChoices, asked: GenerateRequest, real: KVSegment, seed: int
    ) -> Iterator[None]:
        """Put dense prefill's KV in the place of a share of the translated tokens, before the prompt's first pass."""
        margins = _margins(choices, asked)
        count, shuffled = int(self.share * len(margins)), torch.Generator().manual_seed(seed)
        some = sorted(margins, key=margins.__getitem__)
        if self.order == "random":
            some = [some[at] for at in torch.randperm(len(some), generator=shuffled).tolist()]
        waiting = set(some[:count])

        def put(item: Work) -> None:
            while item.sequence.key == asked.request_id and waiting:
                at = waiting.pop()
                assert item.sequence.table is not None
                piece = real.slice(at, at + 1)
                nothing = KVSegment(torch.zeros_like(piece.keys[1:]), torch.zeros_like(piece.values[1:]))
                driver.core.parts.storage.write(item.sequence.table, at, piece, nothing)

        choices.before_pass = put
        yield
        choices.before_pass = lambda _: None


def _margins(choices: ExpertChoices, asked: GenerateRequest) -> dict[int, float]:
    """The closest choice of each token that can be translated, over all routers, when its base KV was computed; by
    position.
    """
    margins, start = {}, len(asked.segments[0].tokens)
    for segment in asked.segments[1:]:
        size = len(segment.tokens)
        margins |= dict.fromkeys(range(start, start + size), float("inf"))
        for key, tokens in choices.base_jobs.items():
            for begin in range(len(tokens) - size + 1):
                if tokens[begin : begin + size] == segment.tokens:
                    margins |= {start + at: _margin(choices, key, begin + at) for at in range(size)}
        start += size
    return margins


def _margin(choices: ExpertChoices, key: RequestId, at: int) -> float:
    known = [choices.margins[key, at, n] for n in range(len(choices.routers)) if (key, at, n) in choices.margins]
    return min(known, default=float("inf"))
