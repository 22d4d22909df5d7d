"""One line for everything that happens, and whose call it was."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from kedge.engine.echo import EchoEngine
from kedge.server import logs
from kedge.server.logs import JSONLine, TextLine
from kedge.server.tenancy import hashed, load_keys
from kedge.settings import LimitSettings
from tests.server.conftest import Served, serving, wait_until

KEY = "key-of-a"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What is logged during a test, as JSON."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JSONLine())
    root, level = logging.getLogger("kedge"), logging.getLogger("kedge").level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield written
    root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture
def known(lines: io.StringIO) -> Iterator[Served]:  # noqa: ARG001 (the log must listen first)
    with EchoEngine() as engine, serving(engine, keys=load_keys(None, f"a:{hashed(KEY)}", LimitSettings())) as running:
        yield running


def access(lines: io.StringIO, count: int) -> list[dict[str, object]]:
    """The lines of `count` calls; a call's is written after its answer has been sent."""

    def written() -> list[dict[str, object]]:
        parsed = [json.loads(line) for line in lines.getvalue().splitlines()]
        return [line for line in parsed if line["logger"] == "kedge.access"]

    wait_until(lambda: len(written()) >= count)
    return written()


def test_a_call_is_a_line_with_the_id_that_its_answer_names(known: Served, lines: io.StringIO) -> None:
    with known.http(KEY) as http:
        answers = [
            http.post("/v1/completions", json={"prompt": "secret words"}),
            http.get("/v1/runs/none"),
            http.get("/v1/models", headers={"Authorization": "Bearer wrong"}),
            http.post("/v1/completions", content=b"x" * (5 << 20)),
        ]
        http.get("/health")
    known.wait_quiet()
    told = access(lines, 4)
    assert [line["request_id"] for line in told] == [answer.headers["x-request-id"] for answer in answers]
    assert [(line["status"], line["tenant"], line["method"]) for line in told] == [
        (200, "a", "POST"), (404, "a", "GET"), (401, "", "GET"), (413, "a", "POST"),
    ]  # fmt: skip
    assert told[0]["path"] == "/v1/completions"
    assert told[0]["ms"] > 0
    assert "secret" not in lines.getvalue()
    assert KEY not in lines.getvalue()


def test_a_path_cannot_begin_a_line(known: Served, lines: io.StringIO) -> None:
    with known.http(KEY) as http:
        http.get("/v1/runs/x%0a%7b%22level%22")
    assert access(lines, 1)[0]["path"] == "/v1/runs/x%0a%7b%22level%22"


def record(message: str = "hello %s", *args: object, **extra: object) -> logging.LogRecord:
    return logging.getLogger("kedge.test").makeRecord(
        "kedge.test", logging.WARNING, "f.py", 1, message, args or ("you",), None, extra=extra
    )


def test_json() -> None:
    token = logs.request_id.set("req_1")
    line = json.loads(JSONLine().format(record(status=5, path="a\nb", thing=object)))
    logs.request_id.reset(token)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning", "logger": "kedge.test", "message": "hello you", "request_id": "req_1", "status": 5,
        "path": "a\nb", "thing": str(object),
    }  # fmt: skip
    assert "\n" not in JSONLine().format(record("a\nb%s"))


def test_an_exception_is_part_of_its_line() -> None:
    made = record()
    try:
        raise ValueError("no")
    except ValueError as error:
        made.exc_info = (ValueError, error, error.__traceback__)
    assert "ValueError: no" in json.loads(JSONLine().format(made))["exception"]
    assert "ValueError: no" in TextLine().format(made)


def test_text() -> None:
    assert TextLine().format(record()).endswith("WARNING kedge.test hello you")
    token = logs.request_id.set("req_1")
    assert TextLine().format(record()).endswith("WARNING kedge.test req_1 hello you")
    logs.request_id.reset(token)
