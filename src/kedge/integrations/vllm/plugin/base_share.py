"""How much of a step base prefills may take beside requests: a share of its time, and little of a prefill's."""

from __future__ import annotations

from kedge.policies.active_runs import StepTimes

PATIENCE = 8
"""Steps with prefills in a row without base prefills; the next one has its share of them"""


class BaseShare:
    """The tokens that base prefills may take of a step that computes something for requests.

    A first token does not wait for base KV that is for later requests, so steps with prefills are passed over; a few at
    a time, as under load there may be no others.
    """

    def __init__(self, share: float, times: StepTimes) -> None:
        """`share` is the part of a step's time, `times` what steps take."""
        self._share, self._times, self._passed = share, times, 0

    def tokens(self, prefill: int, most: int) -> int:
        """Return the tokens for base prefills in a step with so many tokens of prefills, at most `most`."""
        if prefill and self._passed < PATIENCE:
            self._passed += 1
            return 0
        self._passed = 0
        if not self._times.are_known or self._share == 1:
            return int(most * self._share)
        own = self._times.decode / self._times.per_token + prefill
        return min(most, int(own * self._share / (1 - self._share)))
