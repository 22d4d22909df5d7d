"""Events of the dashboard come at once in tests."""

from __future__ import annotations

import pytest

from kedge.server.dashboard import routes as dashboard


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "PACE", 0.01)
    monkeypatch.setattr(dashboard, "REST", 0.05)
    monkeypatch.setattr(dashboard, "LOOK_SECONDS", 0.0)
