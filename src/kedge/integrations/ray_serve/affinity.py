"""Which replica a call should go to: where its run's KV is, else where its agent's fixed prompt is, unless it is busy.

Pure bookkeeping over names of replicas and lengths of their queues: no clock, no random numbers, no Ray. Nothing
depends on it but time: on any replica every call gets the same answer.
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
    """Where runs and fixed prompts are, for the least recently used of which it forgets beyond a bound.

    `spill` is how many more requests than the least busy replica the right one may have before a call goes elsewhere,
    and its run with it: without a margin, runs would wander with every fluctuation. `most_runs` and `most_templates`
    bound the memory. Raises `ConfigError` for a `spill` below 0 or a bound below 1.
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
        """Fixed prompts by replica, with those that are expected there"""
        self._expected: OrderedDict[Template, str] = OrderedDict()

    def order(self, caller: Caller, loads: Mapping[str, int]) -> list[str]:
        """All replicas of `loads`, which gives the length of each one's queue, best first.

        A replica that is not too busy comes before one that is. Among equals the order is: the home of the run; one
        that holds the agent's fixed prompt, or will; the one that holds the fewest fixed prompts, so that room for KV
        is used evenly; the least busy; and by rendezvous hashing, so that routers that know nothing agree.
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
        """A call is to go to this replica: a fixed prompt that nobody holds counts there from now on, so that calls
        which come at the same time do not all choose the same one."""
        if caller.template in self._holders:
            return
        self._expect_no_more(caller.template)
        self._held[replica] += 1
        if forgotten := _remember(self._expected, caller.template, replica, self._most_templates):
            self._held[forgotten] -= 1

    def routed(self, caller: Caller, replica: str) -> None:
        """A call went to this replica: its run and its agent's fixed prompt are there now."""
        if caller.run_key:
            if caller.final:
                self._homes.pop(caller.run_key, None)
            else:
                _remember(self._homes, caller.run_key, replica, self._most_runs)
        self._hold(caller.template, replica)

    def inspect(self) -> dict[str, dict[Any, Any]]:
        """Return who is where: the home of every run, who holds each template or is expected to, and how many each."""
        return {
            "homes": dict(self._homes),
            "holders": dict(self._holders),
            "expected": dict(self._expected),
            "held": {replica: count for replica, count in self._held.items() if count},
        }

    def retain(self, replicas: Collection[str]) -> None:
        """These replicas are alive. What the others held is gone, and their runs go on wherever they are sent next."""
        self._homes = OrderedDict((run, home) for run, home in self._homes.items() if home in replicas)
        alive = frozenset(replicas)
        self._holders = OrderedDict((name, on & alive) for name, on in self._holders.items() if on & alive)
        self._expected.clear()
        self._held = Counter(replica for on in self._holders.values() for replica in on)

    def _hold(self, template: Template, replica: str) -> None:
        self._expect_no_more(template)
        before = self._holders.get(template, frozenset())
        forgotten = _remember(self._holders, template, before | {replica}, self._most_templates)
        self._held.update({replica} - before)
        self._held.subtract(forgotten or ())

    def _expect_no_more(self, template: Template) -> None:
        if expected := self._expected.pop(template, None):
            self._held[expected] -= 1


def rendezvous(key: Iterable[str], replica: str) -> int:
    """A number that depends on both and nothing else: the replica with the highest one is the key's."""
    return int.from_bytes(blake2b("\x1f".join((*key, replica)).encode(), digest_size=8).digest())


def _remember(table: OrderedDict[Key, Value], key: Key, value: Value, most: int) -> Value | None:
    """Puts a key last; what had to be forgotten for it."""
    table[key] = value
    table.move_to_end(key)
    return table.popitem(last=False)[1] if len(table) > most else None
