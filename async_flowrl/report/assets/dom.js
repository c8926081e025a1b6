"use strict";
// Elements from data: every text goes in as a text node, so that nothing of a file is ever read as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

const el = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
const svg = (name, attributes, ...children) => fill(document.createElementNS(SVG, name), attributes, children);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const painted = (node, name, property = "background") => ((node.style[property] = `var(--${name})`), node);

function number(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function brief(name) {
  const [folder, ...settings] = name.split(/(?= \()/);
  return [folder.length > 30 ? `${folder.slice(0, 12)}…${folder.slice(-16)}` : folder, ...settings].join("");
}

const rough = (value) => number(Number(value.toPrecision(2)));
const signed = (value) => (value > 0 ? "+" : "") + number(value);
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

function seconds(value) {
  if (Math.abs(value) < 120) return `${number(Number(value.toPrecision(3)))} s`;
  const whole = Math.round(value), minutes = Math.round(value / 60);
  if (whole < 3600) return whole % 60 ? `${Math.floor(whole / 60)} min ${whole % 60} s` : `${whole / 60} min`;
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function table(caption, head, rows) {
  const cell = (name, value) => (value instanceof Node && value.nodeName === name.toUpperCase() ? value : el(name, {}, value));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption || "table" },
    el("table", {}, caption && el("caption", {}, caption),
      head && el("thead", {}, el("tr", {}, head.map((each) => el("th", { scope: "col" }, each)))),
      el("tbody", {}, rows.map(([first, ...rest]) =>
        el("tr", {}, first instanceof Node && first.nodeName === "TH" ? first : el("th", { scope: "row" }, first),
          rest.map((each) => cell("td", each)))))));
}

// Content that is made when it is opened, e.g. a table as the text alternative of a chart.
function later(summary, make, attributes) {
  const holder = el("div");
  const node = el("details", { class: "table", ontoggle: () => node.open && !holder.childNodes.length && holder.append(make()), ...attributes }, el("summary", {}, summary), holder);
  return node;
}

// A button that stays pressed; `change` is told whether it is.
function toggle(attributes, on, change, ...children) {
  const node = el("button", { "aria-pressed": String(on), onclick: () => {
    const now = node.getAttribute("aria-pressed") !== "true";
    node.setAttribute("aria-pressed", String(now));
    change(now);
  }, ...attributes }, children);
  return node;
}

// Zoom by buttons and by keys; `act` is told the factor by which what is shown becomes longer.
const ZOOMS = [["+", "Zoom in", 0.5], ["−", "Zoom out", 2], ["⟲", "Show all", Infinity]];
const zoomTools = (id, title, act) => el("div", { class: "tools" }, ZOOMS.map(([text, label, factor]) =>
  el("button", { "aria-label": `${label}: ${title}`, title: label, id: `${id}-${label.replaceAll(" ", "-")}`, onclick: () => act(factor) }, text)));

function zoomKeys(holder, act, move) {
  holder.addEventListener("keydown", (event) => {
    const factor = { "+": 0.5, "=": 0.5, "-": 2, 0: Infinity }[event.key], direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (factor) act(factor);
    else if (direction) move(direction);
    else return;
    event.preventDefault();
  });
}

// The part of an axis between `ends` that is shown after a zoom and a move by a share of its length; null: all of it.
function scaled([a, b], ends, factor, shift = 0) {
  const width = (b - a) * factor, middle = (a + b) / 2 + (b - a) * shift;
  if (!(width < ends[1] - ends[0])) return null;
  const start = Math.min(Math.max(ends[0], middle - width / 2), ends[1] - width);
  return [start, start + width];
}
