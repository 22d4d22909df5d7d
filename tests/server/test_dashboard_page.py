"""The dashboard's page in a real browser: what it shows, as it happens, on any screen, to anybody.

Needs playwright and a Chromium: `CHROMIUM` names its program, else one on the PATH is taken.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kedge.engine.echo import EchoEngine
from kedge.engine.local.engine import LocalEngine
from kedge.server.tenancy import hashed, load_keys
from kedge.settings import AnchorSettings, EngineSettings, LimitSettings, PlannerSettings, ServerSettings
from tests.server.conftest import FLOW, YAML, Served, serving
from tests.server.dashboard.test_routes import chat

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
PROGRAM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on the PATH, and CHROMIUM names none")
LAPTOP, PHONE, NARROW = ({"width": width, "height": height} for width, height in ((1440, 900), (390, 844), (320, 640)))
PATIENCE_MS = 15_000
TEAM = Path(__file__).parents[2] / "examples" / "math_team.yaml"
HOSTILE = '<img src=x onerror="document.title=1">'
ODD = {
    "name": f"odd names {HOSTILE}",
    "agents": [
        {"id": "a-very-long-name-that-has-no-space_" + "x" * 60, "title": HOSTILE, "user": "Q: {user_question}"},
        {"id": "b", "user": "Q: {user_question}"},
    ],
}
OVER = """() => [...document.querySelectorAll("body *")]
  .filter((one) => !one.closest(".scroll *, .unseen, .skip") && one.getBoundingClientRect().right > innerWidth + 0.5)
  .map((one) => `${one.tagName} ${one.id} ${one.className}`)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        program = started.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield program
        program.close()


@contextmanager
def leaving(page: Any) -> Iterator[None]:
    """Leaves a page before its server ends."""
    yield
    page.goto("about:blank")


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of its own; nothing may land in its console as an error, apart from the statuses that a test asks for."""
    context = browser.new_context(viewport=LAPTOP)
    opened = context.new_page()
    opened.set_default_timeout(PATIENCE_MS)
    said: list[str] = []
    opened.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: said.append(str(error)))
    yield opened
    context.close()
    assert [text for text in said if not re.search("status of (401|503)", text)] == []


@pytest.fixture
def echo() -> Iterator[Served]:
    with EchoEngine(delay_s=0.002) as engine, serving(engine) as running:
        yield running


@pytest.fixture(scope="module")
def busy() -> Iterator[Served]:
    """The bundled model after some runs of a team, with thresholds so wide that it soon translates."""
    anchors = AnchorSettings(min_anchors=1, max_error=1e9, weak_error=1e9)
    config = EngineSettings(anchors=anchors, planner=PlannerSettings(by_cost=False, move="never"), device="cpu")
    with (
        LocalEngine(None, config) as engine,
        serving(engine, ServerSettings(tools=True, keep_texts=True)) as running,
        running.http() as http,
    ):
        http.timeout = 60
        http.post("/v1/workflows", json=ODD).raise_for_status()
        http.post("/v1/workflows", content=TEAM.read_bytes(), headers=YAML).raise_for_status()
        for number in range(2, 5):
            inputs = {"user_question": f"Tom starts the day with {number} apples. Tom finds 5 more. How many?"}
            http.post("/v1/workflows/math%20team/runs", json={"inputs": inputs, "stream": True}).raise_for_status()
        chat(http, kedge={"agent": HOSTILE})
        engine.wait_idle()
        yield running


def has_text(page: Any, selector: str, text: str | re.Pattern[str]) -> None:
    playwright.expect(page.locator(selector)).to_contain_text(text, timeout=PATIENCE_MS)


def test_an_empty_server_says_what_to_do_and_numbers_appear_as_things_happen(echo: Served, page: Any) -> None:
    with echo.http() as http:
        page.goto(echo.url)
        has_text(page, "#status", "healthy")
        has_text(page, "#curl", f"curl {echo.url}/v1/chat/completions")
        playwright.expect(page.locator("#board")).to_be_hidden()
        for number in ("1", "2"):
            chat(http, number)
            has_text(page, "#figures dd >> nth=0", re.compile(f"^{number}"))
            playwright.expect(page.locator("#empty")).to_be_hidden()
        playwright.expect(page.locator("#receipts tbody tr")).to_have_count(2)
        playwright.expect(page.locator("#series svg rect.fill-computed").first).to_be_visible()
        has_text(page, "#anchors", "does not report its anchors")


def test_where_a_run_is(page: Any) -> None:
    with (
        EchoEngine(lambda _: "a" * 200, delay_s=0.02) as engine,
        serving(engine) as slow,
        slow.http() as http,
        leaving(page),
    ):
        http.post("/v1/workflows", content=FLOW, headers=YAML).raise_for_status()
        page.goto(slow.url)
        has_text(page, "#graph", "not called yet")
        run = http.post("/v1/workflows/pair/runs", json={"inputs": {"user_question": "?"}}).json()["id"]
        has_text(page, "#graph .agent.running", "first")
        has_text(page, "#graph .agent.expected", "next")
        has_text(page, "#runs", "running")
        http.post(f"/v1/runs/{run}/cancel").raise_for_status()
        has_text(page, "#runs .status", "cancelled")
        has_text(page, "#graph .agent.stopped", "first")


def test_the_bundled_model_at_work(busy: Served, page: Any) -> None:
    page.goto(busy.url)
    has_text(page, "#graph", "programmer")
    has_text(page, "#series-legend", "translated")
    for panel, agent in (("#ttft", "analyst"), ("#cached", "inspector"), ("#anchors", "user_question")):
        has_text(page, panel, agent)
    row = page.locator("#ttft tr", has_text="analyst")
    assert re.search(r"\d+\.\dx|\d+\.\d×", row.inner_text())
    shares = page.locator("#figures dd").nth(1).inner_text()
    assert re.search(r"[1-9]\d?\s%\s*\n.*[1-9]\d?\s% translated", shares)
    assert int(page.locator("#anchors tbody td").first.inner_text()) > 0
    reasons = page.locator("#receipts .misses").all_inner_texts()
    assert len(reasons) == 16
    assert "\u2013" not in reasons
    has_text(page, "#anchors .group", "math team")
    has_text(page, "#ttft .time small >> nth=0", "alone")
    playwright.expect(page.locator("#receipts tbody tr:visible")).to_have_count(10)
    page.get_by_role("button", name="Show all").click()
    playwright.expect(page.locator("#receipts tbody tr:visible")).to_have_count(16)


def test_from_a_run_to_its_calls_their_receipts_and_texts(busy: Served, page: Any) -> None:
    page.goto(busy.url)
    page.locator("#runs li", has_text="math team").first.get_by_role("link").click()
    playwright.expect(page.locator("#detail .call")).to_have_count(5)
    inspector = page.locator("#detail .call", has_text="inspector")
    inspector.locator("summary").click()
    has_text(page, "#detail .call[open] .misses, #detail .call[open] .call-body", "Why not better")
    has_text(page, "#detail .call[open] .prompt", "You are an inspector.")
    playwright.expect(page.locator("#detail .call[open] .prompt .from-computed").first).to_be_visible()
    page.get_by_role("button", name="Close").click()
    playwright.expect(page.locator("#detail")).to_be_hidden()
    page.locator("#receipts a").first.click()
    playwright.expect(page.locator("#detail .call[open]")).to_have_count(1)


def test_figures_are_stale_while_the_server_is_away_and_once_its_engine_has_failed(echo: Served, page: Any) -> None:
    with echo.http() as http, leaving(page):
        chat(http)
        page.goto(echo.url)
        has_text(page, "#status", "healthy")
        playwright.expect(page.locator("#board.stale")).to_have_count(0)
        page.route("**/v1/dashboard?*", lambda route: route.fulfill(status=503, body="{}"))
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        has_text(page, "#status", "the server answered 503")
        has_text(page, "#banner", "The figures below are those of")
        page.unroute("**/v1/dashboard?*")
        has_text(page, "#status", "healthy")
        echo.engine.fail(RuntimeError("boom"))
        has_text(page, "#status", "engine failed: boom")
        has_text(page, "#banner", "The figures below are those of")
        playwright.expect(page.locator("#board.stale")).to_be_visible()


def test_names_are_text_whatever_is_in_them(busy: Served, page: Any) -> None:
    page.goto(busy.url)
    has_text(page, "#receipts", HOSTILE)
    page.locator("#flow-choice").select_option(ODD["name"])
    has_text(page, "#graph title >> nth=0", HOSTILE)
    assert page.title() == "Kedge"
    assert page.locator("#board img").count() == 0


@pytest.mark.parametrize("size", [LAPTOP, PHONE, NARROW], ids=["laptop", "phone", "narrow"])
def test_nothing_runs_over_the_screens_edge(busy: Served, page: Any, size: dict[str, int]) -> None:
    page.set_viewport_size(size)
    page.goto(busy.url)
    has_text(page, "#graph", "programmer")
    for name in (ODD["name"], "math team"):
        page.locator("#flow-choice").select_option(name)
        page.locator("summary").first.click()
        over = page.evaluate(OVER)
        assert over == []
        assert page.evaluate("document.documentElement.scrollWidth") == size["width"]


def test_the_page_can_be_heard_and_used_without_a_mouse(busy: Served, page: Any) -> None:
    page.goto(busy.url)
    has_text(page, "#graph", "programmer")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    names = [page.keyboard.press("Tab") or page.evaluate("document.activeElement.id") for _ in range(5)]
    assert {"theme", "flow-choice"} <= set(names)
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((one) => one.tagName)")
    assert levels[0] == "H1"
    assert levels.count("H1") == 1
    silent = page.evaluate(
        "[...document.querySelectorAll('main svg')].filter((one) => !one.ariaLabel && one.role != 'img')"
    )
    assert silent == []
    graph = page.locator("#graph svg").get_attribute("aria-label")
    assert "analyst hears solver: done" in graph
    assert page.evaluate(
        "[...document.querySelectorAll('table')].every((one) => one.caption && one.rows[0].cells[0].scope)"
    )
    page.get_by_text("As a table").click()
    playwright.expect(page.locator("#series-table tbody tr")).to_have_count(5)


def test_a_server_with_keys_asks_for_one_and_keeps_it_in_the_tab(page: Any) -> None:
    keys = load_keys(None, f"acme:{hashed('key-a')},other:{hashed('key-b')}", LimitSettings())
    with EchoEngine() as engine, serving(engine, keys=keys) as locked, leaving(page):
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(locked.url)
        field = page.get_by_label("Key", exact=True)
        field.fill("wrong")
        page.get_by_role("button", name="Open").click()
        has_text(page, "#key-error", "Authorization")
        field.fill("key-a")
        page.get_by_role("button", name="Open").click()
        has_text(page, "#curl", "Bearer YOUR_KEY")
        chat(locked.http("key-a"))
        has_text(page, "#figures", "1")
        page.reload()
        has_text(page, "#figures", "1")
        assert not any("key-a" in url for url in asked)
        assert "key-a" not in page.evaluate("document.cookie + JSON.stringify(localStorage)")
        page.get_by_role("button", name="Forget key").click()
        field.fill("key-b")
        page.get_by_role("button", name="Open").click()
        chat(locked.http("key-b"), "b" * 50)
        playwright.expect(page.locator("#receipts tbody tr")).to_have_count(1)
        has_text(page, "#receipts .sources", re.compile("^[5-9]\\d computed"))
        page.get_by_role("button", name="Forget key").click()
        playwright.expect(field).to_be_visible()
        playwright.expect(page.locator("#board")).to_be_hidden()
        assert page.evaluate("sessionStorage.length") == 0
