// What the server has told: the tenant's last calls, and all that follows from them.

import { median } from "./dom.js";

const CALLS = 1024; // as many as the server remembers
const RUNS = 24;
const RECEIPTS = 40;
const SLOT_S = 5; // tokens by source are summed over so many seconds,
const SLOTS = 60; // so many times
const SOURCES = ["device", "host", "translated", "computed"];
const KINDS = ["computed", "exact", "translated"];

const calls = new Map(); // number -> the call, with `at`, in seconds of this machine
let told = null;
let engine = {};

/** Where the page's next question begins: the version of what it knows. */
export const since = () => told?.version ?? 0;

export function forget() {
  calls.clear();
  told = null;
  engine = {};
}

export const takeEngine = (answer) => (engine = { ...engine, ...answer });

/** Takes an answer; returns false where it is another server's, so that everything has to be asked again. */
export function take(answer) {
  if (told && (told.server.started !== answer.server.started || answer.version < told.version)) {
    forget();
    return false;
  }
  const now = Date.now() / 1000;
  for (const call of answer.calls) calls.set(call.number, { ...call, at: now - call.age_s, kind: call.tokens && kindOf(call.tokens) });
  const newest = Math.max(0, ...calls.keys());
  for (const number of calls.keys()) if (number <= newest - CALLS) calls.delete(number);
  told = answer;
  return true;
}

/** The state that the panels show; null before the first answer. Newest first where there is an order. */
export function state() {
  if (!told) return null;
  const now = Date.now() / 1000;
  const all = [...calls.values()].sort((a, b) => b.number - a.number).map((call) => ({ ...call, age_s: Math.round(now - call.at) }));
  const answered = all.filter((call) => call.tokens);
  const failures = { list: told.failures, refused: 0, failed: 0 };
  for (const one of told.failures) failures[one.kind] += 1;
  return {
    ...told,
    engine,
    calls: all,
    requests: all[0]?.number ?? 0,
    ...inFlight(all),
    tokens: bySource(answered),
    agents: agentsOf(all),
    runs: runsOf(all),
    series: { seconds: SLOT_S, tokens: series(answered, now) },
    receipts: [...answered].sort((a, b) => a.age_s - b.age_s).slice(0, RECEIPTS),
    failures,
  };
}

const inFlight = (list) => ({ running: count(list, "running"), waiting: count(list, "waiting") });
const count = (list, state_) => list.filter((call) => call.state === state_).length;
const sum = (numbers) => numbers.reduce((all, one) => all + one, 0);
const bySource = (list) => Object.fromEntries(SOURCES.map((source) => [source, sum(list.map((call) => call.tokens[source]))]));

/** What most of a prompt's tokens were, for comparing times to first token: half of them or more reused, or computed. */
function kindOf(tokens) {
  const exact = tokens.device + tokens.host;
  if (exact + tokens.translated < tokens.computed) return "computed";
  return tokens.translated > exact ? "translated" : "exact";
}

function series(answered, now) {
  const last = Math.floor(now / SLOT_S);
  const slots = Array.from({ length: SLOTS }, () => []);
  for (const call of answered) slots[SLOTS - 1 - (last - Math.floor(call.at / SLOT_S))]?.push(call);
  return Object.fromEntries(SOURCES.map((source) => [source, slots.map((slot) => sum(slot.map((call) => call.tokens[source])))]));
}

function agentsOf(all) {
  const groups = [...Map.groupBy(all, (call) => JSON.stringify([call.workflow, call.agent])).values()];
  const flowOf = new Map([...told.runs.map((one) => [one.id, one.workflow]), ...all.map((call) => [call.run, call.workflow])]);
  const agents = groups.map((mine) => {
    const [{ workflow, agent }] = mine;
    const steps = told.steps.filter((one) => one.agent === agent && flowOf.get(one.run) === workflow).map((one) => one.steps ?? Infinity);
    const timed = mine.filter((call) => call.answer_tokens);
    return { workflow, agent, ...inFlight(mine), calls: count(mine, "done"), steps: finite(Math.min(...steps)), ttft_ms: Object.fromEntries(KINDS.map((kind) => [kind, times(timed, kind)])) };
  });
  return agents.sort((a, b) => a.workflow.localeCompare(b.workflow) || a.agent.localeCompare(b.agent));
}

const finite = (steps) => (Number.isFinite(steps) ? steps : null);

function times(timed, kind) {
  const mine = timed.filter((call) => call.kind === kind);
  return { median: median(mine.map((call) => call.ttft_ms)), load: median(mine.map((call) => call.load)), count: mine.length };
}

/** Runs that a call or a forecast names: the agents of each, and how it stands. */
function runsOf(all) {
  const [named, known] = [Map.groupBy(all, (call) => call.run), new Map(told.runs.map((one) => [one.id, one]))];
  const expected = Map.groupBy(told.steps, (one) => one.run);
  const silent = [...known.keys(), ...expected.keys()].filter((id) => !named.has(id)).reverse();
  return [...new Set([...silent, ...named.keys()])].filter(Boolean).slice(0, RUNS).map((id) => run(id, known.get(id), named.get(id) ?? [], expected.get(id) ?? []));
}

function run(id, known, mine, expected) {
  const agents = Object.fromEntries(expected.map((one) => [one.agent, { state: "expected", calls: 0, steps: one.steps }]));
  for (const call of [...mine].reverse()) {
    const at = (agents[call.agent] ??= { calls: 0, steps: null });
    at.state = call.state;
    at.calls += call.state === "done";
  }
  const workflow = known?.workflow || mine[0]?.workflow || "";
  const age_s = mine.length ? Math.max(...mine.map((call) => call.age_s + (call.total_ms ?? 0) / 1000)) : null; // an ended call's age counts from its end
  return { id, workflow, status: known?.status ?? "ended", reason: known?.reason ?? null, age_s, agents, calls: mine };
}
