"use strict";
// The timeline: a row per worker, work in its pool's colour, lost time red; windows of steps as tabs, zoom as in charts.

const ROW = 26, FOOT = 24, NAMED = 86;
const WAITS = { wait_data: "waits for data", wait_weights: "waits for weights", sync: "publishes weights", idle: "idle" };
const poolOf = (pool) => (["rollout", "reward", "trainer"].includes(pool.split("/")[0]) ? pool.split("/")[0] : "other");
const isReward = (pool) => poolOf(pool) === "reward";

// Reward workers are cheap beside the others and ought to wait: their waiting is pale.
const tintOf = (lane, state) => (state === "busy" ? poolOf(lane.pool) : isReward(lane.pool) ? "pale" : state);
const doing = (state) => (state === "busy" ? "works" : WAITS[state]);

function timeline(run) {
  const data = run.timeline;
  const figure = el("figure", { class: "card", id: "timeline", tabindex: "-1" });
  if (!data || !data.views.length) return fill(figure, {}, [el("h3", {}, "Timeline"), el("p", { class: "soft" }, "No step has ended yet.")]), figure;
  const chosen = Math.min(ui.view[run.name] || 0, data.views.length - 1), view = data.views[chosen];
  const id = `time-${run.name}-${chosen}`;
  const holder = el("div", { class: "plot", tabindex: "0", role: "group", "aria-roledescription": "timeline", id: "timeline-plot",
    "aria-label": `${view.title}. ${shares(view).map(([place, text]) => `${place} ${text}`).slice(0, 8).join("; ")}. Plus and minus zoom, arrows move, 0 shows all.` });
  const tip = el("div", { class: "tip", hidden: true });
  const draw = () => holder.replaceChildren(picture(run, view, id, holder.clientWidth || 600), tip);
  const change = (window) => { window ? (ui.zoom[id] = window) : delete ui.zoom[id]; draw(); };
  const tool = (text, label, factor) => el("button", { "aria-label": `${label}: timeline`, title: label, id: `timeline-${label.replaceAll(" ", "-")}`,
    onclick: () => change(scaled(ui.zoom[id], view, factor, 0)) }, text);
  holder.addEventListener("keydown", (event) => {
    const act = { "+": [0.5, 0], "=": [0.5, 0], "-": [2, 0], 0: [Infinity, 0], ArrowLeft: [1, -0.2], ArrowRight: [1, 0.2] }[event.key];
    if (!act) return;
    event.preventDefault();
    change(scaled(ui.zoom[id], view, ...act));
  });
  pointer(holder, tip, view, id, change);
  fill(figure, {}, [
    el("div", { class: "head" }, el("h3", {}, titled("Timeline", run)),
      el("div", { class: "tools" }, tool("+", "Zoom in", 0.5), tool("−", "Zoom out", 2), tool("⟲", "Show all", Infinity))),
    el("p", {}, el("strong", {}, run.bottleneck)),
    tabs("view", "Part of the run", data.views.map((each) => each.title), chosen, (index) => { ui.view[run.name] = index; redraw(); }),
    legend(view), holder,
    run.shared ? el("p", { class: "help" }, "rollout-N and trainer-N are one process, which computes for one of them at a time.") : "",
    later("timeline-table", "Table", () => el("div", {}, table(`Shares of time, ${view.title}`, ["worker", "share"], shares(view)),
      data.marks.length ? table("Faults and recoveries", ["after", "what", "message"], data.marks.map((m) => [seconds(m.time), m.kind, m.text])) : ""))]);
  draws.push(() => { draw(); plots.push({ resize: draw, holder }); });
  return figure;
}

function scaled(now, view, factor, shift) {
  const [a, b] = now || [view.start, view.end];
  const width = (b - a) * factor, middle = (a + b) / 2 + (b - a) * shift;
  if (!Number.isFinite(width) || width >= view.end - view.start) return null;
  const start = Math.min(Math.max(view.start, middle - width / 2), view.end - width);
  return [start, start + width];
}

function legend(view) {
  const pools = [...new Set(view.lanes.map((lane) => poolOf(lane.pool)))];
  const states = new Set(view.lanes.flatMap((lane) => (isReward(lane.pool) ? [] : Object.entries(sums(lane, view)).filter(([, share]) => share > 0.002).map(([state]) => state))));
  const keys = pools.map((pool) => [pool, `${pool} works`]);
  Object.entries(WAITS).forEach(([state, text]) => states.has(state) && keys.push([state, text]));
  if (pools.includes("reward")) keys.push(["pale", "reward waits"]);
  return el("div", { class: "keys" }, keys.map(([name, text]) => el("span", { class: "key" }, painted(el("i", { class: "box" }), name), text)));
}

// Worker → its share of each state, in words.
function shares(view) {
  return view.lanes.map((lane) => [lane.place, Object.entries(sums(lane, view)).map(([state, share]) => `${doing(state)} ${percent(share)}`).join(", ")]);
}

function sums(lane, view) {
  const byState = {};
  if (lane.bins) for (const [state, each] of Object.entries(lane.bins)) byState[state] = each.reduce((a, b) => a + b, 0) / each.length;
  else for (const [a, b, state] of lane.bars) byState[state] = (byState[state] || 0) + (b - a) / (view.end - view.start);
  return byState;
}

function picture(run, view, id, width) {
  const [a, b] = ui.zoom[id] || [view.start, view.end];
  const named = width < 500 ? 66 : NAMED;
  const height = view.lanes.length * ROW + FOOT, at = (t) => named + ((t - a) / (b - a || 1)) * (width - named - 4);
  const clip = `clip-${id.replace(/\W/g, "-")}`;
  const bars = svg("g", { "clip-path": `url(#${clip})` });
  const node = svg("svg", { class: "time", viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" },
    svg("clipPath", { id: clip }, svg("rect", { x: named, y: 0, width: Math.max(0, width - named - 2), height })), bars);
  view.lanes.forEach((lane, row) => {
    const name = lane.place.length * 6.6 > named ? `…${lane.place.slice(-Math.floor(named / 7.2))}` : lane.place;
    node.append(svg("text", { class: "name", x: 0, y: row * ROW + 17 }, name));
    (lane.bins ? binned : exact)(lane, row, view, at, bars, [a, b]);
  });
  let free = 0;
  run.timeline.steps.filter(([, from, to]) => to > a + (b - a) / 1000 && from <= b).forEach(([step, from]) => {
    const x = at(Math.max(a, from));
    if (x < free) return;
    free = x + 60;
    if (x > width - 40) return;
    bars.append(painted(svg("line", { x1: x, x2: x, y1: 0, y2: height - FOOT, "stroke-width": 1, opacity: 0.35, "pointer-events": "none" }), "ink", "stroke"));
    node.append(svg("text", { x, y: height - 8 }, `step ${step}`));
  });
  run.timeline.marks.filter((mark) => mark.time >= a && mark.time <= b).forEach((mark) => {
    const x = at(mark.time), told = `${mark.kind} after ${seconds(mark.time)}: ${mark.text}`;
    bars.append(painted(svg("line", { x1: x, x2: x, y1: 0, y2: height - FOOT, "stroke-width": 2, "data-tip": told }), "mark", "stroke"),
      painted(svg("path", { d: `M${x - 6} 0h12l-6 9z`, "data-tip": told }), "mark", "fill"));
  });
  return node;
}

function exact(lane, row, view, at, into, [a, b]) {
  for (const [from, to, state] of lane.bars) {
    if (to < a || from > b) continue;
    const bar = svg("rect", { x: at(from), y: row * ROW + 3, width: Math.max(0.4, at(to) - at(from)), height: ROW - 7,
      "data-state": state, "data-tip": `${lane.place} ${doing(state)} ${seconds(to - from)}` });
    into.append(painted(bar, tintOf(lane, state), "fill"));
  }
}

function binned(lane, row, view, at, into, [a, b]) {
  const count = Object.values(lane.bins)[0]?.length || 0, width = (view.end - view.start) / count;
  for (let i = 0; i < count; i++) {
    const from = view.start + i * width;
    if (from + width < a || from > b) continue;
    let top = row * ROW + ROW - 4;
    for (const [state, each] of Object.entries(lane.bins)) {
      const tall = each[i] * (ROW - 7);
      if (!tall) continue;
      top -= tall;
      into.append(painted(svg("rect", { x: at(from), y: top, width: at(from + width) - at(from) + 0.3, height: tall, "data-state": state,
        "data-tip": `${lane.place} ${doing(state)} ${percent(each[i])}, ${seconds(from)} to ${seconds(from + width)}` }), tintOf(lane, state), "fill"));
    }
  }
}

// Hovering says what a bar is; dragging zooms.
function pointer(holder, tip, view, id, change) {
  let from = null;
  const timeAt = (event) => {
    const box = holder.getBoundingClientRect(), [a, b] = ui.zoom[id] || [view.start, view.end], named = box.width < 500 ? 66 : NAMED;
    return a + Math.min(1, Math.max(0, (event.clientX - box.left - named) / (box.width - named - 4))) * (b - a);
  };
  holder.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") from = timeAt(event); });
  holder.addEventListener("pointermove", (event) => {
    const text = event.target.dataset?.tip;
    tip.hidden = !text;
    if (!text) return;
    const box = holder.getBoundingClientRect(), x = event.clientX - box.left;
    tip.textContent = text;
    tip.style.top = `${event.clientY - box.top + 14}px`;
    tip.style.left = `${Math.max(0, Math.min(x, box.width - tip.offsetWidth - 4))}px`;
  });
  holder.addEventListener("pointerleave", () => { tip.hidden = true; from = null; });
  holder.addEventListener("pointerup", (event) => {
    const to = timeAt(event), [a, b] = [Math.min(from ?? to, to), Math.max(from ?? to, to)];
    const shown = ui.zoom[id] || [view.start, view.end];
    if (from !== null && b - a > (shown[1] - shown[0]) / 100) change([a, b]);
    from = null;
  });
  holder.addEventListener("dblclick", () => change(null));
}
