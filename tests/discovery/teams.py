"""A team of two agents as plain token prompts: a solver reads a question, a judge reads it and the solver's answer."""

from random import Random

from kedge.types import Tokens


def words(seed: object, count: int, vocab: int = 100_000) -> Tokens:
    """Tokens that only this seed has."""
    rng = Random(repr(seed))
    return tuple(rng.randrange(vocab) for _ in range(count))


def solver(question: Tokens, name: str = "team", vocab: int = 100_000) -> Tokens:
    """The solver's prompt."""
    return (*words((name, "solver"), 40, vocab), *question, *words((name, "now solve"), 5, vocab))


def judge(question: Tokens, answer: Tokens, name: str = "team", vocab: int = 100_000) -> Tokens:
    """The judge's prompt."""
    head, between = words((name, "judge"), 50, vocab), words((name, "solver says"), 6, vocab)
    return (*head, *question, *between, *answer, *words((name, "now judge"), 7, vocab))


def joined(answer: Tokens, vocab: int = 100_000) -> Tokens:
    """An answer as it stands behind a space, which the tokenizer has joined with its first token."""
    return ((answer[0] + 1) % vocab, *answer[1:])
