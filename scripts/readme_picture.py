"""Write `docs/images/idea.svg`, the README's picture of the idea: `python scripts/readme_picture.py`.

A test compares the file with what this makes. The picture has a background of its own and follows the reader's colour
scheme, so that it can be read on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

FILE = Path(__file__).parents[1] / "docs" / "images" / "idea.svg"
WIDTH, HEIGHT, TOP_A, TOP_B = 880, 372, 58, 216
BOX, CELL, GAP = 40, 13, 4
STYLE = """
  .page { fill: #ffffff; stroke: #d0d7de } .text { fill: #1f2328 } .faint { fill: #59636e }
  .computed { fill: #e7eaee; stroke: #8c959f } .exact { fill: #d3f2da; stroke: #2da44e }
  .shared { fill: #cfe4ff; stroke: #0969da } .arrow { stroke: #0969da; fill: none } .head { fill: #0969da }
  @media (prefers-color-scheme: dark) {
    .page { fill: #161b22; stroke: #3d444d } .text { fill: #e6edf3 } .faint { fill: #9aa4af }
    .computed { fill: #30363d; stroke: #7d8590 } .exact { fill: #12421f; stroke: #3fb950 }
    .shared { fill: #0c3566; stroke: #4493f8 } .arrow { stroke: #4493f8 } .head { fill: #4493f8 }
  }
  text { font: 14px system-ui, sans-serif } .title { font-weight: 600 } .small { font-size: 12.5px }
"""


class Part(NamedTuple):
    """A part of a prompt: its text, its width in cells of KV, and what it is."""

    text: str
    cells: int
    kind: str


SOLVER = (Part("role: solver", 8, "computed"), Part("question", 13, "shared"), Part("its answer", 12, "shared"))
CRITIC = (
    Part("role: critic", 12, "exact"),
    Part("question", 13, "shared"),
    Part("solver's answer", 12, "shared"),
    Part("task", 5, "computed"),
)
LEGEND = (
    ("exact", "found by a prefix cache"),
    ("shared", "computed in A, translated in B"),
    ("computed", "computed by the model"),
)


def picture() -> str:
    """Return the whole picture as SVG."""
    body = "\n".join([*_row("Prompt A", SOLVER, TOP_A), *_row("Prompt B", CRITIC, TOP_B), *_moves(), *_legend()])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        'aria-label="The KV of a question and an answer moves from prompt A to prompt B and is corrected there">\n'
        f"<style>{STYLE}</style>\n"
        '<marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path class="head" d="M0 0 8 4 0 8z"/></marker>\n'
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10"/>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, style: str = "text", anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, style: str) -> str:
    return f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>'


def _spans(parts: Sequence[Part]) -> Iterator[tuple[Part, float, float]]:
    """Yield every part with its left edge and its width."""
    x = 110.0
    for part in parts:
        width = part.cells * (CELL + GAP)
        yield part, x, width
        x += width + GAP


def _row(title: str, parts: Sequence[Part], top: float) -> Iterator[str]:
    """Yield a prompt: its texts in boxes, and their KV as cells below."""
    yield _text(24, top + BOX / 2 + 5, title, "text title")
    yield _text(24, top + BOX + 21, "its KV", "faint small")
    for part, x, width in _spans(parts):
        yield _rect(x, top, width - GAP, BOX, part.kind)
        yield _text(x + (width - GAP) / 2, top + BOX / 2 + 5, part.text, "text", "middle")
        for i in range(part.cells):
            yield _rect(x + i * (CELL + GAP), top + BOX + 8, CELL, 18, part.kind)


def _moves() -> Iterator[str]:
    """Yield the arrows from the shared KV of prompt A to its places in prompt B."""
    start, stop = TOP_A + BOX + 30, TOP_B - 6
    for (_, x, width), (_, to, to_width) in zip(list(_spans(SOLVER))[1:], list(_spans(CRITIC))[1:3], strict=True):
        a, b, middle = x + width / 2, to + to_width / 2, (start + stop) / 2
        yield f'<path class="arrow" stroke-width="2" marker-end="url(#to)" d="M{a:g} {start} C{a:g} {middle:g} '
        yield f'{b:g} {middle:g} {b:g} {stop}"/>'
    yield _text(646, TOP_A + BOX + 62, "moved to its new position,", "text small")
    yield _text(646, TOP_A + BOX + 80, "corrected for its new context", "text small")
    yield _text(24, 32, "The next agent reads the same question and answer, but other text stands before them", "faint")


def _legend() -> Iterator[str]:
    x = 110.0
    for kind, text in LEGEND:
        yield _rect(x, HEIGHT - 40, CELL, 18, kind)
        yield _text(x + CELL + 8, HEIGHT - 26, text, "faint small")
        x += 240


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
