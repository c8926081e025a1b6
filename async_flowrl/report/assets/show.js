"use strict";
// show(document): the whole page from a document. What a reader chose (`ui`) outlives a redraw.

const ui = { axis: "step", smooth: true, run: null, off: new Set(), zoom: {}, view: {}, gallery: {}, open: {}, timer: 0 };
const hiddenRuns = new Set();
let shown = null;
let draws = [];

function show(page) {
  page.runs.forEach((run, number) => { run.number = number; });
  shown = page;
  redraw();
}

function redraw() {
  const focus = document.activeElement?.id, page = shown, several = page.runs.length > 1;
  const run = page.runs.find((each) => each.name === ui.run) || page.runs[0];
  plots.splice(0).forEach((each) => each.plot?.destroy());
  draws = [];
  clearInterval(ui.timer);
  const body = [
    hero(page, run), page.runs.map((each) => warnings(each, several)), first(page, run), timeline(run),
    sectionOf(page, run, "learning"), evaluations(page, run),
    run.pictures ? el("section", { id: "images", tabindex: "-1" }, el("h2", { "data-nav": "Images" }, titled("Images", run)), browser(run)) : null,
    sectionOf(page, run, "update"), sectionOf(page, run, "staleness"), sectionOf(page, run, "time"),
    settings(page, run), verification(run), others(page), footer(page, run)];
  const main = fill(el("main", {}), {}, body);
  document.getElementById("page").replaceChildren(bar(page, run, main), main);
  draws.forEach((draw) => draw());
  if (focus) document.getElementById(focus)?.focus({ preventScroll: true });
}

function bar(page, run, main) {
  const links = [...main.querySelectorAll("section[id]")].map((each) => [each.id, each.querySelector("h2")?.dataset.nav || each.querySelector("h2")?.textContent]).filter(([, text]) => text);
  const choice = (name, label, values, value, choose) => {
    const node = el("select", { id: name, "aria-label": label, onchange: () => { choose(node.value); redraw(); } },
      values.map(([key, text]) => el("option", { value: key }, text)));
    node.value = value;
    return node;
  };
  return el("header", { class: "top" }, el("div", {}, el("h1", {}, page.title),
    page.runs.length === 1 ? el("span", { class: `badge ${run.state}` }, run.state) : "",
    el("nav", { "aria-label": "Sections" }, links.map(([id, text]) => el("a", { href: `#${id}` }, text))),
    el("div", { class: "tools" },
      page.runs.length > 1 ? choice("run", "Run for timeline, images and configuration", page.runs.map((each) => [each.name, each.name]), run.name, (name) => { ui.run = name; }) : "",
      choice("axis", "Charts against", Object.entries(AXES).map(([key, text]) => [key, `against ${text}`]), ui.axis, (axis) => { ui.axis = axis; ui.zoom = {}; }),
      el("button", { id: "smooth", "aria-pressed": String(ui.smooth), title: "Long curves: a moving average, the values behind it",
        onclick: () => { ui.smooth = !ui.smooth; redraw(); } }, "Smooth"))));
}

function others(page) {
  const panels = page.panels.filter((each) => each.section === "other");
  if (!panels.length) return null;
  const holder = el("div", { class: "grid" });
  const node = el("details", { ontoggle: () => {
    ui.open.others = node.open;
    if (!node.open || holder.childNodes.length) return;
    draws = [];
    holder.append(...panels.map((panel) => chart(panel, page.runs, 160)));
    draws.forEach((draw) => draw());
  } }, el("summary", {}, `All other metrics (${panels.length} charts)`), holder);
  node.open = Boolean(ui.open.others);
  return el("section", { id: "others", tabindex: "-1" }, el("h2", {}, "More"), node);
}

function footer(page, run) {
  return el("footer", {}, page.notes.map((note) => el("p", {}, note)), page.left_out ? el("p", {}, page.left_out) : "",
    el("p", {}, "Drag over a chart to zoom, double-click to see all of it. Metrics are explained in docs/metrics.md. Charts by uPlot (MIT licence)."));
}

let widthBefore = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === widthBefore) return;
  widthBefore = window.innerWidth;
  plots.forEach(({ plot, holder, height, resize }) => (resize ? resize() : plot.setSize({ width: Math.max(200, holder.clientWidth), height })));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());
show(JSON.parse(document.getElementById("document").textContent));
