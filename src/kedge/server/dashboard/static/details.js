// One run with its calls, or one call: receipts, where the time went, and texts where they are kept.

import { bar, clock, find, h, hint, left, milliseconds, muted, number, plural, render, right, seconds, table } from "./dom.js";
import { agentName, MARKS, partsOf, shortened, sourceName } from "./panels.js";
import { misses, sources, timed } from "./receipts.js";
import { load as fetched } from "./feed.js";

const NO_TEXTS = "Texts are not kept: start the server with --keep-texts (server.keep_texts), or set keep_texts for the tenant.";
const GONE = "The text of this call is no longer kept.";
const FORGOTTEN = "The dashboard remembers only the last ones.";
const calls = new Map(); // number -> what it was made of, and its element
let shown = null;

const chosen = () => /^#(run|call)=(.+)$/.exec(location.hash);

/** Shows what the address names, as of a state. */
export function follow(state) {
  const [hash, kind, which] = chosen() ?? [""];
  const isNew = shown !== hash;
  find("detail").hidden = !hash;
  shown = hash;
  if (!hash) return;
  if (isNew) calls.clear();
  find("detail-title").textContent = kind === "run" ? "Run" : "Call";
  const place = find("detail-body");
  const found = kind === "run" ? state.runs.find((one) => one.id === decodeURIComponent(which)) : state.calls.find((one) => one.number === Number(which));
  const made = JSON.stringify(found, (name, value) => (name === "age_s" ? 0 : value));
  render(place, [hash, made], () => (!found ? hint(FORGOTTEN) : kind === "run" ? runOf(found) : opened(callOf(found))));
  if (!isNew) return;
  if (kind === "run" && found?.calls.length === 1) opened(callOf(found.calls[0]));
  find("detail-title").focus();
}

const opened = (element) => {
  element.open = true;
  return element;
};

function runOf(run) {
  const head = h(
    "p",
    { class: "run-head" },
    h("code", {}, run.id),
    h("span", { class: `status ${run.status}` }, run.status),
    muted(`${run.workflow || "no workflow"}, ${plural(run.calls.length, "call")}, began ${seconds(run.age_s ?? 0)} ago`),
  );
  const reason = run.reason ? h("p", { class: "reason" }, run.reason) : null;
  const list = run.calls.length ? h("ol", { class: "calls" }, [...run.calls].reverse().map((one) => h("li", {}, callOf(one)))) : hint("No call of it came this far.");
  return [head, reason, list];
}

/** A call's element; the one that is there stays, and stays open, while nothing of the call has changed. */
function callOf(one) {
  const made = JSON.stringify({ ...one, age_s: 0 });
  const old = calls.get(one.number);
  if (old?.made === made) return old.element;
  const element = call(one);
  element.open = old?.element.open ?? false;
  calls.set(one.number, { made, element });
  return element;
}

function call(one) {
  const text = h("div", { class: "text" });
  const element = h("details", { class: "call" }, h("summary", {}, ...summary(one)), h("div", { class: "call-body" }, body(one), one.tokens ? text : null));
  element.addEventListener("toggle", () => element.open && one.tokens && showText(one.number, text));
  return element;
}

function summary(one) {
  const state = h("span", { class: `mark ${one.state}`, title: one.state }, MARKS[one.state]);
  const name = h("span", { class: "name" }, agentName(one));
  if (!one.tokens) return [state, name, muted(one.state === "stopped" ? "ended without an answer" : one.state)];
  return [
    state,
    name,
    h("span", { class: "sources" }, bar(partsOf(one.tokens)), h("span", {}, sources(one.tokens))),
    h("span", { class: "right" }, muted("first token "), timed(one.ttft_ms, one.load)),
    h("span", { class: "right" }, muted("answer "), timed(one.total_ms, one.load)),
  ];
}

function body(one) {
  const at = h("p", {}, one.tokens ? "Ended at " : "Since ", clock(one.age_s));
  if (!one.tokens) return [at];
  const run = one.run && !location.hash.startsWith("#run") ? `, run ${shortened(one.run)}` : "";
  at.append(`, reuse ${one.mode}, finish reason ${one.finish_reason}${one.workflow ? `, workflow ${one.workflow}` : ""}${run}.`);
  const parts = Object.entries(one.parts_ms).map(([name, value]) => [name.replaceAll("_", " "), milliseconds(value)]);
  return [
    at,
    h("h3", {}, "Why not better"),
    misses(one),
    h("h3", {}, "Where the time to the first token went"),
    parts.length ? h("div", { class: "scroll" }, table("Time to first token by part", [left("Part"), right("Time")], parts, "parts")) : muted("This engine does not say."),
  ];
}

async function showText(number_, place) {
  const { data, problem } = await fetched(`/v1/dashboard/calls/${number_}`);
  render(place, [data?.text, problem], () => (data?.text ? texts(data.text) : hint(problem ?? (data.keeps_texts ? GONE : NO_TEXTS))));
}

function texts({ prompt, answer }) {
  const segments = [];
  for (const piece of prompt) {
    if (segments.at(-1)?.name !== piece.segment) segments.push({ name: piece.segment, pieces: [] });
    segments.at(-1).pieces.push(piece);
  }
  const from = (piece) => h("span", { class: `from-${piece.source}`, title: `${piece.segment}: ${sourceName(piece.source)}` }, piece.text);
  const keys = [...new Set(prompt.map((piece) => piece.source))].map((one) => h("li", {}, h("span", { class: `swatch fill-${one}`, "aria-hidden": "true" }), sourceName(one)));
  return [
    h("h3", {}, `Prompt, ${plural(segments.length, "segment")}`),
    h("ul", { class: "legend" }, keys),
    h("dl", { class: "prompt" }, segments.map((one) => [h("dt", {}, h("code", {}, one.name)), h("dd", {}, one.pieces.map(from))])),
    h("h3", {}, "Answer"),
    h("p", { class: "answer" }, answer || muted("no text")),
  ];
}
