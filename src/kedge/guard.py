"""The words of the quality guard: modes, states, what it orders for a request, and what a receipt says of it."""

from dataclasses import dataclass
from enum import StrEnum

EVERYTHING = "*"
"""The name that stands for all placeholders of a request"""


class GuardMode(StrEnum):
    """How far the guard acts on requests that may be translated."""

    OFF = "off"
    """It does nothing: what the planner finds shareable is translated."""
    SHADOW = "shadow"
    """Nothing is translated; what translation would have answered is measured."""
    ON = "on"
    """What has been shown to change too many answers is not translated."""


class DecisionKind(StrEnum):
    """What of two answers to one prompt is compared."""

    FAR = "far"
    """Whether the distributions of the first tokens are far apart in the mean"""
    CALL = "call"
    """Which function the answer begins by calling, or that it is prose"""
    PICK = "pick"
    """What the answer picks, of agents for which it is known what stands before a pick"""


class GuardState(StrEnum):
    """How far the translation of a placeholder in an agent's prompts is trusted."""

    SHADOW = "shadow"
    """Not translated: not proved yet, or answers changed and it has to earn its way back."""
    CANARY = "canary"
    """Translated: whether decisions change is not known well enough yet."""
    ON = "on"
    """Translated, and the share of changed decisions is below the limit with the chosen confidence."""


@dataclass(frozen=True, slots=True)
class GuardOrders:
    """What the guard orders for one request."""

    mode: GuardMode | None = None
    """The mode that the workflow or its agent asks for; None: as the engine's settings say"""
    withheld: frozenset[str] = frozenset()
    """Placeholders that are computed, whatever the anchors predict; `EVERYTHING` for all"""
    epoch: int = 0
    """Number of times that the agent's anchors were discarded: those of an earlier epoch are not used"""
    fidelity: float | None = None
    """Highest mean divergence (KL) from dense prefill, in nats a token; None: as the engine's settings say"""
    rung: int | None = None
    """How it is translated, a place in `kedge.reuse.guard.fidelity.RUNGS`; None: as the engine's settings say"""
    recheck: str = ""
    """A placeholder that a check translates, also where the cache has the exact KV of the call that it checks;
    `EVERYTHING` for all"""
    held_out: bool = False
    """Whether it teaches nothing, and is estimated without anchors that equal its values: a check that was estimated
    from what the call has taught would always be clean"""
    sentinels: int = 0
    """Translated tokens of each `watched` value that are computed as well, to compare the two. 0: of no value is
    translated KV compared with computed KV, also not of the tokens that are computed anyway"""
    watched: frozenset[str] = frozenset()
    """Placeholders whose values have such tokens in this request"""
    pick: str = ""
    """The text before what the agent picks in its answers, see `kedge.decisions.pick_of`; "": nothing in them is known
    to be a pick"""

    def withholds(self, placeholder: str) -> bool:
        """Return whether a placeholder must be computed."""
        return EVERYTHING in self.withheld or placeholder in self.withheld


@dataclass(frozen=True, slots=True)
class FidelityNote:
    """How far an agent's translated answers are from dense prefill, in nats a token (KL)."""

    budget: float
    """Highest mean that is allowed"""
    rung: str
    """How the agent is translated; "": not at all, until something is proved"""
    mean: float | None
    """As measured on that rung; None where nothing serves"""
    bound: float | None
    """Upper confidence bound of the mean"""
    checks: int
    """Calls that were compared on that rung, or on the one that was compared most"""
    curve: tuple[tuple[str, float, float], ...] = ()
    """All rungs that were compared: name, mean divergence, share of the prompt that was computed"""


@dataclass(frozen=True, slots=True)
class GuardNote:
    """The state of one placeholder in an agent's prompts, with its evidence."""

    placeholder: str
    state: GuardState
    checks: int
    """Calls that were served both ways and compared"""
    changed: int
    """Of these, calls with another decision"""
    bound: float
    """Upper confidence bound of the share of calls with another decision"""
