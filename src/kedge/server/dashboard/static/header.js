// The header's state: the engine's, as far as the page knows it, and how old the figures are.

import { find } from "./dom.js";

const LATE_MS = 15_000; // three times the longest rest between two states
const SILENT_S = 10;
let link = { state: "connecting", text: "" };
let health = null;
let came = 0;

/** The stream is `connecting`, `live` or `lost`, with a text that says why. */
export function connection(state, text) {
  link = { state, text };
  show();
}

/** A state has come. */
export function arrived(state) {
  [health, came] = [state.health, Date.now()];
  for (const one of document.querySelectorAll(".of-engine")) one.classList.toggle("stale", state.health.silent_s > SILENT_S);
  show();
}

/** Another key, or another server: nothing is known any more. */
export function forget() {
  health = null;
  came = 0;
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
