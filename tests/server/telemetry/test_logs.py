"""One line for everything that happens, and whose call it was."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from kedge.engine.echo import EchoEngine
from kedge.server import logs
from kedge.server.logs import TEXT, JSONLine, TextLine
from kedge.server.tenancy import hashed, load_keys
from kedge.settings import LimitSettings
from tests.server.conftest import serving, wait_until

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


def access(lines: io.StringIO, count: int) -> list[dict[str, object]]:
    """The lines of `count` calls; a call's is written after its answer has been sent."""

    def written() -> list[dict[str, object]]:
        parsed = [json.loads(line) for line in lines.getvalue().splitlines()]
        return [line for line in parsed if line["logger"] == "kedge.access"]

    wait_until(lambda: len(written()) >= count)
    return written()


def test_a_call_is_a_line_with_the_id_that_its_answer_names(lines: io.StringIO) -> None:
    keys = load_keys(None, f"a:{hashed(KEY)}", LimitSettings())
    with EchoEngine() as engine, serving(engine, keys=keys) as known, known.http(KEY) as http:
        answers = [
            http.post("/v1/completions", json={"prompt": "secret words"}),
            http.get("/v1/runs/x%0a%7b%22level%22"),
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
    paths = [line["path"] for line in told[:2]]
    assert paths == ["/v1/completions", "/v1/runs/x%0a%7b%22level%22"], "a path begins no line"
    assert told[0]["ms"] > 0
    assert "secret" not in lines.getvalue()
    assert KEY not in lines.getvalue()


def record(message: str = "hello %s", *args: object, **extra: object) -> logging.LogRecord:
    return logging.getLogger("kedge.test").makeRecord(
        "kedge.test", logging.WARNING, "f.py", 1, message, args or ("you",), None, extra=extra
    )


def test_lines_have_the_call_and_the_exception() -> None:
    made = record(status=5, path="a\nb", thing=object)
    try:
        raise ValueError("no")
    except ValueError as error:
        made.exc_info = (ValueError, error, error.__traceback__)
    assert "WARNING kedge.test hello you" in TextLine(TEXT).format(made)
    token = logs.request_id.set("req_1")
    line, text = json.loads(JSONLine().format(made)), TextLine(TEXT).format(made)
    logs.request_id.reset(token)
    assert "WARNING kedge.test req_1 hello you" in text and "ValueError: no" in text
    assert line.pop("time").endswith("Z") and "ValueError: no" in line.pop("exception")
    assert line == {
        "level": "warning", "logger": "kedge.test", "message": "hello you", "request_id": "req_1", "status": 5,
        "path": "a\nb", "thing": str(object),
    }  # fmt: skip
    assert "\n" not in JSONLine().format(record("a\nb%s"))
