"""Results of studies as one self-contained HTML page."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from kedge.errors import ConfigError

PAGE = "report.html"
_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:70em;margin:2em auto;padding:0 1em}table{border-collapse:collapse}"
    "td,th{padding:.15em .7em;border-bottom:1px solid #ddd;text-align:right}td:first-child,th:first-child"
    "{text-align:left}img{max-width:100%}code{background:#eee}.paper{border-left:4px solid #bbb;padding-left:1em}"
)


def write_report(folder: Path) -> Path:
    """Write `report.html` of all results in `folder`, with the figures beside them.

    Raises `ConfigError` where there are none, or one cannot be read.
    """
    parts = [_section(file, result) for file in sorted(folder.glob("*.json")) if (result := _read(file))]
    if not parts:
        raise ConfigError("DIR", str(folder), "contains no results of `kedge bench`")
    page = folder / PAGE
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>Kedge: results</title><style>{_STYLE}</style>"
    page.write_text(f"{head}<h1>Kedge: results</h1>{''.join(parts)}</html>\n", encoding="utf-8")
    return page


def _read(file: Path) -> Mapping[str, Any] | None:
    """Return a study's results; None for other JSON."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("DIR", str(file), f"is not valid JSON: {error}") from error
    return data if isinstance(data, dict) and {"study", "title", "paper", "rows"} <= set(data) else None


def _section(file: Path, result: Mapping[str, Any]) -> str:
    figure = file.with_suffix(".png")
    picture = ""
    if figure.exists():
        data = base64.b64encode(figure.read_bytes()).decode()
        picture = f'<p><img alt="{escape(result["title"])}" src="data:image/png;base64,{data}"></p>'
    about = ", ".join(f"{key} {value}" for part in ("settings", "machine") for key, value in result[part].items())
    return (
        f"<h2>{escape(result['title'])}: {escape(result['settings']['task'])}</h2>"
        f"<p><code>kedge bench {escape(result['study'])}</code>, {escape(file.name)}, "
        f"{result['seconds']:.0f} s; {escape(about)}</p>{picture}{_table(result['rows'])}"
        f"{''.join(f'<p>{escape(note)}</p>' for note in result.get('notes', ()))}"
        f"<p class=paper>The paper: {escape(result['paper'])}</p>"
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    table = shown(rows)
    head = "".join(f"<th>{escape(heading)}</th>" for heading in table[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row.values()) + "</tr>" for row in table)
    return f"<table><tr>{head}</tr>{body}</table>"


def shown(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Format rows for readers: cells by heading, a mean with its spread, a dash where nothing was measured."""
    return [
        {
            key.replace("_", " "): _cell(value, row.get(f"{key}_sd"))
            for key, value in row.items()
            if not key.endswith("_sd")
        }
        for row in rows
    ]


def _cell(value: object, spread: float | None) -> str:
    if value is None:
        return "–"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if spread is None else f"{text} ±{spread:.2g}"
