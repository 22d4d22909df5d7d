// Tokens by source over time, as stacked columns.

import { number, s } from "./dom.js";

const HEIGHT = 210;
const NARROW = 420;
const EDGE = { left: 52, right: 4, top: 8, bottom: 22 };

/** `series` as the server tells it; `sources` from bottom to top; `room` in pixels. */
export function columns(series, sources, room) {
  const count = series.tokens[sources[0]].length;
  const totals = Array.from({ length: count }, (_, at) => sources.reduce((sum, one) => sum + series.tokens[one][at], 0));
  const top = rounded(Math.max(...totals, 10));
  const inner = { width: Math.max(120, room - EDGE.left - EDGE.right), height: HEIGHT - EDGE.top - EDGE.bottom };
  const y = (tokens) => EDGE.top + inner.height * (1 - tokens / top);
  const step = inner.width / count;
  const picture = s("svg", {
    viewBox: `0 0 ${inner.width + EDGE.left + EDGE.right} ${HEIGHT}`,
    role: "img",
    "aria-label": `Prompt tokens by source over the last five minutes; at most ${number(Math.max(...totals))} in ${series.seconds} seconds. The table below has the numbers.`,
    class: "columns",
  });
  for (const share of [0, 0.5, 1]) {
    const line = y(top * share);
    picture.append(
      s("line", { x1: EDGE.left, x2: EDGE.left + inner.width, y1: line, y2: line, class: share ? "grid" : "axis" }),
      s("text", { x: EDGE.left - 8, y: line + 4, "text-anchor": "end" }, number(top * share)),
    );
  }
  totals.forEach((total, at) => {
    if (total) picture.append(stack(series, sources, at, { x: EDGE.left + at * step, width: step, y }));
  });
  const minutes = (count * series.seconds) / 60;
  for (let ago = 0; ago < minutes; ago += inner.width < NARROW ? 2 : 1) {
    const x = EDGE.left + inner.width * (1 - ago / minutes);
    picture.append(s("text", { x, y: HEIGHT - 5, "text-anchor": ago ? "middle" : "end" }, ago ? `\u2212${ago} min` : "now"));
  }
  return picture;
}

function stack(series, sources, at, { x, width, y }) {
  const parts = sources.filter((source) => series.tokens[source][at]);
  const said = parts.map((source) => `${source} ${number(series.tokens[source][at])}`).join(", ");
  const group = s("g", {}, s("title", {}, said));
  let below = 0;
  for (const source of parts) {
    const above = below + series.tokens[source][at];
    const tall = Math.max(0.5, y(below) - y(above) - (below ? 1 : 0));
    group.append(s("rect", { x: x + 0.75, width: Math.max(1, width - 1.5), y: y(above), height: tall, class: `fill-${source}` }));
    below = above;
  }
  return group;
}

/** The next of 10, 20, 30, 40, 50, 60, 80, 100, …, so that half of it is a whole number too. */
function rounded(value) {
  const ten = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 3, 4, 5, 6, 8, 10].map((factor) => factor * ten).find((bound) => bound >= value);
}
