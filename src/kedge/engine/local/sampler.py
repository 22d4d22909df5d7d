"""Drawing the next tokens of a pass: one batched operation for all of its requests."""

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field

import numpy as np
import torch
from torch import Tensor

from kedge.engine.common.grammars import GrammarState
from kedge.errors import InvalidGrammar
from kedge.types import SamplingParams, Tokens

Draw = Callable[[Tensor], int]
"""A function that draws a request's next token from logits [vocab]; called by the engine's thread for every token"""


@dataclass(slots=True)
class ForcedAnswer:
    """An answer that a request gives whatever the logits are (teacher forcing), and what these were. Its first token is
    drawn like any other; the others follow in one pass.
    """

    tokens: Tokens
    """At least one"""
    rows: int
    """Of how many of its first tokens the logits are kept"""
    logits: dict[int, Tensor] = field(default_factory=dict)
    """The logits [vocab] that each of these would have been drawn from, by its place, float32 on the CPU"""

    def __call__(self, logits: Tensor) -> int:
        self.logits[0] = logits.float().cpu().clone()
        return self.tokens[0]

    def read(self, place: int, rows: Tensor) -> Tensor:
        """Record logits [rows, vocab]. The first row is after `place` tokens of the answer; negative: before it begins.
        Returns the rows that a token of the answer follows.
        """
        first, stop = max(0, -place), max(0, len(self.tokens) - place)
        kept = rows[first : min(stop, max(0, self.rows - place))].float().cpu()
        self.logits |= dict(enumerate(kept, place + first))
        return rows[first:stop]


@dataclass(slots=True)
class Sampler:
    """The sampling of one request. Seeded requests repeat exactly, whatever runs beside them."""

    params: SamplingParams
    draw: Draw | None = None
    """Replaces `params`: it gets all logits and may force an answer."""
    grammar: GrammarState | None = None
    """What the answer conforms to, and how far it has come"""
    prompt: InitVar[Sequence[int]] = ()
    answer: list[int] = field(default_factory=list)
    """The tokens drawn so far, where penalties need them"""
    generator: torch.Generator | None = None
    seen: Tensor = field(init=False)
    """The tokens of the prompt, where penalties need them"""

    def __post_init__(self, prompt: Sequence[int]) -> None:
        self.seen = torch.tensor(prompt if self.penalises else (), dtype=torch.long).unique()
        if not self.is_greedy:
            self.generator = torch.Generator()
            if self.params.seed is None:
                self.generator.seed()
            else:
                self.generator.manual_seed(self.params.seed)

    @property
    def penalises(self) -> bool:
        """Whether tokens that occurred are less likely to come again."""
        one = self.params
        return self.draw is None and (one.repetition_penalty, one.presence_penalty, one.frequency_penalty) != (1, 0, 0)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.draw is not None or not self.params.temperature

    def __call__(self, logits: Tensor) -> int:
        """Draw one token from logits [vocab]. Raises the error that `draw_tokens` would return."""
        token = draw_tokens(logits[None], [self])[0]
        if isinstance(token, Exception):
            raise token
        return token


def draw_tokens(logits: Tensor, samplers: Sequence[Sampler]) -> list[int | Exception]:
    """Draw the next token of every request from logits [requests, vocab]; tokens that its grammar forbids become -inf.

    An entry is an error where a request's logits are not finite, its grammar or its own `draw` raised, or `draw`
    returned no valid token.
    """
    _penalise(logits, samplers)
    failed = _forbid(logits, samplers)
    best, tokens = logits.max(-1)
    sampled = [row for row, sampler in enumerate(samplers) if not sampler.is_greedy]
    if sampled:
        tokens[sampled] = _sample(logits[sampled], [samplers[row] for row in sampled])
    drawn: list[int | Exception] = list(tokens.tolist())
    for row in (~torch.isfinite(best)).nonzero().flatten().tolist():
        drawn[row] = ArithmeticError("its logits are not finite")
    for row, sampler in enumerate(samplers):
        if sampler.draw is not None:
            drawn[row] = _drawn(sampler.draw, logits[row])
    for row, error in failed.items():
        drawn[row] = error
    for row, (sampler, token) in enumerate(zip(samplers, drawn, strict=True)):
        if sampler.grammar is not None and not isinstance(token, Exception):
            try:
                sampler.grammar.take(token)
            except InvalidGrammar as error:  # it is not allowed
                drawn[row] = error
        if sampler.penalises and not isinstance(token, Exception):
            sampler.answer.append(token)
    return drawn


def _penalise(logits: Tensor, samplers: Sequence[Sampler]) -> None:
    """Lower the logits of tokens that occurred, as their requests ask for."""
    for row, sampler in enumerate(samplers):
        if sampler.penalises:
            params, answer = sampler.params, torch.tensor(sampler.answer, dtype=torch.long)
            seen, factor = torch.cat([sampler.seen, answer]).to(logits.device), params.repetition_penalty
            logits[row, seen] = torch.where((old := logits[row, seen]) > 0, old / factor, old * factor)
            tokens, counts = answer.unique(return_counts=True)  # on the CPU, as `unique` would synchronize with a GPU
            lower = params.frequency_penalty * counts + params.presence_penalty
            logits[row, tokens.to(logits.device)] -= lower.to(logits)


def _forbid(logits: Tensor, samplers: Sequence[Sampler]) -> dict[int, Exception]:
    """Set logits of tokens that a grammar forbids to -inf. Returns the errors by row."""
    failed: dict[int, Exception] = {}
    for row, sampler in enumerate(samplers):
        if sampler.grammar is not None:
            try:
                mask = np.frombuffer(sampler.grammar.allowed(), np.uint8)
            except InvalidGrammar as error:
                failed[row] = error
            else:
                allowed = torch.from_numpy(np.unpackbits(mask, count=logits.shape[-1], bitorder="little")).bool()
                logits[row].masked_fill_(~allowed.to(logits.device), -torch.inf)
    return failed


def _sample(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """Draw tokens [requests] by inverting the cumulative distribution of each row at a random number of its own."""
    temperature = torch.tensor([s.params.temperature for s in samplers], dtype=torch.float64, device=logits.device)
    weights = torch.softmax((logits.double() - logits.amax(-1, keepdim=True)) / temperature[:, None], dim=-1)
    if any((s.params.top_p, s.params.top_k, s.params.min_p) != (1, 0, 0) for s in samplers):
        many = logits.shape[-1]
        limits = [(s.params.top_p, s.params.top_k or many, s.params.min_p) for s in samplers]
        top_p, top_k, min_p = torch.tensor(limits, dtype=torch.float64, device=logits.device).T[:, :, None]
        ordered, order = weights.sort(descending=True)
        ordered[ordered < min_p * ordered[:, :1]] = 0.0
        ordered[torch.arange(many, device=logits.device) >= top_k] = 0.0
        before = (ordered.cumsum(-1) - ordered) / ordered.sum(-1, keepdim=True)
        dropped = before >= top_p  # all but the fewest that sum to it
        dropped[:, 0] = False
        weights = weights.scatter(-1, order, ordered.masked_fill(dropped, 0.0))
    cumulative = weights.cumsum(-1)
    uniform = torch.cat([torch.rand(1, generator=one.generator, dtype=torch.float64) for one in samplers])
    at = uniform.to(logits.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, at, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)


def _drawn(draw: Draw, logits: Tensor) -> int | Exception:
    """Call a request's own `draw`; return any error it raises, so that it ends this request only."""
    try:
        token = draw(logits)
    except Exception as error:  # foreign code
        return error
    except BaseException as error:  # such as `SystemExit`: it ends this request, not the engine
        return RuntimeError(f"draw raised {error!r}")
    if type(token) is not int or not 0 <= token < len(logits):
        return ValueError(f"draw returned {token!r}, not a token id below {len(logits)}")
    return token
