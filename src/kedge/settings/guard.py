"""The section `[engine.guard]`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from kedge.guard import GuardMode
from kedge.settings.section import SettingsSection, Share

OpenShare = Annotated[float, Field(gt=0, lt=1)]


class GuardSettings(SettingsSection):
    """How the quality of translation is watched while it serves, and when it is switched off."""

    section = "engine.guard"

    mode: GuardMode = GuardMode.ON
    """`on` stops translating what changes too many answers; `shadow` translates nothing and measures what would have
    changed; `off` does nothing. A workflow and an agent may say otherwise."""
    max_changed: OpenShare = 0.02
    """Highest share of an agent's translated calls whose answer may begin differently than with dense prefill."""
    alpha: OpenShare = 0.05
    """Probability with which an agent below that share is switched off all the same, over any number of looks."""
    canary_share: Share = 0.25
    """Share of translated calls that are also computed densely until an agent's share is known to be low enough."""
    share: Share = 0.05
    """The same share from then on."""
    budget: Share = 0.05
    """Tokens of such checks while requests run, as a share of the tokens that these compute. In idle time checks are
    free."""
    tokens: PositiveInt = 32
    """First tokens of an answer that are compared."""
    margin: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    """An answer counts as changed where dense prefill prefers another token by at least this factor: below it the two
    are as good as equal."""
    max_kl: PositiveFloat = 0.5
    """Divergence (nats) of the distributions of a compared token above which a single check makes an agent suspect."""
    sentinels: NonNegativeInt = 2
    """Translated tokens of every value that the model computes as well in an agent's first calls and in a random share
    of the others. Where they differ from what translation wrote by more than `max_sentinel_error` in the mean, the
    prompt is computed before its first token. In other calls of an agent whose values are translated whole, one token
    each of two values, which both have to be off. With 0, tokens that are computed anyway are not compared either."""
    max_sentinel_error: PositiveFloat = 0.5
    """Highest mean relative error of a call's such tokens: the norm of the difference over that of the computed keys or
    values. Of one token each of two values: the highest error of each, and half of their highest mean."""
    trials: PositiveInt = 8
    """Checks in a row without a change by which a suspect agent is translated again; four times as many after it was
    switched off, and twice as many every further time."""
    max_pending: PositiveInt = 16
    """Checks that may wait; beyond it the oldest is dropped."""
    max_agents: PositiveInt = 4096
    """Placeholders of agents that are watched at once; the one used longest ago starts anew."""
