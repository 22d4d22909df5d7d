"""The choice of a replica for a call: the one with its run's KV, else with its agent's fixed prompt, unless it is busy.

Pure bookkeeping over names of replicas and lengths of their queues: no clock, no random numbers, no Ray. It affects
latency only: every replica gives a call the same answer.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b
from typing import Any, TypeVar

from kedge.errors import ConfigError
from kedge.integrations.ray_serve.callers import Caller, Template
from kedge.workflow.forecast import RunKey

Key = TypeVar("Key")
Value = TypeVar("Value")


class Affinity:
    """The replicas that hold runs and fixed prompts. The least recently used entries are dropped beyond a bound.

    `spill` is how many more requests than the least busy replica a run's own one may have before a call, and its run,
    goes elsewhere: without a margin, runs would move with every fluctuation. `most_runs` and `most_templates` bound the
    memory. Raises `ConfigError` for a `spill` below 0 or a bound below 1.
    """

    def __init__(self, spill: int = 4, most_runs: int = 65_536, most_templates: int = 16_384) -> None:
        bounds = (("spill", spill, 0), ("most_runs", most_runs, 1), ("most_templates", most_templates, 1))
        for name, value, least in bounds:
            if value < least:
                raise ConfigError(f"ray_serve.{name}", value, f"must be at least {least}")
        self._spill, self._most_runs, self._most_templates = spill, most_runs, most_templates
        self._homes: OrderedDict[RunKey, str] = OrderedDict()
        self._holders: OrderedDict[Template, frozenset[str]] = OrderedDict()
        self._held: Counter[str] = Counter()
        """Number of fixed prompts by replica, with those that are expected there"""
        self._expected: OrderedDict[Template, str] = OrderedDict()

    def order(self, caller: Caller, loads: Mapping[str, int]) -> list[str]:
        """Return the replicas, best first. `loads` has the length of each one's queue.

        A replica that is not too busy comes before one that is. Among equals the order is: the home of the run; one
        that holds the agent's fixed prompt, or will; the one that holds the fewest fixed prompts, so that KV memory is
        used evenly; the least busy; and by rendezvous hashing, so that routers without any history agree.
        """
        room = min(loads.values(), default=0) + self._spill
        home = self._homes.get(caller.run_key) if caller.run_key else None
        holders = self._holders.get(caller.template) or {self._expected.get(caller.template)}

        def rank(replica: str) -> tuple[bool, bool, bool, int, int, int]:
            holds, load = replica in holders, loads[replica]
            held = 0 if holds else self._held[replica]
            return load > room, replica != home, not holds, held, load, -rendezvous(caller.template, replica)

        return sorted(loads, key=rank)

    def expect(self, caller: Caller, replica: str) -> None:
        """Note that a call will go to this replica.

        A fixed prompt that no replica holds counts there from now on, so that simultaneous calls spread.
        """
        if caller.template in self._holders:
            return
        self._drop_expectation(caller.template)
        self._held[replica] += 1
        if forgotten := _remember(self._expected, caller.template, replica, self._most_templates):
            self._held[forgotten] -= 1

    def routed(self, caller: Caller, replica: str) -> None:
        """Note that a call went to this replica, which holds its run and its agent's fixed prompt from now on."""
        if caller.run_key:
            if caller.final:
                self._homes.pop(caller.run_key, None)
            else:
                _remember(self._homes, caller.run_key, replica, self._most_runs)
        self._hold(caller.template, replica)

    def inspect(self) -> dict[str, dict[Any, Any]]:
        """Return the home of every run, the holders of every template, present or expected, and how many each holds."""
        return {
            "homes": dict(self._homes),
            "holders": dict(self._holders),
            "expected": dict(self._expected),
            "held": {replica: count for replica, count in self._held.items() if count},
        }

    def retain(self, replicas: Collection[str]) -> None:
        """Drop all replicas but these, with what they held. Their runs continue wherever they are sent next."""
        self._homes = OrderedDict((run, home) for run, home in self._homes.items() if home in replicas)
        alive = frozenset(replicas)
        self._holders = OrderedDict((name, on & alive) for name, on in self._holders.items() if on & alive)
        self._expected.clear()
        self._held = Counter(replica for on in self._holders.values() for replica in on)

    def _hold(self, template: Template, replica: str) -> None:
        self._drop_expectation(template)
        before = self._holders.get(template, frozenset())
        forgotten = _remember(self._holders, template, before | {replica}, self._most_templates)
        self._held.update({replica} - before)
        self._held.subtract(forgotten or ())

    def _drop_expectation(self, template: Template) -> None:
        if expected := self._expected.pop(template, None):
            self._held[expected] -= 1


def rendezvous(key: Iterable[str], replica: str) -> int:
    """Return the rendezvous hash of a key and a replica. The replica with the highest one owns the key."""
    return int.from_bytes(blake2b("\x1f".join((*key, replica)).encode(), digest_size=8).digest())


def _remember(table: OrderedDict[Key, Value], key: Key, value: Value, most: int) -> Value | None:
    """Put a key last. Returns the value that was dropped for it, if there is one."""
    table[key] = value
    table.move_to_end(key)
    return table.popitem(last=False)[1] if len(table) > most else None
