"""Sessions in the embedded engine: found without hints, kept while they pause, and answered the same."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kedge.cache import CacheManager
from kedge.engine.local import sessions
from kedge.engine.local.sessions import SessionCaching, ending
from kedge.policies.eviction import lru, policy_of
from kedge.policies.sessions import TurnEnd
from kedge.settings import TierSettings
from kedge.structures.prefixes import chain_of
from kedge.types import AgentKey, FinishReason, Namespace, Tokens
from tests.engine.local.test_engine import prompt, request
from tests.engine.local.test_tiers import AMPLE, engine_with, expected


class Replay:
    """A cache and its sessions on a virtual clock; blocks have one token."""

    def __init__(self, policy: str, blocks: int) -> None:
        tiers = TierSettings(policy=policy)
        self.now, self.cache = 0.0, CacheManager(blocks, 1, policy_of(tiers), tiers)
        self.sessions = SessionCaching(self.cache, is_on=policy == "sessions", clock=lambda: self.now)

    def serve(self, tokens: Tokens, wait: float = 1.0) -> int:
        """One request, `wait` seconds after the last one. Returns how many of its tokens were cached."""
        self.now += wait
        asked = request(tokens, max_tokens=4)
        turn = self.sessions.arrived(asked)
        lease = self.cache.admit(asked.request_id, asked.namespace, tokens, len(tokens), len(tokens))
        self.cache.finish(asked.request_id, tokens)
        if turn:
            self.sessions.answered(turn, tokens, TurnEnd())
        self.cache.check_integrity()
        return lease.exact_tokens


@pytest.mark.parametrize("policy", ["sessions", "lru"])
def test_a_session_that_comes_back_soon_is_kept_while_others_pass(policy: str) -> None:
    """It returns after every three prompts of others, which fill the cache and never come back."""
    replay, tokens, kept = Replay(policy, 170), prompt(1, 60), []
    for turn in range(14):
        kept.append(replay.serve(tokens) == len(tokens) - 5 if turn else True)
        tokens = (*tokens, *prompt(100 + turn, 5))
        for other in range(3):
            replay.serve(prompt(1000 + 10 * turn + other, 40))
    assert all(kept[-6:]) if policy == "sessions" else not any(kept[-6:])


@pytest.mark.parametrize("block", [1, 2])
def test_hashes_that_collide_mix_up_sessions_and_no_answers(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Every block of every prompt has one of a few hashes, so anybody's prompt seems to go on with anybody's."""

    def few_hashes(tokens: Sequence[int], size: int, *_: object) -> list[int]:
        return [tokens[at * size] % block for at in range(len(tokens) // size)]

    monkeypatch.setattr(sessions, "chain_of", few_hashes)
    with engine_with(num_blocks=AMPLE) as engine:
        texts = {(tenant, number): prompt(10 * number + 7, 40) for tenant in "ab" for number in range(3)}
        for _ in range(3):
            asked = {
                key: engine.submit(replace(request(tokens, max_tokens=4), tenant=key[0]))
                for key, tokens in texts.items()
            }
            for key, stream in asked.items():
                done = stream.result(60)
                assert done.tokens == expected(texts[key], 4)
                assert done.receipt.exact <= len(texts[key]), "equal prompts of two tenants share nothing"
            texts = {key: (*tokens, *asked[key].result(60).tokens, *prompt(5, 8)) for key, tokens in texts.items()}


def test_a_cache_follows_the_guard() -> None:
    """Two sessions take turns, and both fit; hints that say the opposite lose, until LRU rules. The policy is swapped
    exactly when the guard changes its mind.
    """
    replay, policies = Replay("sessions", 200), list[bool]()
    for turn in range(60):
        for seed in (1, 2):
            replay.serve(prompt(seed, 40 + turn // 6))
            wrong = AgentKey(Namespace("default"), "", "r", f"{turn}{seed}")
            replay.cache.on_forecast({wrong: (0.0, 1.0)})
            replay.sessions.on_forecast({wrong: (0.0, 1.0)})
            tokens = prompt(10_000 + 10 * turn + seed, 30)
            replay.serve(tokens)
            replay.sessions.label(wrong, tokens)
            replay.sessions.advance()
            policies.append(replay.cache._tree.policy is not lru)
            assert policies[-1] == replay.sessions.ledger.guard.trusted
    assert policies[0] and not policies[-1]
    assert replay.serve(prompt(1, 50)) + replay.serve(prompt(2, 50)) > 0


@pytest.mark.parametrize(
    ("mark", "text", "finish", "stop"),
    [
        ("<tool_call>", 'I look.<tool_call>{"name": "ls"}</tool_call>', FinishReason.STOP, "tool"),
        ("<tool_call>", "Done.", FinishReason.STOP, "user"),
        ("<tool_call>", "Done.", FinishReason.LENGTH, ""),
        ("", "Done.", FinishReason.STOP, ""),
    ],
)
def test_what_an_answer_ends_with_says_what_the_session_waits_for(
    mark: str, text: str, finish: FinishReason, stop: str
) -> None:
    assert ending(mark, text, finish) == stop


def test_a_chain_is_that_of_its_blocks_wherever_it_was_known_before() -> None:
    tokens = prompt(3, 100)
    whole = chain_of(tokens, 8)
    assert len(whole) == 12 and whole[:6] == chain_of(tokens[:50], 8)
    for known in (0, 3, 12):
        assert chain_of(tokens, 8, whole[:known]) == whole
    assert chain_of(tokens[:20], 8, whole) == whole[:2]
    assert chain_of((*tokens[:8], 0, *tokens[9:]), 8)[1:] != whole[1:]
