"""The caller of a call, from the hints that the plug-in reads later, and the choice of its replica: the one with its
run's KV, else with its agent's fixed prompt, unless it is busy.

Pure bookkeeping over names of replicas and lengths of their queues: no clock, no random numbers, no Ray. It affects
latency only: every replica gives a call the same answer.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from hashlib import blake2b

from kedge.errors import ConfigError
from kedge.integrations.vllm.plugin.hints import read_hints, short
from kedge.structures.bounded import BoundedDict
from kedge.types import GenerateRequest, ReuseMode, RunId, RunKey

Template = tuple[str, ...]
"""The key of a fixed prompt: (tenant, workflow, agent), or (tenant, client, run) for a caller who names neither."""
WHO = ("client", "workflow", "run", "agent", "final")
"""Hints that say who calls; of the others a prompt's segments may be many"""


def template_of(caller: GenerateRequest) -> Template:
    """Return the agent's template as a key, which calls with the same fixed prompt share."""
    names = (caller.workflow, caller.agent) if caller.workflow or caller.agent else (caller.client, caller.run)
    return str(caller.namespace), *names


def read_caller(params: object, salt: object, session: str = "") -> GenerateRequest | None:
    """Return who calls by `kv_transfer_params`, as a request without its prompt, read as the plug-in reads it; None
    where they name no run, workflow or agent.

    `salt` is vLLM's `cache_salt`, which names the tenant. `session` is Ray Serve's session id, from a header: the run
    of a caller whose hints have none. A name that is not accepted is ignored.
    """
    field = params.get("kedge") if isinstance(params, Mapping) else None
    named = {name: field.get(name) for name in WHO} if isinstance(field, Mapping) else {}
    tenant, own = (one if isinstance(one, str) and short(one) == one else "" for one in (salt, session))
    hinted = read_hints("", (), tenant, {"kedge": named}, ReuseMode.EXACT)
    assert hinted is not None
    caller = replace(hinted.request, run=hinted.request.run or RunId(own))
    return caller if caller.run or caller.workflow or caller.agent else None


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
        self._spill = spill
        self._homes = BoundedDict[RunKey, str](most_runs)
        self._held: Counter[str] = Counter()
        """Number of fixed prompts by replica"""
        self._holders = BoundedDict[Template, frozenset[str]](most_templates, lambda _, on: self._held.subtract(on))

    def order(self, caller: GenerateRequest, loads: Mapping[str, int]) -> list[str]:
        """Return the replicas, best first. `loads` has the length of each one's queue.

        A replica that is not too busy comes before one that is. Among equals the order is: the home of the run; one
        that holds the agent's fixed prompt, or will; the one that holds the fewest fixed prompts, so that KV memory is
        used evenly; the least busy; and by rendezvous hashing, so that routers without any history agree.
        """
        room = min(loads.values(), default=0) + self._spill
        home = self._homes.get(caller.run_key) if caller.run else None
        holders = self._holders.get(template_of(caller), frozenset())

        def rank(replica: str) -> tuple[bool, bool, bool, int, int, int]:
            holds, load = replica in holders, loads[replica]
            held = 0 if holds else self._held[replica]
            return load > room, replica != home, not holds, held, load, -rendezvous(template_of(caller), replica)

        return sorted(loads, key=rank)

    def expect(self, caller: GenerateRequest, replica: str) -> None:
        """Note that a call will go to this replica: a fixed prompt that none holds counts there from now on, so that
        simultaneous calls spread.
        """
        if template_of(caller) not in self._holders:
            self._hold(template_of(caller), replica)

    def routed(self, caller: GenerateRequest, replica: str) -> None:
        """Note that a call went to this replica, which holds its run and its agent's fixed prompt from now on."""
        if caller.run:
            if caller.turn.is_last:
                self._homes.pop(caller.run_key, None)
            else:
                self._homes[caller.run_key] = replica
        self._hold(template_of(caller), replica)

    def retain(self, replicas: Collection[str]) -> None:
        """Drop all replicas but these, with what they held. Their runs continue wherever they are sent next."""
        for run in [run for run, home in self._homes.items() if home not in replicas]:
            del self._homes[run]
        for template, on in list(self._holders.items()):  # in their order, which stays
            self._holders[template] = on.intersection(replicas)
            if not self._holders[template]:
                del self._holders[template]
        self._held = Counter(replica for on in self._holders.values() for replica in on)

    def _hold(self, template: Template, replica: str) -> None:
        before = self._holders.get(template, frozenset())
        self._held.update({replica} - before)
        self._holders[template] = before | {replica}


def rendezvous(key: Iterable[str], replica: str) -> int:
    """Return the rendezvous hash of a key and a replica. The replica with the highest one owns the key."""
    return int.from_bytes(blake2b("\x1f".join((*key, replica)).encode(), digest_size=8).digest())
