"""Whether loading beats recomputing, from what both cost on this machine (KVFlow, section 3.2)."""

from __future__ import annotations

_WEIGHT = 0.2
"""Share of a new observation in a moving estimate."""


class UnitCost:
    """A moving average of seconds per unit; None until something has been observed."""

    def __init__(self) -> None:
        self.seconds_per_unit: float | None = None

    def observe(self, units: int, seconds: float) -> None:
        """Learn that `units` took `seconds`; zero of either is ignored."""
        if units > 0 and seconds > 0:
            new, old = seconds / units, self.seconds_per_unit
            self.seconds_per_unit = new if old is None else old + _WEIGHT * (new - old)


class CostModel:
    """Measured seconds per loaded block and per computed token."""

    def __init__(self) -> None:
        self.load, self.compute = UnitCost(), UnitCost()

    def load_pays(self, blocks: int, tokens: int, blocks_ahead: int = 0) -> bool:
        """Return whether `blocks`, which wait for `blocks_ahead` others, are loaded before their `tokens` are computed.

        True while one of the two has never been measured: loading leaves the processor to others.
        """
        per_block, per_token = self.load.seconds_per_unit, self.compute.seconds_per_unit
        return per_block is None or per_token is None or (blocks + blocks_ahead) * per_block < tokens * per_token
