"use strict";
// The timeline: a row per worker, work in its pool's colour, lost time red; a choice of windows of steps, zoom as in charts.

const ROW = 26, FOOT = 24;
const WAITS = { wait_data: "waits for data", wait_weights: "waits for weights", sync: "publishes weights", idle: "idle" };
const poolOf = (pool) => (["rollout", "reward", "trainer"].includes(pool.split("/")[0]) ? pool.split("/")[0] : "other");
const isReward = (pool) => poolOf(pool) === "reward";
const named = (width) => (width < 500 ? 66 : 86);

// Reward workers are cheap beside the others and ought to wait: their waiting is pale.
const tintOf = (lane, state) => (state === "busy" ? poolOf(lane.pool) : isReward(lane.pool) ? "pale" : state);
const doing = (state) => (state === "busy" ? "works" : WAITS[state]);

function timeline(run) {
  const data = run.timeline;
  const figure = el("figure", { class: "card", id: "timeline", tabindex: "-1" });
  if (!data || !data.views.length) return fill(figure, {}, [el("h3", {}, "Timeline"), el("p", { class: "soft" }, "No step has ended yet.")]);
  let view, zoom;
  const holder = el("div", { class: "plot", tabindex: "0", role: "group", "aria-roledescription": "timeline", id: "timeline-plot" });
  const keys = el("div", { class: "keys" }), values = el("div");
  const draw = () => holder.replaceChildren(picture(run, view, zoom, holder.clientWidth || 600));
  const change = (window) => { zoom = window || [view.start, view.end]; draw(); };
  const act = (factor, shift) => change(scaled(zoom, [view.start, view.end], factor, shift));
  const choose = (chosen) => {
    view = chosen;
    holder.setAttribute("aria-label", `${view.title}. ${shares(view).map(([place, text]) => `${place} ${text}`).slice(0, 8).join("; ")}. Plus and minus zoom, arrows move, 0 shows all.`);
    keys.replaceChildren(...legend(view));
    values.replaceChildren(later("Table", () => table(`Shares of time, ${view.title}`, ["worker", "share"], shares(view))));
    change(null);
  };
  zoomKeys(holder, act, (direction) => act(1, direction / 5));
  dragging(holder, () => zoom, change);
  draws.push(() => (view ? draw() : choose(data.views[0])));
  return fill(figure, {}, [
    el("div", { class: "head" }, el("h3", {}, titled("Timeline", run)), zoomTools("timeline", "timeline", act)),
    el("p", {}, el("strong", {}, run.bottleneck)),
    el("fieldset", { class: "bar" }, el("legend", { class: "unseen" }, "Part of the run"), data.views.map((each, i) => el("label", { class: "choice" },
      el("input", { type: "radio", name: "view", id: `view-${i}`, checked: i === 0, onchange: () => choose(each) }), each.title))),
    keys, holder, run.shared ? el("p", { class: "help" }, "rollout-N and trainer-N are one process, which computes for one of them at a time.") : "", values]);
}

function legend(view) {
  const pools = [...new Set(view.lanes.map((lane) => poolOf(lane.pool)))];
  const states = new Set(view.lanes.flatMap((lane) => (isReward(lane.pool) ? [] : Object.entries(sums(lane, view)).filter(([, share]) => share > 0.002).map(([state]) => state))));
  const keys = pools.map((pool) => [pool, `${pool} works`]);
  Object.entries(WAITS).forEach(([state, text]) => states.has(state) && keys.push([state, text]));
  if (pools.includes("reward")) keys.push(["pale", "reward waits"]);
  return keys.map(([name, text]) => el("span", { class: "key" }, painted(el("i", { class: "box" }), name), text));
}

// Bars of a lane: exact ones are as tall as the lane, those of shares of time stand on each other.
function barsOf(lane, view) {
  if (lane.bars) return lane.bars.map(([from, to, state]) => ({ from, to, state, low: 0, share: 1 }));
  const low = [];
  return Object.entries(lane.bins).flatMap(([state, parts]) => parts.map((share, i) => {
    const width = (view.end - view.start) / parts.length, from = view.start + i * width, below = low[i] || 0;
    low[i] = below + share;
    return { from, to: from + width, state, low: below, share };
  }));
}

function sums(lane, view) {
  const byState = {};
  for (const bar of barsOf(lane, view)) byState[bar.state] = (byState[bar.state] || 0) + (bar.to - bar.from) * bar.share / (view.end - view.start);
  return byState;
}

// Worker → its share of each state, in words.
function shares(view) {
  return view.lanes.map((lane) => [lane.place, Object.entries(sums(lane, view)).map(([state, share]) => `${doing(state)} ${percent(share)}`).join(", ")]);
}

function picture(run, view, [a, b], width) {
  const left = named(width), height = view.lanes.length * ROW + FOOT, at = (t) => left + ((t - a) / (b - a || 1)) * (width - left - 4);
  const bars = svg("g", { "clip-path": "url(#lanes)" });
  const node = svg("svg", { class: "time", viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" },
    svg("clipPath", { id: "lanes" }, svg("rect", { x: left, y: 0, width: Math.max(0, width - left - 2), height })), bars);
  view.lanes.forEach((lane, row) => {
    const name = lane.place.length * 6.6 > left ? `…${lane.place.slice(-Math.floor(left / 7.2))}` : lane.place;
    node.append(svg("text", { class: "name", x: 0, y: row * ROW + 17 }, name));
    for (const { from, to, state, low, share } of barsOf(lane, view)) {
      if (to < a || from > b || !share) continue;
      const time = lane.bars ? seconds(to - from) : `${percent(share)}, ${seconds(from)} to ${seconds(to)}`;
      bars.append(painted(svg("rect", { x: at(from), y: row * ROW + 3 + (1 - low - share) * (ROW - 7), width: Math.max(0.4, at(to) - at(from)),
        height: share * (ROW - 7), "data-state": state }, svg("title", {}, `${lane.place} ${doing(state)} ${time}`)), tintOf(lane, state), "fill"));
    }
  });
  const upright = (x, tint, options) => painted(svg("line", { x1: x, x2: x, y1: 0, y2: height - FOOT, ...options }), tint, "stroke");
  let free = 0;
  run.timeline.steps.filter(([, from, to]) => to > a + (b - a) / 1000 && from <= b).forEach(([step, from]) => {
    const x = at(Math.max(a, from));
    if (x < free) return;
    free = x + 60;
    if (x > width - 40) return;
    bars.append(upright(x, "ink", { "stroke-width": 1, opacity: 0.35, "pointer-events": "none" }));
    node.append(svg("text", { x, y: height - 8 }, `step ${step}`));
  });
  run.timeline.marks.filter((mark) => mark.time >= a && mark.time <= b).forEach((mark) => {
    const x = at(mark.time), told = `${mark.kind} after ${seconds(mark.time)}: ${mark.text}`;
    bars.append(upright(x, "mark", { "stroke-width": 2 }), painted(svg("path", { d: `M${x - 6} 0h12l-6 9z` }, svg("title", {}, told)), "mark", "fill"));
  });
  return node;
}

function dragging(holder, shown, change) {
  let from = null;
  const timeAt = (event) => {
    const box = holder.getBoundingClientRect(), [a, b] = shown(), left = named(box.width);
    return a + Math.min(1, Math.max(0, (event.clientX - box.left - left) / (box.width - left - 4))) * (b - a);
  };
  holder.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") from = timeAt(event); });
  holder.addEventListener("pointerleave", () => { from = null; });
  holder.addEventListener("pointerup", (event) => {
    const to = timeAt(event), [a, b] = [Math.min(from ?? to, to), Math.max(from ?? to, to)];
    if (b - a > (shown()[1] - shown()[0]) / 100) change([a, b]);
    from = null;
  });
  holder.addEventListener("dblclick", () => change(null));
}
