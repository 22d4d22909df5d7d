"""Forecasts on their way to the plug-in, which wait for a request of their run to go with it.

For vLLM's engine core a message is a request of its own, and on an idle engine one more step. A forecast changes when
an agent ends, and nearly always the next agent's request follows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from kedge.integrations.vllm.engine.requests import Hints, PluginMessage
from kedge.types import Namespace

HOLD_S = 0.005
"""Seconds that a forecast waits for a request"""
CARRIED = ("steps", "seq")
"""Hints of a forecast, which a request of its run may have as well"""


class _Run(NamedTuple):
    namespace: Namespace
    run: str
    client: str


class HeldForecasts:
    """The latest forecast of each run, for a few milliseconds. Owned by one thread."""

    def __init__(
        self, send: Callable[[PluginMessage], None], later: Callable[[float, Callable[[], None]], Any]
    ) -> None:
        """`send` sends a message to the plug-in, `later` calls a function after some seconds."""
        self._send, self._later = send, later
        self._held: dict[_Run, PluginMessage] = {}

    def pass_on(self, message: PluginMessage) -> None:
        """Send a message; a forecast a little later, unless it is taken, or followed by a newer one in its place."""
        if "steps" in message.hints:
            self._hold(message)
        elif message.hints.get("final"):
            self.take(message.namespace, message.hints)  # nothing of an ended run is expected
            self._send(message)
        elif message.hints.get("ahead"):
            self._send(replace(message, hints={**message.hints, **self.take(message.namespace, message.hints)}))
        else:
            self._send(message)

    def _hold(self, forecast: PluginMessage) -> None:
        run = _run(forecast.namespace, forecast.hints)
        if run not in self._held:
            self._later(HOLD_S, lambda: self._flush(run))
        self._held[run] = forecast

    def _flush(self, run: _Run) -> None:
        forecast = self._held.pop(run, None)
        if forecast is not None:
            self._send(forecast)

    def take(self, namespace: Namespace, hints: Hints) -> Hints:
        """Return what a message of the run of `hints` has to carry; empty where no forecast waits."""
        forecast = self._held.pop(_run(namespace, hints), None)
        return {name: forecast.hints[name] for name in CARRIED} if forecast else {}


def _run(namespace: Namespace, hints: Hints) -> _Run:
    return _Run(namespace, hints.get("run", ""), hints.get("client", ""))
