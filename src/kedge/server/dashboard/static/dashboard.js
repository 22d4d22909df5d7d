// The page: one state after the other, from what the server has told into the panels.

import { columns } from "./charts.js";
import { follow as followDetail } from "./details.js";
import { find, h, render } from "./dom.js";
import { key, load, poll } from "./feed.js";
import { graph, statesOf } from "./graph.js";
import * as header from "./header.js";
import * as memory from "./memory.js";
import * as panels from "./panels.js";
import { failures, receipts as receiptTable } from "./receipts.js";

const ORDER = ["device", "host", "translated", "computed"];
const PAUSE_MS = 1000;
const ENGINE_PAUSE_MS = 2000;
const RUNS_SHOWN = 6;
const FAILURES_SHOWN = 5;
const THEME = "kedge.theme";
const receipts = receiptTable();
let stops = [];
let latest = null;
let chosen = null;

// what is asked -------------------------------------------------------------------------------------------------------

function connect() {
  disconnect();
  stops = [poll(ask, PAUSE_MS), poll(askEngine, ENGINE_PAUSE_MS)];
}

function disconnect() {
  for (const stop of stops) stop();
}

async function ask(signal) {
  const { data, problem, refused } = await load(`/v1/dashboard?since=${memory.since()}`, signal);
  if (signal.aborted) return false;
  if (refused) askForKey(problem);
  else if (problem) header.connection("lost", problem);
  else if (memory.take(data)) take(memory.state());
  else receipts.update([]); // their numbers begin anew with a server
  return !problem;
}

/** A busy engine answers late, which holds up nothing else. */
async function askEngine(signal) {
  if (!latest) return true;
  header.engine(Date.now());
  const { data } = await load("/v1/dashboard/engine", signal);
  header.engine(0);
  if (signal.aborted || !data) return false;
  memory.takeEngine(data);
  return true;
}

function take(state) {
  latest = state;
  header.arrived(state);
  find("key").hidden = true;
  find("forget").hidden = !key.get();
  show(state);
}

/** Another key: nothing is known any more. */
function forget() {
  latest = null;
  memory.forget();
  receipts.update([]);
  header.forget();
}

function askForKey(message) {
  disconnect();
  forget();
  header.connection("refused", "needs a key");
  for (const id of ["board", "empty", "forget"]) find(id).hidden = true;
  find("key").hidden = false;
  find("key-error").textContent = key.get() ? message : "";
  find("key-input").focus();
}

// the panels ----------------------------------------------------------------------------------------------------------

function show(state) {
  const isEmpty = !state.requests && !state.running && !state.waiting && !state.workflows.length && !state.failures.list.length;
  find("empty").hidden = !isEmpty;
  find("board").hidden = isEmpty;
  find("model").textContent = `${state.server.model}, version ${state.server.version}`;
  if (isEmpty) explain(state.server);
  else fill(state);
}

function explain(server) {
  const keyLine = server.open ? "" : "  -H 'authorization: Bearer YOUR_KEY' \\\n";
  find("base-url").textContent = `${location.origin}/v1`;
  find("curl").textContent =
    `curl ${location.origin}/v1/chat/completions \\\n${keyLine}  -H 'content-type: application/json' \\\n` +
    `  -d '{"model": "${server.model}", "messages": [{"role": "user", "content": "Hello"}]}'`;
}

function fill(state) {
  const sources = ORDER.filter((source) => source in state.tokens);
  const agents = inOrder(state.agents, state.workflows);
  const put = (id, data, build) => render(find(id), data, build);
  put("figures", [state.requests, state.running, state.waiting, state.tokens, state.runs.map((one) => one.status), state.failures], () => panels.figures(state));
  flows(state);
  put("runs", state.runs.map((one) => ({ ...one, calls: [] })), () => panels.runs(state.runs));
  find("all-runs").hidden = state.runs.length <= RUNS_SHOWN;
  put("series", [state.series, find("series").clientWidth], () => columns(state.series, sources, find("series").clientWidth));
  put("series-legend", state.tokens, () => panels.legend(state.tokens));
  put("series-table", state.series, () => panels.seriesTable(state.series, sources));
  put("ttft", agents, () => panels.ttft(agents));
  put("tiers", state.engine.tiers, () => panels.tiers(state.engine));
  put("cached", [agents, state.engine.cached], () => panels.cached(agents, state.engine.cached));
  put("guard", state.engine.guard, () => panels.guard(state.engine.guard));
  put("anchors", state.engine.pools, () => panels.anchors(state.engine.pools));
  put("prefetch", [state.engine.prefetch, state.engine.tiers], () => panels.prefetch(state.engine));
  find("failures-panel").hidden = !state.failures.list.length;
  find("all-failures").hidden = state.failures.list.length <= FAILURES_SHOWN;
  put("failures", state.failures.list.map((one) => ({ ...one, age_s: 0 })), () => failures(state.failures.list));
  receipts.update(state.receipts);
  followDetail(state);
}

/** Agents in the order in which they speak, those of no registered workflow last. */
function inOrder(agents, workflows) {
  const spoken = workflows.flatMap((flow) => flow.columns.flat().map((agent) => `${flow.name}\n${agent}`));
  const at = (one) => (spoken.indexOf(`${one.workflow}\n${one.agent}`) + 1 || Infinity);
  return agents.map((one) => [at(one), one]).sort(([a], [b]) => (a === b ? 0 : a - b)).map(([, one]) => one);
}

function flows(state) {
  const names = state.workflows.map((flow) => flow.name);
  const busiest = state.runs.find((run) => names.includes(run.workflow))?.workflow;
  const name = names.includes(chosen) ? chosen : (busiest ?? names[0]);
  const choice = find("flow-choice");
  choice.hidden = names.length < 2;
  render(choice, names, () => names.map((one) => h("option", { value: one }, one)));
  if (name) choice.value = name;
  find("flow-title").textContent = names.length === 1 ? `Workflow: ${name}` : "Workflow";
  const flow = state.workflows.find((one) => one.name === name);
  const states = flow && statesOf(flow, state.runs, state.agents);
  const room = find("graph").clientWidth;
  const none = () => h("p", { class: "hint" }, "No workflow is registered: POST one to /v1/workflows to see its graph.");
  render(find("graph"), [flow, states, room], () => (flow ? graph(flow, states, room) : none()));
}

// the person ----------------------------------------------------------------------------------------------------------

function isDark() {
  const set = document.documentElement.dataset.theme;
  return set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  find("theme").textContent = isDark() ? "Light" : "Dark";
  find("theme").setAttribute("aria-label", isDark() ? "Change to light colours" : "Change to dark colours");
}

find("theme").addEventListener("click", () => {
  const name = isDark() ? "light" : "dark";
  localStorage.setItem(THEME, name);
  setTheme(name);
});
find("flow-choice").addEventListener("change", (event) => {
  chosen = event.target.value;
  flows(latest);
});
find("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(find("key-input").value.trim());
  find("key-input").value = "";
  forget();
  header.connection("connecting", "connecting");
  connect();
});
for (const name of ["runs", "receipts", "failures"]) {
  const button = find(`all-${name}`);
  button.addEventListener("click", () => {
    const isShort = find(name).classList.toggle("short");
    button.textContent = isShort ? "Show all" : "Show fewer";
    button.setAttribute("aria-expanded", String(!isShort));
  });
}
find("detail-close").addEventListener("click", () => {
  history.pushState(null, "", location.pathname);
  followDetail(latest);
});
addEventListener("hashchange", () => latest && followDetail(latest));
find("forget").addEventListener("click", () => {
  key.forget();
  forget();
  connect();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme());
document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
new ResizeObserver(() => latest && show(latest)).observe(find("main"));

find("receipts").append(receipts.element);
setTheme(localStorage.getItem(THEME));
connect();
