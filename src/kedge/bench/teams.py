"""Teams of agents for the measurement under load, on the bundled model and on random weights, with their questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from kedge.bench.shapes import SHAPES, load_model, random_runner
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.local.model.runner import ModelRunner
from kedge.errors import ConfigError
from kedge.settings import AnchorSettings, EngineSettings, GuardSettings
from kedge.workflow.graph import Agent, Workflow
from kedge.workflow.topologies import Wording, connect, fully_connected
from kedge.workloads.miniature import TASKS, workflow

NANO = "nano"
LONG = "-long"
PREFIX, LEAD, TAIL = 512, 24, 16
"""Tokens of a random agent's own prefix, before each answer that it reads, and behind all of them."""
LEAD_IN, TRAIL = 4, 2
"""Tokens of the line before the question, and those with which everything behind a value begins."""
AGENTS = 5
SHARE_ALL = {"gamma": 2.0, "max_error": 1e9}
"""Thresholds that share everything: random weights have no meaning to keep. The criterion's work stays in the clock."""
OPEN = AnchorSettings(**SHARE_ALL, weak_error=1e9)
OPEN_GUARD = {"margin": 1e9, "max_kl": 1e9, "max_sentinel_error": 1e9}
"""Thresholds of a guard that finds nothing changed, for the same reason. Its checks stay in the clock."""

Questions = Callable[[str], Iterator[str]]
"""Client name -> its endless questions, the same on every call."""


@dataclass(frozen=True)
class LoadTeam:
    """A workflow with its model and its questions."""

    runner: ModelRunner
    tokenizer: HFTokenizer
    flow: Workflow
    questions: Questions
    anchors: AnchorSettings = AnchorSettings()
    guard: GuardSettings = GuardSettings()
    threads: int | None = None
    """Threads of one operation on a CPU; None is torch's default."""


@dataclass(frozen=True)
class TeamSizes:
    """Tokens of a random team's question and of each of its answers."""

    question: int
    answer: int


USUAL, LONG_QUESTION = TeamSizes(500, 64), TeamSizes(1000, 32)
"""The sizes of the cases with a random model."""


def case_names(model_size: str) -> tuple[str, ...]:
    """Return the names of the cases with a random model of this size."""
    return NANO, model_size, f"{model_size}{LONG}"


def team(case: str, model_size: str, device: str, seed: int) -> LoadTeam:
    """Return the team of a case. Raises `ConfigError` for an unknown case or size."""
    if case not in case_names(model_size):
        raise ConfigError("case", case, f"must be one of {', '.join(case_names(model_size))}")
    if case == NANO:
        return nano_team(device, seed)
    return random_team(model_size, LONG_QUESTION if case.endswith(LONG) else USUAL, device, seed)


def nano_team(device: str, seed: int) -> LoadTeam:
    """Return the math team of the bundled model, on one thread: the model is too small for two."""
    runner, tokenizer = load_model(None, EngineSettings(device=device))
    return LoadTeam(runner, tokenizer, workflow(TASKS["math"]), nano_questions(seed), threads=1)


def nano_questions(seed: int) -> Questions:
    """Return the questions of the math team."""
    return partial(_word_problems, seed)


def random_team(model_size: str, shape: TeamSizes, device: str, seed: int) -> LoadTeam:
    """Return five agents around random weights, whose prompts and answers have exactly the given sizes."""
    runner, _ = random_runner(model_size, device)
    runner.eos_token_ids = frozenset()
    vocab = SHAPES[model_size]["vocab_size"]
    questions = random_questions(vocab, shape, seed)
    return LoadTeam(
        runner, word_tokenizer(vocab), random_flow(vocab, shape.answer), questions, OPEN, GuardSettings(**OPEN_GUARD)
    )


def random_questions(vocab: int, shape: TeamSizes, seed: int) -> Questions:
    """Return questions of exactly the given size."""
    return partial(_words, vocab, shape, seed)


def word_tokenizer(vocab: int) -> HFTokenizer:
    """Return a tokenizer of `vocab` words: one token per word, 0 for an unknown word."""
    raw = Tokenizer(WordLevel({_word(token): token for token in range(vocab)}, unk_token=_word(0)))
    raw.pre_tokenizer = WhitespaceSplit()
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=raw))


def random_flow(vocab: int, answer: int) -> Workflow:
    """Return a workflow in which every agent reads the question and all answers before its own."""
    rng = Random("load/templates")
    trail, base_context = _text(rng, vocab, TRAIL), _text(rng, vocab, LEAD_IN)
    wording = Wording(
        header=f"{base_context} {{user_question}} ",
        intro="",
        speaker=f" {trail} {_text(rng, vocab, LEAD - TRAIL - 1)} {{title}} ",
        footer=f" {trail} {_text(rng, vocab, TAIL - TRAIL - 1)} {{title}}",
    )
    agents = [
        Agent(f"agent-{i}", _text(rng, vocab, PREFIX - LEAD_IN), "", title=_text(rng, vocab, 1), max_tokens=answer)
        for i in range(AGENTS)
    ]
    return connect("load", agents, fully_connected(agents), wording)


def _word_problems(seed: int, client: str) -> Iterator[str]:
    rng = Random(f"load/{seed}/{client}")
    return (question.text for question in TASKS["math"].questions("test", rng.getrandbits(64)))


def _words(vocab: int, shape: TeamSizes, seed: int, client: str) -> Iterator[str]:
    rng = Random(f"load/{seed}/{client}")
    while True:
        yield _text(rng, vocab, shape.question)


def _text(rng: Random, vocab: int, size: int) -> str:
    return " ".join(_word(rng.randrange(vocab)) for _ in range(size))


def _word(token: int) -> str:
    return f"w{token}"
