// Receipts and failures of the last calls, newest first.

import { bar, clock, h, left, load, milliseconds, muted, number, right, table } from "./dom.js";
import { agentName, partsOf, sourceName } from "./panels.js";

/** A table whose rows stay where they are: `update` adds what is new and drops what is old. */
export function receipts() {
  const names = [left("Time"), left("Agent"), left("Reuse"), left("Prompt tokens"), right("First token"), right("Answer"), left("Why not better")];
  const made = table("Recent receipts, with the requests in flight beside each time", names, [], "receipts");
  const body = made.tBodies[0];
  const rows = new Map();
  const update = (list) => {
    const kept = new Set(list.map((one) => one.number));
    for (const [number_, row] of rows) {
      if (kept.has(number_)) continue;
      row.remove();
      rows.delete(number_);
    }
    for (const one of [...list].reverse().filter((other) => !rows.has(other.number))) {
      rows.set(one.number, receipt(one));
      body.prepend(rows.get(one.number));
    }
  };
  return { element: made, update };
}

function receipt(one) {
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, h("a", { href: `#call=${one.number}`, title: "This call" }, clock(one.age_s))),
    h("td", {}, agentName(one), one.workflow ? h("small", {}, one.workflow) : null),
    h("td", {}, one.mode),
    h("td", { class: "sources" }, bar(partsOf(one.tokens)), h("span", {}, sources(one.tokens))),
    h("td", { class: "right" }, timed(one.ttft_ms, one.load)),
    h("td", { class: "right" }, timed(one.total_ms, one.load)),
    h("td", { class: "misses" }, misses(one)),
  );
}

/** Prompt tokens by source as text. */
export function sources(tokens) {
  const counts = Object.entries(tokens).filter(([, amount]) => amount);
  return counts.map(([source, amount]) => `${number(amount)} ${sourceName(source)}`).join(" \u00b7 ");
}

/** A time with the requests that were in flight when it began. */
export const timed = (value, inFlight) => [milliseconds(value), h("small", {}, load(inFlight))];

/** Reasons, each with the segments that it holds for; the last token of a prompt is computed whatever is cached. */
export function misses({ misses: list, tokens }) {
  const by = Map.groupBy(list, (miss) => miss.reason);
  const lines = [...by].map(([reason, some]) => {
    const names = some.map((miss) => (miss.segment === "*" ? "whole prompt" : miss.segment));
    const shown = names.length > 3 ? `${names.slice(0, 3).join(", ")} and ${names.length - 3} more` : names.join(", ");
    return h("li", {}, h("code", {}, shown), ` ${reason}`);
  });
  if (lines.length) return h("ul", {}, lines);
  return muted(tokens.computed ? "only the last token, which always is computed" : "\u2013");
}

/** Refused and failed calls and runs. */
export function failures(list) {
  const columns = [left("Time"), left("What"), left("Where"), left("Reason")];
  const rows = list.map((one) => [clock(one.age_s), what(one), where(one), one.reason]);
  return table("Refused and failed calls", columns, rows, "failures");
}

function what(one) {
  return h("span", {}, h("b", { class: `failure ${one.kind}` }, one.kind), h("small", {}, `${one.status} ${(one.code ?? one.type).replaceAll("_", " ")}`));
}

function where(one) {
  const place = [one.workflow, one.agent, one.run].filter(Boolean).join(", ");
  return h("span", {}, one.route || "a run", place ? h("small", {}, place) : null);
}
