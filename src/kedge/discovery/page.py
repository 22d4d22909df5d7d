"""The report of plain traffic as a page, and in one line for a log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

Report = Mapping[str, Any]
"""What `PlainRequests.report` returns"""
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #1c2430;
  background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.05rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #8884; vertical-align: top }
td.n { text-align: right }
.figures { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem } .figures b { display: block; font-size: 1.5rem }
@media (prefers-color-scheme: dark) { body { color: #dde3ea; background: #14181d } }
"""
NO_REPORT = "Nothing has been reported yet: the figures come with the first requests, and every few seconds."


def page(report: Report | None) -> str:
    """Return the page as HTML, without scripts; `report` is None where there is none yet."""
    body = _body(report) if report else f"<p>{NO_REPORT}</p>"
    head = '<meta charset="utf-8"><meta http-equiv="refresh" content="10">'
    head += '<meta name="viewport" content="width=device-width"><title>Kedge: plain traffic</title>'
    return f"<!doctype html><html lang=en><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>"


def line(report: Report) -> str:
    """Return the report in one line for a log."""
    return (
        f"plain traffic ({report['mode']}): {report['requests']} requests, {len(report['agents'])} agents known in "
        f"{_share(report['known_agents'], report['requests'])} of them, {report['sessions']} sessions; of "
        f"{report['prompt_tokens']} prompt tokens {report['exact_tokens']} were cached, "
        f"{report['translated_tokens']} translated, and {report['shared_tokens']} read or answered before elsewhere"
    )


def _body(report: Report) -> str:
    figures = {
        "requests": report["requests"],
        "with a known agent": _share(report["known_agents"], report["requests"]),
        "sessions": report["sessions"],
        "of the requests went on with one": _share(report["session_turns"], report["requests"]),
        "prompt tokens": report["prompt_tokens"],
        "of them saved by the prefix cache": _share(report["exact_tokens"], report["prompt_tokens"]),
        "saved by translation": _share(report["translated_tokens"], report["prompt_tokens"]),
        "read or answered before elsewhere": _share(report["shared_tokens"], report["prompt_tokens"]),
        "runs under way": report["runs"],
    }
    shown = "".join(f"<div><b>{_number(value)}</b>{name}</div>" for name, value in figures.items())
    parts = [f"<h1>Kedge: plain traffic</h1><p>{MODES[report['mode']]}</p><div class=figures>{shown}</div>"]
    columns = ("agent", "team", "calls", "fixed tokens", "prompt tokens", "shared")
    parts.append(_table("Agents", columns, map(_agent_row, report["agents"])))
    follows = [(before, after, f"{share:.0%}") for before, after, share in report["follows"]]
    parts.append(_table("Who calls next", ("agent", "next", "how often"), follows))
    parts.append(_table("What kept text from being translated", ("reason", "requests"), report["why_not"]))
    found = [(one["kind"], one["agent"], one["tokens_per_call"], one["advice"]) for one in report["findings"]]
    parts.append(_table("What defeats reuse", ("what", "agent", "tokens a call", "what to do"), found))
    return "".join(parts)


MODES = {
    "off": "Nothing is looked for.",
    "observe": "Mode observe: nothing is changed. Set discovery.mode to exact or translate to use what was found.",
    "exact": "Mode exact: caches follow what was found; nothing is translated.",
    "translate": "Mode translate: caches follow what was found, and shared text is translated.",
}


def _agent_row(agent: Mapping[str, Any]) -> tuple[object, ...]:
    shared = _share(agent["shared_tokens"], agent["prompt_tokens"])
    return agent["id"], agent["team"], agent["calls"], agent["fixed_tokens"], agent["prompt_tokens"], shared


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    cells = ["".join(map(_cell, row)) for row in rows]
    if not cells:
        return f"<h2>{title}</h2><p>None so far.</p>"
    head = "".join(f"<th>{name}</th>" for name in columns)
    return f"<h2>{title}</h2><table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _cell(value: object) -> str:
    return f"<td{' class=n' if isinstance(value, int) else ''}>{escape(_number(value))}</td>"


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "0%"
