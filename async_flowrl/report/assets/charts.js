"use strict";
// Line charts by uPlot: bands, a legend that switches lines off, a readout, zoom by dragging, buttons and keys, a table.

const AXES = { step: "step", images: "training images", seconds: "wall clock" };
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3]];
const SMOOTH_FROM = 40;
const WIDEST = 3;
const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((each) => each * 10 ** power));

// The lines of a panel over the shown runs: coloured by line for one run, by run (and dashed by line) for several.
function linesOf(panel, runs) {
  const single = runs.length === 1;
  const drawn = [];
  runs.forEach((run, r) => panel.lines.forEach((line, l) => {
    const data = Object.hasOwn(run.lines, line.key) ? run.lines[line.key] : null;
    if (!data || hiddenRuns.has(run.name)) return;
    const label = single ? line.label : panel.lines.length > 1 ? `${brief(run.name)}: ${line.label}` : brief(run.name);
    drawn.push({ ...data, label, id: `${run.name}/${line.key}`, tint: `c${(single ? l : r) % 8}`,
      dash: single ? [] : DASHES[l % DASHES.length], at: run.x[data.x][ui.axis], points: data.x === "evaluation" });
  }));
  return drawn;
}

function smoothed(values) {
  const reach = Math.max(2, Math.round(values.length / 40));
  return values.map((value, i) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, i - reach), i + reach + 1).filter((each) => each !== null);
    return near.reduce((a, b) => a + b, 0) / near.length;
  });
}

// Columns and series for uPlot. Lines with axes of their own are joined; what a line lacks there is undefined.
function columns(lines) {
  const tables = [], series = [{}], bands = [];
  for (const line of lines) {
    const smooth = ui.smooth && !line.low && line.x === "training" && line.y.length >= SMOOTH_FROM;
    const stroke = () => colour(line.tint), faint = () => colour(line.tint) + "48";
    const part = [line.at];
    const add = (values, options) => { part.push(values); series.push({ spanGaps: true, points: { show: false }, ...options, line }); };
    const points = { show: line.y.length < (line.points ? 60 : 12), size: 6 };
    if (smooth) add(line.y, { stroke: faint, width: 1, raw: true });
    add(smooth ? smoothed(line.y) : line.y, { stroke, width: 2, dash: line.dash, points, main: true });
    if (line.low) {
      add(line.low, { stroke: "transparent", width: 0 });
      add(line.high, { stroke: "transparent", width: 0 });
      bands.push({ series: [series.length - 1, series.length - 2], fill: () => colour(line.tint) + "2e" });
    }
    tables.push(part);
  }
  return { data: tables.length ? uPlot.join(tables) : [[]], series, bands };
}

function axisOptions() {
  const base = { stroke: () => colour("soft"), grid: { stroke: () => colour("grid"), width: 1 }, ticks: { stroke: () => colour("grid") },
    font: "12px system-ui, sans-serif" };
  const x = { ...base, values: (_, ticks) => ticks.map((t) => (ui.axis === "seconds" ? seconds(t) : short(t))), space: 70, size: 32, ...(ui.axis === "seconds" ? {} : { incrs: WHOLE }) };
  const y = { ...base, values: (_, ticks) => ticks.map(short),
    size: (_, labels) => (labels ? Math.max(36, 16 + 7 * Math.max(...labels.map((each) => each.length))) : 44) };
  return [x, y];
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(4))}k`;
  return size !== 0 && size < 1e-3 ? Number(value.toPrecision(3)).toExponential() : String(Number(value.toPrecision(5)));
}

function chart(panel, runs, height = 210) {
  const figure = el("figure", { class: "card", id: `chart-${panel.id}`, tabindex: "-1" });
  let plot = null;
  draws.push(() => {
    plot?.destroy();
    plot = drawn(figure, panel, runs, height);
  });
  return figure;
}

// Fills the figure of a chart, which stands in the page already; returns its plot, or null without values.
function drawn(figure, panel, runs, height) {
  const lines = linesOf(panel, runs).filter((line) => line.y.some((y) => y !== null));
  if (!lines.length) return figure.replaceChildren(el("h3", {}, panel.title), el("p", { class: "soft" }, "Nothing recorded yet.")), null;
  const id = figure.id;
  const holder = el("div", { class: "plot", tabindex: "0", role: "group", "aria-roledescription": "chart", id: `${id}-plot`,
    "aria-label": `${panel.title}. ${lines.slice(0, 4).map(told).join(" ")} Arrow keys read values, plus and minus zoom, 0 shows all.` });
  const readout = el("div", { class: "readout", "aria-live": "polite" });
  const keys = el("div", { class: "keys" }, lines.map((line) => toggle({ class: "key", title: "Show or hide" }, !ui.off.has(line.id), (on) => {
    on ? ui.off.delete(line.id) : ui.off.add(line.id);
    plot.series.forEach((each, i) => each.line === line && plot.setSeries(i, { show: on }));
  }, painted(el("i"), line.tint), line.label)));
  const zoom = (factor) => zoomed(plot, panel.id, factor);
  const values = later("Table", () => valueTable(panel, lines), { open: ui.open[id] });
  values.addEventListener("toggle", () => { ui.open[id] = values.open; });
  zoomKeys(holder, zoom, (direction) => moved(plot, direction));
  figure.replaceChildren(el("div", { class: "head" }, el("h3", {}, panel.title), zoomTools(id, panel.title, zoom)),
    keys, holder, readout, panel.help ? el("p", { class: "help" }, panel.help) : "", values);
  const { data, series, bands } = columns(lines);
  const plot = new uPlot({
    width: Math.max(200, holder.clientWidth), height, legend: { show: false }, bands, axes: axisOptions(),
    series: series.map((each) => (each.line ? { ...each, show: !ui.off.has(each.line.id) } : each)),
    scales: { x: { time: false, range: (_, low, high) => ui.zoom[panel.id] || padded(low, high) }, y: { range: (_, low, high) => readable(lines, low, high) } },
    cursor: { drag: { x: true, y: false }, points: { size: 7 }, focus: { prox: -1 } },
    hooks: {
      setCursor: [(u) => { readout.textContent = readoutOf(u); }],
      setSelect: [(u) => { if (u.select.width > 3) ui.zoom[panel.id] = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]; }],
    },
  }, data, holder);
  plot.over.addEventListener("dblclick", () => zoom(Infinity));
  plot.root.setAttribute("aria-hidden", "true");
  return plot;
}

// The range of the y axis: all of the bands, unless they are so wide that the curves would look flat; then these decide.
function readable(lines, low, high) {
  const known = lines.filter((line) => line.low && !ui.off.has(line.id)).flatMap((line) => line.y.filter((y) => y !== null));
  const [least, most] = [Math.min(...known), Math.max(...known)], reach = WIDEST * (most - least);
  if (known.length && reach > 0 && high - low > 2 * reach) [low, high] = [Math.max(low, least - reach), Math.min(high, most + reach)];
  return low === high || low === null ? padded(low, high) : uPlot.rangeNum(low, high, 0.1, true);
}

// The range of an axis where all values are the same, too: a flat line stands in the middle, or on the ground.
function padded(low, high) {
  if (low === null || (low === 0 && high === 0)) return [0, 1];
  return low === high ? [low - Math.abs(low) / 2, high + Math.abs(high) / 2] : [low, high];
}

function told(line) {
  const known = line.y.map((y, i) => [line.at[i], y]).filter(([, y]) => y !== null);
  const [first, last] = [known[0], known[known.length - 1]];
  return `${line.label}: ${number(first[1])} at ${AXES[ui.axis]} ${number(first[0])}, ${number(last[1])} at ${number(last[0])}.`;
}

function readoutOf(plot) {
  const i = plot.cursor.idx;
  if (i === null || i === undefined || plot.cursor.left < 0) return "";
  const x = plot.data[0][i];
  const parts = [];
  plot.series.forEach((each, s) => {
    if (!each.main || each.show === false) return;
    const at = each.line.at.indexOf(x), value = at < 0 ? null : each.line.y[at];
    if (value === null || value === undefined) return;
    const band = each.line.low && each.line.low[at] !== null ? ` (${number(each.line.low[at])} to ${number(each.line.high[at])})` : "";
    parts.push(`${each.line.label} ${number(value)}${band}`);
  });
  return parts.length ? `${AXES[ui.axis]} ${ui.axis === "seconds" ? seconds(x) : number(x)}: ${parts.join(" · ")}` : "";
}

function zoomed(plot, id, factor) {
  const { min, max } = plot.scales.x, all = plot.data[0];
  ui.zoom[id] = scaled([min, max], [all[0], all[all.length - 1]], factor);
  plot.setData(plot.data);
}

// Moves the cursor, which says the values, by one point.
function moved(plot, direction) {
  const { idx, left } = plot.cursor, last = plot.data[0].length - 1;
  const at = idx === null || idx === undefined || left < 0 ? (direction > 0 ? -1 : last + 1) : idx;
  plot.setCursor({ left: plot.valToPos(plot.data[0][Math.min(last, Math.max(0, at + direction))], "x"), top: 10 });
}

function valueTable(panel, lines) {
  const joined = uPlot.join(lines.map((line) => [line.at, line.y]));
  return table(`${panel.title} against ${AXES[ui.axis]}`, [AXES[ui.axis], ...lines.map((line) => line.label)],
    joined[0].map((x, i) => [number(x), ...joined.slice(1).map((each) => number(each[i] ?? null))]));
}
