"""Hostile numbers reach every numeric field, change nothing on either engine, and what they would break is noticed."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from starlette.responses import JSONResponse  # noqa: E402
from starlette.types import ASGIApp  # noqa: E402

from kedge.engine.echo import EchoEngine  # noqa: E402
from kedge.server.app import create_app  # noqa: E402
from kedge.types import GenerateRequest  # noqa: E402
from scripts import fuzz_api  # noqa: E402

CASES = 60
REFERENCE: dict[str, Any] = fuzz_api.REFERENCE
Schema = dict[str, Any]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's own is for a machine that does nothing else; a hang is one after a minute, too."""
    monkeypatch.setattr(fuzz_api, "PATIENCE", 60.0)


def numeric(schema: Schema, parts: Schema, name: str = "") -> Iterator[str]:
    """The names of all fields that may be numbers, in a schema and in those that it is made of."""
    if schema.get("type") in ("number", "integer"):
        yield name
    for part in (*schema.get("anyOf", ()), *filter(None, [schema.get("items")])):
        yield from numeric(part, parts, name)
    if "$ref" in schema:
        yield from numeric(parts[schema["$ref"].rpartition("/")[2]], parts)
    for key, value in schema.get("properties", {}).items():
        yield from numeric(value, parts, key)


def test_every_numeric_field_of_the_document_is_drawn() -> None:
    with EchoEngine() as engine:
        document = create_app(engine).openapi()
    parts = document["components"]["schemas"]
    drawn = {str(key) for _, body in fuzz_api.TEMPLATES for place in fuzz_api.numbers_in(body) for key in place}
    for operation in fuzz_api.all_operations(document):
        for content in operation.get("requestBody", {}).get("content", {}).values():
            assert set(numeric(content["schema"], parts)) <= drawn


@pytest.mark.parametrize("name", ["echo", "nano"])
def test_hostile_numbers_change_nothing(name: str) -> None:
    with fuzz_api.engine_of(name) as engine:
        app = create_app(engine)
        with fuzz_api.serving(app) as url:
            reference = fuzz_api.Reference(url)
            assert fuzz_api.fuzz_numbers(url, CASES, 1, reference) == []
            assert fuzz_api.leftovers(app, engine) == ""


def answers(app: ASGIApp) -> list[str]:
    """What a few hostile numbers find in an application."""
    with fuzz_api.serving(app) as url:
        return fuzz_api.fuzz_numbers(url, 2, 1, fuzz_api.Reference(url))


def test_another_answer_to_the_reference_is_noticed() -> None:
    asked = itertools.count()

    def counts(_: GenerateRequest) -> str:
        return str(next(asked))

    with EchoEngine(counts) as engine:
        problems = answers(create_app(engine))
    assert len(problems) == 1 and "the reference is" in problems[0]


def test_a_servers_own_error_is_noticed() -> None:
    completion = JSONResponse({"choices": [{"text": "same"}]})

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        is_reference = REFERENCE["prompt"].encode() in (await receive())["body"]
        await (completion if is_reference else JSONResponse({}, 500))(scope, receive, send)

    problems = answers(app)
    assert len(problems) == 2 and all(" 500 " in problem for problem in problems)
