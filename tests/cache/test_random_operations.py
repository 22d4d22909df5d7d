"""All states at random: tiny pools, failing and reordered copies, cancelled requests, histories that grow and fork,
beginnings of blocks, a tenant's limit, cleared caches.

Every block says what is in it, so a hit on another prompt's KV is seen at once; integrity is proved after every
operation.
"""

import math
import random

import pytest

from kedge.cache import Lease
from kedge.cache.node import HOST, State
from kedge.errors import OutOfBlocks
from kedge.policies.eviction import EvictionPolicy, lru, steps_to_execution
from kedge.types import Namespace, RequestId
from tests.cache.helpers import World

OPERATIONS = 140_000
FIXED = {"a": "AAAA", "b": "AABB", "c": "CCC", "d": "AAAADD"}
"""Fixed prompts; some share prefixes."""
SPACES = (Namespace("tenant"), Namespace("other"))


class Driver(World):
    """One random operation at a time, each of which may be refused for want of blocks."""

    def __init__(self, host_blocks: int, block_size: int, limit: int | None, **settings: object) -> None:
        super().__init__(14, host_blocks, block_size, copy_jobs=1, copies_beginnings=block_size > 1, **settings)
        self.rng, self.limit = random.Random(2), limit
        self.cache.limit_host(SPACES[0].tenant, limit)
        self.histories = dict.fromkeys("st", "S")
        self.leases: dict[RequestId, tuple[Lease, str, Namespace]] = {}
        self.waiting: dict[RequestId, tuple[str, Namespace]] = {}
        self.refused = 0
        self.states: set[State] = set()
        self.on_host = 0

    def prompt(self) -> str:
        return FIXED[self.rng.choice("abcd")] + "".join(self.rng.choices("xy", k=self.rng.randrange(4)))

    def step(self) -> None:
        try:
            self.rng.choices(
                (self.begin, self.end, self.grow, self.commit, self.ask, self.give_up, self.label, self.turn)
                + (self.expect, self.pump, self.copy, self.clear),
                (18, 18, 3, 6, 10, 2, 12, 1, 12, 20, 12, 0.2),
            )[0]()
        except OutOfBlocks:
            self.refused += 1

    def begin(self) -> None:
        if self.waiting and self.rng.random() < 0.5:
            request = self.rng.choice(list(self.waiting))
            text, space = self.waiting[request]
        else:
            request, text, space = self.new_request(), self.prompt(), self.space()
        limit, size = self.rng.randrange(len(text) + 1) if self.rng.random() < 0.1 else len(text), self.cache.block_size
        whole = size * len(self.cache.match(space, text[:limit].encode()))
        lease = self.admit(text, self.rng.randrange(2), request, space, limit)
        assert whole <= lease.exact_tokens < whole + size
        self.leases[request] = lease, text, space
        self.waiting.pop(request, None)

    def space(self) -> Namespace:
        return SPACES[self.rng.random() < 0.1]

    def end(self) -> None:
        if not self.leases:
            return
        request = self.rng.choice(list(self.leases))
        lease, text, space = self.leases.pop(request)
        if self.rng.random() < 0.2:
            self.cache.abort(request)
            return
        for i in range(len(text) // self.cache.block_size):
            assert self.copier.device[lease.blocks[i]] == self.content(space, text, i), "somebody wrote into a lease"
        self.cache.finish(request, text[: len(text) - self.rng.randrange(4)].encode(), fixed=self.rng.randrange(6))

    def grow(self) -> None:
        if self.leases:
            request = self.rng.choice(list(self.leases))
            lease, text, space = self.leases[request]
            longer = self.cache.extend(request, len(lease.blocks) * self.cache.block_size + 1)
            self.leases[request] = longer, text, space

    def commit(self) -> None:
        if self.leases:
            request = self.rng.choice(list(self.leases))
            self.cache.commit_prefix(request, self.leases[request][1].encode())

    def ask(self) -> None:
        if self.waiting and self.rng.random() < 0.5:
            request = self.rng.choice(list(self.waiting))
        else:
            request = self.new_request()
            self.waiting[request] = self.prompt(), self.space()
            if len(self.waiting) > 4:
                self.give_up()
        text, space = self.waiting.get(request, ("", SPACES[0]))
        self.cache.demand(request, space, text.encode())
        if request not in self.waiting:
            self.cache.withdraw(request)

    def give_up(self) -> None:
        if self.waiting:
            request = self.rng.choice(list(self.waiting))
            del self.waiting[request]
            self.cache.withdraw(request)

    def label(self) -> None:
        agent = self.rng.choice("abcd")
        self.cache.on_label(self.space(), agent, FIXED[agent].encode()[: self.rng.choice((9, 9, 2))])

    def turn(self) -> None:
        """A history goes on, or forks."""
        name = self.rng.choice("st")
        text = self.histories[name][: self.rng.choice((8, 8, 8, 2))] + name * self.rng.randrange(4)
        self.histories[name] = text[:8]
        self.serve(self.histories[name], name, len(self.histories[name]))

    def expect(self) -> None:
        agents = self.rng.sample("abcdst", self.rng.choice((1, 1, 6)))
        steps = (None, 0.0, 1.0, 2.0, 3.0, 5.0, 9.0, math.inf)
        changes = {agent: (self.rng.choice(steps), self.rng.choice((0.5, 0.9, 1.0))) for agent in agents}
        self.cache.on_forecast({agent: None if run[0] is None else run for agent, run in changes.items()})

    def pump(self) -> None:
        self.cache.pump()

    def copy(self) -> None:
        if self.copier.submitted:
            self.copier.end(self.rng.randrange(len(self.copier.submitted)), ok=self.rng.random() < 0.8)

    def clear(self) -> None:
        self.cache.clear()

    def finish_all(self) -> None:
        """Nothing is stuck: all leases end, all copies land, and everything can be evicted."""
        for request in self.leases:
            self.cache.abort(request)
        for request in self.waiting:
            self.cache.withdraw(request)
        self.settle()
        self.cache.clear()
        stats = self.cache.stats()
        assert (stats.free_blocks, stats.host_free_blocks) == (14, self.cache.tiers.host_blocks)
        ended = sum(count for outcomes in stats.transfers.values() for count in outcomes.values())
        assert ended == next(self.cache.tiers.transfers._ids), "every transfer ends in exactly one outcome"

    def watch(self) -> None:
        self.check()
        self.states.update(node.state for node in self.tree.nodes())
        mine = self.tree.shares[HOST].by_tenant[SPACES[0].tenant]
        assert self.limit is None or mine <= self.limit
        self.on_host = max(self.on_host, mine)


DRIVERS = [
    (steps_to_execution(), 9, 1, 1, None),
    (steps_to_execution(virtual_step=2.0), 5, 0, 1, None),
    (lru, 9, None, 1, None),
    (lambda node: (float(sum(node.prefix()) % 7), node.last_access), 9, 1, 1, None),
    (steps_to_execution(), 0, 1, 1, None),
    (lru, 5, 1, 3, None),
    (steps_to_execution(), 12, 1, 1, 5),
]


@pytest.mark.parametrize(("policy", "host_blocks", "backup_hits", "block_size", "limit"), DRIVERS)
def test_integrity_after_every_operation(
    policy: EvictionPolicy, host_blocks: int, backup_hits: int | None, block_size: int, limit: int | None
) -> None:
    driver = Driver(host_blocks, block_size, limit, policy=policy, backup_hits=backup_hits)
    for _ in range(OPERATIONS // len(DRIVERS)):
        driver.step()
        driver.watch()
    driver.finish_all()
    assert driver.on_host == limit or limit is None
    assert bool(driver.made) == (block_size > 1)
    assert driver.states == (set(State) if host_blocks else {State.DEVICE})
    stats = driver.cache.stats()
    if host_blocks:
        assert all(stats.transfers["prefetch"].values()), stats.transfers
        assert stats.failed_copies and stats.denied_loads and stats.skipped_backups
    assert driver.refused and stats.evictions
