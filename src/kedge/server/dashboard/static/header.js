// The header's state: the engine's, as far as the page knows it, and how old the figures are.

import { find } from "./dom.js";

const LATE_MS = 15_000; // three times the longest pause between two questions
const SILENT_S = 10;
let link = { state: "connecting", text: "" };
let health = null;
let came = 0;
let asked = 0;
let isClosed = false;

/** The server is `connecting`, `refused` or `lost`, with a text that says why. */
export function connection(state, text) {
  link = { state, text };
  show();
}

/** A state has come. */
export function arrived(state) {
  [link, came, isClosed] = [{ state: "live", text: "live" }, Date.now(), Boolean(state.engine.closed)];
  health = ofEngine(state.health);
  for (const one of document.querySelectorAll(".of-engine")) one.classList.toggle("stale", silence() > SILENT_S);
  show();
}

/** When the engine was asked what it holds; 0 once it has answered. */
export const engine = (at) => (asked = at);

const silence = () => (asked ? (Date.now() - asked) / 1000 : 0);

/** What the server says of the engine, and what only its own answer, or its silence, tells. */
function ofEngine(said) {
  if (isClosed && said.state !== "failed") return { state: "closed", reason: "the engine was closed" };
  if (said.state === "healthy" && silence() > SILENT_S) return { state: "overloaded", reason: `the engine has not answered for ${Math.round(silence())} s` };
  return said;
}

/** Another key, or another server: nothing is known any more. */
export function forget() {
  health = null;
  came = 0;
  isClosed = false;
}

const isGone = () => health !== null && ["failed", "closed"].includes(health.state);
const isLate = () => came > 0 && Date.now() - came > LATE_MS;
const reason = () => (health?.reason ? `: ${health.reason}` : "");

function headline() {
  if (isGone()) return { state: health.state, text: `engine ${health.state}${reason()}` };
  if (link.state === "refused") return { state: "lost", text: link.text };
  if (link.state === "lost") return { state: "lost", text: link.text };
  if (!health) return { state: "connecting", text: "connecting" };
  if (isLate()) return { state: "lost", text: "no news from the server" };
  return { state: health.state.replaceAll(" ", "-"), text: health.state === "healthy" ? "healthy" : `${health.state}${reason()}` };
}

function show() {
  const { state, text } = headline();
  const place = find("status");
  place.dataset.state = state;
  if (place.textContent !== text) place.textContent = place.title = text;
  const isStale = came > 0 && (isGone() || link.state === "lost" || isLate());
  find("board").classList.toggle("stale", isStale);
  const banner = find("banner");
  banner.hidden = !isStale && (state === "healthy" || !health);
  banner.dataset.state = state;
  const age = isStale ? ` The figures below are those of ${new Date(came).toLocaleTimeString("en-GB")}.` : "";
  const said = `${sentence(text)}${isGone() && link.state === "lost" ? " The server does not answer any more." : ""}${age}`;
  if (banner.textContent !== said) banner.textContent = said;
}

const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;

setInterval(show, 1000);
