"use strict";
// The whole page from its document. What a reader chose for the charts (`ui`) outlives their redraw.

const ui = { axis: "step", smooth: true, off: new Set(), zoom: {}, open: {} };
const hiddenRuns = new Set();
const shown = JSON.parse(document.getElementById("document").textContent);
// Functions that draw charts and the timeline once they stand in the page, and again after a change of axis, width or colours.
const draws = [];
const redraw = () => draws.forEach((draw) => draw());

function show(page, run) {
  draws.length = 0;
  const main = el("main", {},
    hero(page, run), page.runs.map((each) => warnings(each, page.runs.length > 1)), first(page, run), timeline(run),
    sectionOf(page, run, "learning"), evaluations(page, run),
    run.pictures ? el("section", { id: "images", tabindex: "-1" }, el("h2", { "data-nav": "Images" }, titled("Images", run)), browser(run)) : null,
    sectionOf(page, run, "update"), sectionOf(page, run, "staleness"), sectionOf(page, run, "time"),
    settings(page, run), verification(run), others(page), footer(page));
  document.getElementById("page").replaceChildren(bar(page, run, main), main);
  redraw();
}

function bar(page, run, main) {
  const links = [...main.querySelectorAll("section[id]")].map((each) => [each.id, each.querySelector("h2")?.dataset.nav || each.querySelector("h2")?.textContent]).filter(([, text]) => text);
  const choice = (name, label, values, value, choose) => {
    const node = el("select", { id: name, "aria-label": label, onchange: () => choose(node.value) },
      values.map(([key, text]) => el("option", { value: key }, text)));
    node.value = value;
    return node;
  };
  const pick = (name) => { show(page, page.runs.find((each) => each.name === name)); document.getElementById("run").focus({ preventScroll: true }); };
  return el("header", { class: "top" }, el("div", {}, el("h1", {}, page.title),
    page.runs.length === 1 ? el("span", { class: `badge ${run.state}` }, run.state) : "",
    el("nav", { "aria-label": "Sections" }, links.map(([id, text]) => el("a", { href: `#${id}` }, text))),
    el("div", { class: "tools" },
      page.runs.length > 1 ? choice("run", "Run for timeline, images and configuration", page.runs.map((each) => [each.name, each.name]), run.name, pick) : "",
      choice("axis", "Charts against", Object.entries(AXES).map(([key, text]) => [key, `against ${text}`]), ui.axis, (axis) => { ui.axis = axis; ui.zoom = {}; redraw(); }),
      toggle({ id: "smooth", title: "Long curves: a moving average, the values behind it" }, ui.smooth, (on) => { ui.smooth = on; redraw(); }, "Smooth"))));
}

function others(page) {
  const panels = page.panels.filter((each) => each.section === "other");
  if (!panels.length) return null;
  const node = later(`All other metrics (${panels.length} charts)`, () => {
    const before = draws.length, grid = el("div", { class: "grid" }, panels.map((panel) => chart(panel, page.runs, 160)));
    queueMicrotask(() => draws.slice(before).forEach((draw) => draw()));
    return grid;
  }, { class: null });
  return el("section", { id: "others", tabindex: "-1" }, el("h2", {}, "More"), node);
}

function footer(page) {
  return el("footer", {}, page.notes.map((note) => el("p", {}, note)), page.left_out ? el("p", {}, page.left_out) : "",
    el("p", {}, "Drag over a chart to zoom, double-click to see all of it. Metrics are explained in docs/metrics.md. Charts by uPlot (MIT licence)."));
}

let widthBefore = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== widthBefore) redraw();
  widthBefore = window.innerWidth;
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
shown.runs.forEach((run, number) => { run.number = number; });
show(shown, shown.runs[0]);
