"""Conflicting roles: short texts that two roles read to opposite ends, each with a gold answer of its own.

Answers are picks that a grammar constrains; they begin with words of the role, without which a model of 135 M
parameters is hardly better than chance.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kedge.errors import ConfigError
from kedge.types import AgentId
from kedge.workflow.graph import Agent, Workflow
from kedge.workloads.base import QUESTION, Question

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
WARES = ("bicycle", "sofa", "camera", "piano", "boat", "tent", "guitar", "laptop", "desk", "van", "lamp", "fridge")
PLANS = ("a tram line", "a new school", "a swimming pool", "a market hall", "a wind farm", "a bridge", "a car park",
         "a library", "a night bus", "a stadium")  # fmt: skip
TOPICS = ("noise", "cost", "jobs", "traffic", "health", "safety", "beauty", "water", "energy", "trees", "dust",
          "taxes", "smell", "tourism", "sport", "parking")  # fmt: skip
THINGS = ("key", "ball", "letter", "coin", "ring", "book", "lamp", "cup", "phone", "watch", "map", "photo")
PLACES = ("box", "drawer", "basket", "cupboard", "bag", "pocket", "jar", "shelf")
Made = tuple[str, tuple[str, str], str]
"""A text, the gold of each role, and an option that is right for neither."""


@dataclass(frozen=True)
class Role:
    """One of two readers: its system prompt, and what its answers begin with."""

    name: str
    system: str
    says: str


@dataclass(frozen=True)
class RoleTask:
    """Two roles and the texts that they read. A text is all of the user's message."""

    name: str
    roles: tuple[Role, Role]
    generate: Callable[[random.Random], Made] = field(repr=False)
    chance: float = 1 / 3

    def questions(self, seed: int) -> Iterator[Question]:
        """Yield questions without end, no text twice."""
        rng, seen = random.Random(f"{self.name}/{seed}"), set[str]()
        while True:
            text, golds, neither = self.generate(rng)
            if text not in seen:
                seen.add(text)
                by_role = {role.name: gold for role, gold in zip(self.roles, golds, strict=True)}
                yield Question(text, golds[0], {"golds": by_role, "options": sorted((*golds, neither))})

    def workflow(self, roles: Iterable[Role]) -> Workflow:
        """Return a workflow of these roles; none reads another's answer."""
        agents = (Agent(role.name, role.system, f"{{{QUESTION}}}") for role in roles)
        return Workflow(self.name, tuple(agents), (QUESTION,))

    def grammar(self, agent: AgentId, question: Question) -> str:
        """Return the grammar of a role's answer."""
        begins = next(role.says for role in self.roles if role.name == agent)
        return f"start: {' | '.join(json.dumps(f'{begins} {option}') for option in question.facts['options'])}"

    def right(self, agent: AgentId, answer: str, question: Question) -> bool:
        """Return whether a role has picked what is right for it."""
        return answer.split()[-1:] == [question.facts["golds"][agent]]


def _listing(rng: random.Random) -> Made:
    buyer, seller, driver = rng.sample(DAYS, 3)
    wishes = [f"The buyer wants {buyer}.", f"The seller wants {seller}.", f"The driver wants {driver}."]
    text = f"A used {rng.choice(WARES)} is for sale. On which day is it handed over? {_mixed(rng, wishes)}"
    return text, (buyer, seller), driver


def _debate(rng: random.Random) -> Made:
    pro, con, other = rng.sample(TOPICS, 3)
    voices = [f"Supporters speak of {pro}.", f"Opponents speak of {con}.", f"Reporters speak of {other}."]
    return f"The town votes about {rng.choice(PLANS)}. {_mixed(rng, voices)}", (pro, con), other


def _absence(rng: random.Random) -> Made:
    thing, (before, after, empty) = rng.choice(THINGS), rng.sample(PLACES, 3)
    text = (
        f"First the {thing} is in the {before}, as the host and the guest see. Then the guest leaves. "
        f"Later the host puts the {thing} into the {after}. The {empty} stays empty."
    )
    return text, (after, before), empty


def _mixed(rng: random.Random, sentences: list[str]) -> str:
    return " ".join(rng.sample(sentences, len(sentences)))


_ALL = (
    RoleTask(
        "listing",
        (
            Role("buyer", "You are the buyer. You say what the buyer wants.", "The buyer wants"),
            Role("seller", "You are the seller. You say what the seller wants.", "The seller wants"),
        ),
        _listing,
    ),
    RoleTask(
        "debate",
        (
            Role("supporter", "You are one of the supporters. You say what the supporters say.", "Supporters speak of"),
            Role("opponent", "You are one of the opponents. You say what the opponents say.", "Opponents speak of"),
        ),
        _debate,
    ),
    RoleTask(
        "absence",
        (
            Role("host", "You are the host. You stayed to the end.", "Later the host puts it into the"),
            Role("guest", "You are the guest. You left early.", "First it is in the"),
        ),
        _absence,
    ),
)
TASKS: Mapping[str, RoleTask] = {task.name: task for task in _ALL}


def task_named(name: str) -> RoleTask:
    """Return the task of this name. Raises `ConfigError` for an unknown one."""
    if name not in TASKS:
        raise ConfigError("task", name, f"must be one of {', '.join(TASKS)}")
    return TASKS[name]
