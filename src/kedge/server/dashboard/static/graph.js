// The step graph of a workflow and where its runs are, from left to right or, where that is too wide, downwards.

import { plural, s } from "./dom.js";

const BOX = { width: 148, height: 50 };
const GAP = { along: 52, across: 18 };
const EDGE = 10;
const ARCH = 16;

/** `flow` as the server draws it, `states` by agent as `statesOf` makes them; `room` in pixels. */
export function graph(flow, states, room) {
  const place = arranged(flow, room);
  const picture = s("svg", {
    viewBox: `0 0 ${place.width} ${place.height}`,
    width: place.width,
    height: place.height,
    role: "img",
    "aria-label": spoken(flow, states),
    class: "graph",
  });
  picture.append(
    s("defs", {}, s("marker", { id: "tip", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
      s("path", { d: "M0 0.5L7.5 4L0 7.5z", class: "tip" }))),
    ...flow.edges.map((edge) => arrow(edge, place, states)),
    ...flow.columns.flat().map((agent) => box(agent, flow, place, states)),
  );
  return picture;
}

/** Agent -> what its live runs say of it or, where none is live, the newest run: a state and a line of text. */
export function statesOf(flow, runs, agents) {
  const mine = runs.filter((run) => run.workflow === flow.name);
  const live = mine.filter((run) => run.status === "running");
  const asked = live.length ? live : mine.slice(0, 1);
  const known = new Map(agents.filter((one) => one.workflow === flow.name).map((one) => [one.agent, one]));
  const entry = (agent) => [agent, stateOf(asked.map((run) => run.agents[agent]).filter(Boolean), known.get(agent))];
  return Object.fromEntries(flow.columns.flat().map(entry));
}

function stateOf(places, agent) {
  const count = (state) => places.filter((place) => place.state === state).length;
  const here = ["running", "waiting", "expected", "stopped", "done"].find(count);
  if (!here) return { state: "idle", text: agent?.calls ? plural(agent.calls, "call") : "not called yet" };
  if (here === "running" || here === "waiting") {
    const both = ["running", "waiting"].filter(count);
    return { state: here, text: places.length > 1 ? both.map((state) => `${count(state)} ${state}`).join(", ") : here };
  }
  const steps = Math.min(...places.map((place) => place.steps ?? Infinity));
  if (Number.isFinite(steps) && steps > 0) return { state: "expected", text: steps === 1 ? "next" : `in ${steps} steps` };
  return { state: here, text: here === "expected" ? "expected" : here };
}

function spoken(flow, states) {
  const agents = flow.columns.flat().map((agent) => {
    const heard = flow.edges.filter((edge) => edge.to === agent).map((edge) => edge.from);
    return `${agent}${heard.length ? ` hears ${heard.join(", ")}` : ""}: ${states[agent].text}`;
  });
  return `Workflow ${flow.name}. ${agents.join(". ")}.`;
}

// where everything stands ---------------------------------------------------------------------------------------------

function arranged(flow, room) {
  const column = Object.fromEntries(flow.columns.flatMap((agents, at) => agents.map((agent) => [agent, at])));
  const span = Math.max(1, ...flow.edges.filter((edge) => !edge.loop).map((edge) => column[edge.to] - column[edge.from]));
  const reach = (span > 1 ? span * ARCH : 0) + EDGE;
  const loops = flow.edges.some((edge) => edge.loop) ? 34 : EDGE;
  const across = Math.max(...flow.columns.map((agents) => agents.length));
  const along = flow.columns.length;
  const wide = 2 * EDGE + along * (BOX.width + GAP.along) - GAP.along;
  const layout = { column, sideways: wide <= room, at: {} };
  return layout.sideways
    ? sideways(layout, flow, { reach, loops, across, wide })
    : downwards(layout, flow, { reach, loops, across, along, room });
}

function sideways(layout, flow, { reach, loops, across, wide }) {
  const tall = across * (BOX.height + GAP.across) - GAP.across;
  flow.columns.forEach((agents, x) => {
    const top = reach + (tall - agents.length * (BOX.height + GAP.across) + GAP.across) / 2;
    agents.forEach((agent, y) => {
      layout.at[agent] = { x: EDGE + x * (BOX.width + GAP.along), y: top + y * (BOX.height + GAP.across), width: BOX.width };
    });
  });
  return { ...layout, width: wide, height: reach + tall + loops };
}

function downwards(layout, flow, { reach, loops, across, along, room }) {
  const inner = Math.max(room - reach - loops, across * 96);
  flow.columns.forEach((agents, y) => {
    const width = Math.min(220, (inner - (agents.length - 1) * GAP.across) / agents.length);
    const left = loops + (inner - agents.length * (width + GAP.across) + GAP.across) / 2;
    agents.forEach((agent, x) => {
      layout.at[agent] = { x: left + x * (width + GAP.across), y: EDGE + y * (BOX.height + 30), width };
    });
  });
  return { ...layout, width: inner + reach + loops, height: 2 * EDGE + along * (BOX.height + 30) - 30 };
}

// what is drawn -------------------------------------------------------------------------------------------------------

function arrow(edge, place, states) {
  const active = ["running", "waiting"].includes(states[edge.to].state);
  const kind = `edge${edge.loop ? " loop" : ""}${active ? " active" : ""}`;
  return s("path", { class: kind, d: path(edge, place), "marker-end": "url(#tip)" });
}

function path(edge, place) {
  const [from, to] = [place.at[edge.from], place.at[edge.to]];
  const span = place.column[edge.to] - place.column[edge.from];
  const middle = (one) => ({ x: one.x + one.width / 2, y: one.y + BOX.height / 2 });
  const [a, b] = [middle(from), middle(to)];
  if (place.sideways) {
    if (edge.loop) {
      const low = Math.max(from.y, to.y) + BOX.height + 30;
      return `M${a.x} ${from.y + BOX.height}C${a.x} ${low} ${b.x - 14} ${low} ${b.x - 14} ${to.y + BOX.height}`;
    }
    if (span > 1) {
      const top = Math.min(from.y, to.y) - span * ARCH;
      return `M${a.x + 8} ${from.y}C${a.x + 20} ${top} ${b.x - 8 * span - 12} ${top} ${b.x - 8 * span} ${to.y}`;
    }
    const [x1, x2] = [from.x + from.width, to.x];
    return `M${x1} ${a.y}C${x1 + 26} ${a.y} ${x2 - 26} ${b.y} ${x2} ${b.y}`;
  }
  if (edge.loop) {
    const left = Math.min(from.x, to.x) - 28;
    return `M${from.x} ${a.y}C${left} ${a.y} ${left} ${b.y + 8} ${to.x} ${b.y + 8}`;
  }
  if (span > 1) {
    const [x1, x2, right] = [from.x + from.width, to.x + to.width, Math.max(from.x + from.width, to.x + to.width) + span * ARCH];
    return `M${x1} ${a.y + 6}C${right} ${a.y + 14} ${right} ${b.y - 6 * span} ${x2} ${b.y - 4 * span + 4}`;
  }
  const [y1, y2] = [from.y + BOX.height, to.y];
  return `M${a.x} ${y1}C${a.x} ${y1 + 14} ${b.x} ${y2 - 14} ${b.x} ${y2}`;
}

function box(agent, flow, place, states) {
  const { x, y, width } = place.at[agent];
  const { state, text } = states[agent];
  const title = flow.titles[agent] ? `${flow.titles[agent]} (${agent})` : agent;
  return s(
    "g",
    { class: `agent ${state}` },
    s("title", {}, `${title}: ${text}`),
    s("rect", { x, y, width, height: BOX.height, rx: 8 }),
    mark(state, x + 17, y + 18),
    s("text", { x: x + 30, y: y + 22, class: "name" }, fitted(agent, width - 38, 7.4)),
    s("text", { x: x + 30, y: y + 39, class: "state" }, fitted(text, width - 38, 6.4)),
  );
}

function mark(state, x, y) {
  if (state === "done") return s("path", { d: `M${x - 4.5} ${y}l3.2 3.4 6-6.8`, class: "mark check" });
  if (state === "stopped") return s("path", { d: `M${x - 4} ${y - 4}l8 8m0-8l-8 8`, class: "mark check" });
  return s("circle", { cx: x, cy: y, r: state === "running" ? 5 : 4.2, class: "mark" });
}

function fitted(text, width, letter) {
  const most = Math.max(4, Math.floor(width / letter));
  return text.length > most ? `${text.slice(0, most - 1)}\u2026` : text;
}
