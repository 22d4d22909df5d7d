"""The section `[engine.planner]`."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat

from kedge.settings.section import SettingsSection, Share


class PlannerSettings(SettingsSection):
    """What of a prompt is translated and what is computed."""

    section = "engine.planner"

    recompute_head: NonNegativeInt = 0
    """First tokens of every translated segment that are computed again."""
    pick_tail: NonNegativeInt = 5
    """Last tokens of every answer that an agent with a `pick` computes again, with the `trail` behind them; 0: none of
    either. An answer concludes there, and a moved one still holds what its author had read, which can tip the choice
    between answers that contradict each other."""
    recompute_short: NonNegativeInt = 4
    """Values of at most this many tokens are computed and never translated."""
    trail: NonNegativeInt = 2
    """Template tokens right behind a value that are kept and translated with it, because the model sums the value up
    in them. Behind an agent's answer this takes one more pass, so there it needs an `anchors.weak_error` of 1 or more
    or a criterion other than `error`."""
    surprise: PositiveFloat = 2.0
    """Nats by which the information of a token in an agent's answer exceeds the entropy of the distribution that it was
    drawn from, above which its readers compute it: a token against the odds is what nothing else in their prompts makes
    up for. Greedy answers have none; with `inf`, and on vLLM, none is computed."""
    recompute_tail: bool = False
    """Compute the whole last segment instead of only the last token."""
    min_translated: Share = 0.2
    """Share of the tokens without exact KV that must be translatable; below it the prompt is prefilled densely."""

    move: Literal["always", "unlearned", "never"] = "always"
    """When to move a value by rotation alone, without anchors, where its KV was computed in an agent's prompt (agents'
    answers, and what an agent reads right behind the beginning of its prompt); the template behind it is computed, or
    moved from the prompt of the run that computed it first. `always`: anchors serve other values, and templates longer
    than that is worth. `unlearned`: until its anchors are learned. `never`: before that the whole prompt is computed,
    as in the paper. On vLLM without lanes it is always `never`."""

    by_cost: bool = True
    """Compute what costs less to compute than to translate, as measured on this machine; else always translate."""
