"""Schemathesis over the whole OpenAPI document: whatever it allows, and much that it does not, is answered as it says.

A few cases for every operation and both engines, with the hooks of `scripts/fuzz_api.py`, which runs ten thousand.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

schemathesis = pytest.importorskip("schemathesis")
from schemathesis import checks  # noqa: E402

from kedge.engine.echo import EchoEngine  # noqa: E402
from kedge.server.app import create_app  # noqa: E402
from scripts import fuzz_api, fuzz_hooks  # noqa: E402, F401 (schemathesis takes the hooks from the import)
from tests.server.conftest import PATIENCE, Served, serving  # noqa: E402

EVERY_CALL = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]


@pytest.fixture(scope="module", params=["echo", "nano"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with (
        fuzz_api.engine_of(request.param) as engine,
        serving(engine) as running,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(fuzz_api, "PATIENCE", PATIENCE)
        for variable, value in fuzz_api.known_names(running.url).items():
            patch.setenv(variable, value)
        reference = fuzz_api.Reference(running.url)
        yield running
        reference.look("at the end")
        assert not reference.problems
        running.wait_quiet()
        assert fuzz_api.leftovers(running.app, engine) == ""


with EchoEngine() as document_of:
    schema = schemathesis.openapi.from_dict(create_app(document_of).openapi())


@schema.parametrize()
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_case_is_answered_as_the_document_says(case: Any, served: Served) -> None:
    case.call_and_validate(base_url=served.url, checks=EVERY_CALL, timeout=PATIENCE)
