"""Tests of what is reused, and of what must not be."""

from __future__ import annotations

from kedge.engine.base import Engine
from kedge.types import ReuseMode
from tests.engine.conformance.harness import Harness, fresh, fresh_text


class ReuseTests(Harness):
    """Tests of exact reuse, and of the isolation of tenants."""

    def test_exact_reuse_changes_no_token(self, engine: Engine) -> None:
        text = " ".join(fresh_text("reuse") for _ in range(3))
        plain = self.run(engine, self.request(engine, text, reuse=ReuseMode.OFF))
        first = self.run(engine, self.request(engine, text, reuse=ReuseMode.EXACT))
        second = self.run(engine, self.request(engine, text, reuse=ReuseMode.EXACT))
        again = self.run(engine, self.request(engine, text, reuse=ReuseMode.OFF))
        assert plain.tokens == first.tokens == second.tokens == again.tokens
        assert again.receipt.exact == 0, "a request without reuse leaned on others"
        assert second.receipt.exact > 0, "the second call reused nothing"
        assert second.receipt.computed > 0, "the first logits were not computed"
        assert second.receipt.translated == 0

    def test_reuse_never_crosses_tenants(self, engine: Engine) -> None:
        text = " ".join(fresh_text("tenants") for _ in range(3))
        self.run(engine, self.request(engine, text, reuse=ReuseMode.EXACT, tenant="tenant-a"))
        other = f"tenant-b{next(fresh)}"
        done = self.run(engine, self.request(engine, text, reuse=ReuseMode.EXACT, tenant=other))
        assert done.receipt.exact == 0
