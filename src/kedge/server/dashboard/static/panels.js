// What each panel shows of a state.

import { bar, bytes, grouped, h, hint, left, load, median, milliseconds, muted, number, percent, plural, right, seconds, table } from "./dom.js";

const SOURCE_NAMES = {
  device: "exact, device",
  host: "exact, host",
  translated: "translated",
  computed: "computed",
};
const LOADS_ALIKE = 1.5;
const MAX_GUARDED = 24;
/** Nats a token by which prompts with their KV in fp8 differ, as production accepts them. */
const FP8 = 0.002;
export const MARKS = { running: "\u25cf", waiting: "\u25cb", done: "\u2713", expected: "\u00b7", stopped: "\u00d7" };

export const sourceName = (source) => SOURCE_NAMES[source] ?? source;

export const partsOf = (tokens) => Object.entries(tokens).map(([name, amount]) => ({ name, amount }));
const sum = (tokens) => Object.values(tokens).reduce((total, one) => total + one, 0);

/** An agent as text; a request that names none is a plain one. */
export const agentName = ({ agent }) => agent || "plain requests";

export function figures(state) {
  const { device, host, computed, ...others } = state.tokens;
  const whole = sum(state.tokens);
  const exact = device + host;
  const reused = exact + sum(others);
  const of = (kinds) => state.receipts.filter((one) => kinds.includes(one.kind));
  const ttft = (kinds) => median(of(kinds).map((one) => one.ttft_ms));
  const at = (kinds) => (of(kinds).length ? `, ${load(median(of(kinds).map((one) => one.load)))}` : "");
  const [reuse, none] = [["exact", "translated"], ["computed"]];
  const live = state.runs.filter((run) => run.status === "running").length;
  return [
    figure("Requests", number(state.requests), `${state.running} running, ${state.waiting} waiting`),
    figure("Prompt tokens reused", percent(reused, whole), `${percent(exact, whole)} exact, ${percent(reused - exact, whole)} translated`),
    figure(
      "Time to first token",
      milliseconds(ttft(reuse)),
      `with reuse${at(reuse)}; ${milliseconds(ttft(none))} where computed${at(none)}`,
    ),
    figure("Runs going on", number(live), `of the last ${state.runs.length}`),
    figure("Refused or failed", number(state.failures.refused + state.failures.failed), `${number(state.failures.refused)} refused, ${number(state.failures.failed)} failed`),
  ];
}

const figure = (name, value, text) => h("div", {}, h("dt", {}, name), h("dd", {}, h("strong", {}, value), h("span", {}, text)));

// runs ----------------------------------------------------------------------------------------------------------------

export function runs(list) {
  if (!list.length) return hint("No run yet. A call belongs to a run when it says so: kedge.run in its body.");
  return h("ul", { class: "runs" }, list.map(run));
}

function run(one) {
  const wentWell = ["finished", "ended"].includes(one.status);
  return h(
    "li",
    {},
    h("p", {}, h("a", { href: `#run=${encodeURIComponent(one.id)}`, title: one.id }, h("code", {}, shortened(one.id))), h("span", { class: `status ${one.status}` }, one.status), muted(story(one, wentWell))),
    one.reason ? h("p", { class: "reason" }, one.reason) : null,
    wentWell ? null : places(one),
  );
}

function story(one, wentWell) {
  const began = [one.workflow, one.age_s === null ? "" : `began ${seconds(one.age_s)} ago`].filter(Boolean).join(", ");
  const calls = Object.values(one.agents).reduce((all, at) => all + at.calls, 0);
  return wentWell ? `${plural(calls, "call")}, ${began}` : began;
}

function places(one) {
  const agents = Object.entries(one.agents).map(([agent, at]) => {
    const soon = at.state === "expected" && at.steps ? ` in ${plural(at.steps, "step")}` : "";
    const said = `${at.state}${soon}`;
    return h(
      "li",
      { class: `chip ${at.state}`, title: said },
      h("span", { "aria-hidden": "true" }, MARKS[at.state]),
      agent || "unnamed",
      h("span", { class: "unseen" }, `: ${said}`),
    );
  });
  return h("ul", { class: "chips", "aria-label": "Agents" }, agents);
}

/** A run's id without what is the same in all of them, and not longer than a line. */
export function shortened(id) {
  const name = id.replace(/^\//, "");
  return name.length > 20 ? `${name.slice(0, 16)}\u2026` : name;
}

// tokens --------------------------------------------------------------------------------------------------------------

export function legend(tokens) {
  const whole = sum(tokens);
  return Object.entries(tokens).map(([source, amount]) =>
    h("li", {}, h("span", { class: `swatch fill-${source}`, "aria-hidden": "true" }), `${sourceName(source)} `, muted(percent(amount, whole))),
  );
}

export function seriesTable(series, sources) {
  const each = 60 / series.seconds;
  const minutes = series.tokens[sources[0]].length / each;
  const inMinute = (source, minute) => series.tokens[source].slice(minute * each, (minute + 1) * each).reduce((a, b) => a + b, 0);
  const rows = Array.from({ length: minutes }, (_, minute) => [
    `${minutes - minute} to ${minutes - minute - 1} min ago`,
    ...sources.map((source) => number(inMinute(source, minute))),
  ]);
  return table("Prompt tokens by source and minute", [left("When"), ...sources.map((one) => right(sourceName(one)))], rows);
}

// times to first token ------------------------------------------------------------------------------------------------

export function ttft(agents) {
  const timed = agents.filter((one) => Object.values(one.ttft_ms).some((kind) => kind.count));
  if (!timed.length) return hint("Nothing has been answered yet.");
  const longest = Math.max(...timed.flatMap((one) => Object.values(one.ttft_ms).map((kind) => kind.median ?? 0)));
  const kinds = ["computed", "exact", "translated"];
  const row = (one) => [agentName(one), ...kinds.map((kind) => timeCell(one.ttft_ms[kind], kind, longest)), gain(one.ttft_ms)];
  const names = [left("Agent"), ...["Computed", "Exact", "Translated", "Gain"].map(right)];
  return grouped("Median time to first token by agent, with the requests in flight", names, byWorkflow(timed), row, "times");
}

function timeCell({ median: value, count, load: inFlight }, kind, longest) {
  if (!count) return muted("\u2013");
  const fill = { exact: "device" }[kind] ?? kind;
  const parts = [{ name: fill, amount: value }];
  return h("span", { class: "time", title: plural(count, "request") }, milliseconds(value), bar(parts, longest), h("small", {}, load(inFlight)));
}

/** How many times faster reuse is; times at very different loads are not compared. */
function gain(kinds) {
  const reused = [kinds.translated, kinds.exact].find((kind) => kind.count);
  if (!kinds.computed.count || !reused) return muted("\u2013");
  const [less, more] = [kinds.computed.load, reused.load].sort((a, b) => a - b);
  if (more > LOADS_ALIKE * less) return h("small", { title: "Times at different loads are not compared." }, "other load");
  return `${(kinds.computed.median / reused.median).toFixed(1)}\u00d7`;
}

/** Rows by the workflow that they belong to, in the order in which the workflows come. */
const byWorkflow = (rows) => [...Map.groupBy(rows, (one) => one.workflow || "no workflow")];

// the cache -----------------------------------------------------------------------------------------------------------

export function tiers(engine) {
  if (!engine.tiers) return null;
  return h(
    "dl",
    { class: "tiers" },
    Object.entries(engine.tiers).map(([name, blocks]) => {
      const all = sum(blocks);
      const parts = Object.entries(blocks).map(([owner, amount]) => ({ name: `block-${owner}`, amount }));
      const said = all
        ? `${number(all - blocks.free)} of ${number(all)} blocks: ${Object.entries(blocks).map(([owner, n]) => `${number(n)} ${owner}`).join(", ")}`
        : "none";
      return h("div", {}, h("dt", {}, `${name} tier`), h("dd", {}, all ? bar(parts) : null, h("span", {}, said)));
    }),
  );
}

export function cached(agents, held) {
  const known = held ?? [];
  if (!known.length) return hint("No agent with a fixed prompt has called yet.");
  const row = (one) => {
    const agent = agents.find((other) => other.agent === one.agent && other.workflow === one.workflow);
    const tiers = ["device", "host"].map((tier) => tokensCell(one[tier], tier, one.fixed));
    return [agentName(one), agent ? nextRun(agent) : muted("unknown"), number(one.fixed), ...tiers];
  };
  const names = [left("Agent"), left("Next run"), ...["Tokens", "Device", "Host"].map(right)];
  return grouped("Where the fixed prompts of agents are cached", names, byWorkflow(known), row);
}

function nextRun(one) {
  if (one.running) return "running";
  if (one.waiting) return "waiting";
  if (one.steps === null) return muted("unknown");
  return one.steps === 0 ? "now" : `in ${plural(one.steps, "step")}`;
}

function tokensCell(amount, tier, whole) {
  return h("span", { class: "time" }, number(amount), bar([{ name: tier, amount }], Math.max(whole, amount)));
}

// anchors and prefetches ----------------------------------------------------------------------------------------------

export function anchors(pools) {
  if (!pools) return hint("This engine does not report its anchors.");
  if (!pools.length) return hint("No anchors yet. They are made from dense prefills of agents that translate.");
  const row = (pool) => [h("span", {}, breakable(pool.placeholder)), ...[pool.anchors, pool.sites, pool.uses].map(number), bytes(pool.nbytes)];
  const sorted = [...pools].sort((a, b) => b.uses - a.uses);
  const names = [left("Placeholder"), ...["Anchors", "Readers", "Uses", "Memory"].map(right)];
  return grouped("Anchor pools by workflow", names, byWorkflow(sorted), row);
}

// the guard -----------------------------------------------------------------------------------------------------------

export function guard(records) {
  if (!records) return hint("This engine has no quality guard.");
  if (!records.length) return hint("Nothing has been translated yet.");
  const row = (one) => [
    h("span", {}, `${agentName(one)}: `, breakable(one.placeholder)),
    h("span", { class: one.withheld ? "status failed" : null, title: one.withheld ? "Answers changed: it is computed and tried out." : "" }, one.withheld ? "withheld" : one.state),
    `${number(one.changed)} of ${number(one.checks)}`,
    one.checks ? percent(one.bound, 1) : muted("\u2013"),
  ];
  const worst = [...records].sort((a, b) => b.withheld - a.withheld || b.bound - a.bound).slice(0, MAX_GUARDED);
  const names = [left("Placeholder"), left("State"), ...["Changed", "At most"].map(right)];
  const more = records.length - worst.length;
  const shown = grouped("How far translation is trusted", names, byWorkflow(worst), row);
  return [fidelity(records), shown, more ? hint(`${number(more)} more in /v1/guard.`) : null];
}

/** How each agent is translated, and how far its answers are from dense prefill. */
function fidelity(records) {
  const agents = [...new Map(records.filter((one) => one.fidelity).map((one) => [JSON.stringify([one.workflow, one.agent]), one])).values()];
  if (!agents.length) return null;
  const nats = (value) => (value === null ? muted("\u2013") : value.toFixed(4));
  const row = (one) => {
    const { rung, mean, bound, budget, checks, curve } = one.fidelity;
    const ways = curve.map(([name, kl, computed]) => `${name}: KL ${nats(kl)}, ${percent(computed, 1)} computed`).join("\n");
    const like = rung ? muted(` ${(mean / FP8).toFixed(1)}\u00d7`) : null;
    return [agentName(one), h("span", { title: ways }, rung || "computed"), h("span", {}, nats(mean), like), nats(bound), nats(budget), number(checks)];
  };
  const away = (one) => one.fidelity.mean ?? Number.MAX_VALUE;
  const worst = agents.sort((a, b) => away(b) - away(a)).slice(0, MAX_GUARDED);
  const names = [left("Agent"), left("Way"), ...["KL (\u00d7 fp8)", "At most", "Budget", "Compared"].map(right)];
  return grouped("How far answers are from dense prefill", names, byWorkflow(worst), row);
}

/** A name that may go on in the next line behind an underscore. */
const breakable = (name) => name.split(/(?<=_)/).flatMap((part) => [part, h("wbr")]);

export function prefetch(engine) {
  if (!engine.prefetch) return null;
  const outcomes = Object.entries(engine.prefetch);
  const total = outcomes.reduce((all, [, count]) => all + count, 0);
  const hasHost = sum(engine.tiers.host) > 0;
  const idle = hasHost ? "Nothing has been prefetched yet." : "There is no host tier to prefetch from (engine.tiers.host_memory).";
  return [
    h("h3", {}, "Prefetches"),
    total ? bar(outcomes.map(([name, amount]) => ({ name: `outcome-${name}`, amount }))) : hint(idle),
    total
      ? h("ul", { class: "legend" }, outcomes.map(([name, count]) => h("li", {}, h("span", { class: `swatch fill-outcome-${name}`, "aria-hidden": "true" }), `${name} `, muted(number(count)))))
      : null,
  ];
}
