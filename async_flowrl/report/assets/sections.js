"use strict";
// The sections of the page, each made from the document alone.

const TITLES = { learning: "Learning", update: "Updates", staleness: "Staleness", time: "Time" };

const titled = (title, run) => (shown.runs.length > 1 ? `${title}: ${brief(run.name)}` : title);

function hero(page, run) {
  const several = page.runs.length > 1, result = run.result;
  if (several) {
    return el("section", { id: "result", tabindex: "-1" }, el("h2", { class: "headline", "data-nav": "Result" }, page.headline), runTable(page),
      el("ul", { class: "callouts" }, page.runs.filter((each) => ["failed", "unfinished"].includes(each.state))
        .map((each) => el("li", { class: "alarm" }, `${each.name}: ${each.result.state}`))));
  }
  return el("section", { id: "result", tabindex: "-1" },
    el("h2", { class: `headline ${result.tone}`, "data-nav": "Result" }, result.headline),
    el("p", { class: "soft" }, result.state, " ", result.error, result.about ? [el("br"), result.about] : ""), result.more.map((each) => el("p", {}, each)));
}

function warnings(run, several) {
  if (!run.warnings.length) return null;
  const known = new Set(shown.panels.map((panel) => panel.id));
  return el("section", { "aria-label": "Warnings" }, el("ul", { class: "callouts" }, run.warnings.map((each) =>
    el("li", { class: each.level }, several ? `${run.name}: ` : "", each.text.replace(/[.!?]?$/, "."), " ", each.todo ? el("strong", {}, each.todo) : "", " ",
      each.panel && known.has(each.panel) ? el("a", { href: `#chart-${each.panel}` }, "See the chart.") : ""))));
}

function runTable(page) {
  return table("Runs", ["run", "state", "steps", "reward, before → after", "images per second", "wall clock", "digest"],
    page.runs.map((run, i) => {
      const facts = Object.fromEntries(run.facts), change = run.change;
      const key = toggle({ class: "key", id: `run-key-${i}`, title: `Show or hide in charts: ${run.name}` }, !hiddenRuns.has(run.name),
        (on) => { on ? hiddenRuns.delete(run.name) : hiddenRuns.add(run.name); redraw(); }, painted(el("i"), `c${i % 8}`), brief(run.name));
      return [el("th", { scope: "row" }, key),
      el("span", { class: `badge ${run.state}` }, run.state), facts.Steps || "0",
      change ? `${number(change.before)} → ${number(change.after)} (${signed(change.mean)}${change.half === null ? "" : ` ± ${rough(change.half)}`})` : run.training ? el("span", { class: "soft" }, `training: ${number(run.training.first)} → ${number(run.training.last)}`) : "–",
      facts["Images per second"] || "–", facts["Wall clock"] || "–", el("td", { class: "mono" }, (run.verification.digest || "–").slice(0, 12))];
    }));
}

function first(page, run) {
  const panel = page.panels.find((each) => each.id === "evaluated") || page.panels.find((each) => each.id === "reward");
  return el("div", { class: "first" }, pairs(run), panel ? el("div", { class: "wide" }, chart(panel, page.runs, 300)) : "");
}

function charts(page, section) {
  const used = page.panels.some((each) => each.id === "evaluated") ? "evaluated" : "reward";
  const panels = page.panels.filter((each) => each.section === section && each.id !== used);
  return panels.length ? el("div", { class: "grid" }, panels.map((panel) => chart(panel, page.runs))) : null;
}

function evaluations(page, run) {
  const data = run.evaluations;
  if (!data) return null;
  const cell = (each) => each
    ? el("td", {}, number(each.mean), each.half === null ? "" : ` ± ${rough(each.half)}`,
        each.change === null || each.change === undefined ? "" : [el("br"), el("small", {}, `${signed(each.change)}${each.change_half === null ? "" : ` ± ${rough(each.change_half)}`}`)])
    : "–";
  const rows = data.rows.map((row) => [row.baseline ? `baseline (${row.steps} steps, guidance ${number(row.guidance)})` : `version ${row.version}`,
    ...data.columns.map((column) => cell(Object.hasOwn(row.cells, column.name) && row.cells[column.name]))]);
  const heads = data.columns.map((column) => el("span", {}, column.name, el("br"), el("small", {}, column.kind)));
  return el("section", { id: "evaluations", tabindex: "-1" }, el("h2", { "data-nav": "Evaluations" }, titled("Evaluations", run)), charts(page, "evaluations"),
    el("div", { class: "card" }, table("Every evaluation", ["version", ...heads], rows), el("p", { class: "help" }, data.explained)));
}

function pools(run) {
  if (!run.pools.length) return null;
  const states = ["busy", ...Object.keys(WAITS)];
  const bar = (each) => el("div", { class: "stack", "aria-hidden": "true" }, states.map((state) => {
    const part = painted(el("i"), tintOf({ pool: each.pool }, state));
    part.style.width = `${100 * each.shares[state]}%`;
    return part;
  }));
  return el("div", { class: "card broad" }, el("h3", {}, titled("Time by pool", run)),
    table(`Shares of the time in which steps were made, mean over the pool's workers${run.shared
      ? "; what rollout and trainer lack is time in which the other one of the same process computed" : ""}`, ["pool", "workers", "shares", ...states.map(doing)],
      run.pools.map((each) => [each.pool, each.workers, bar(each), ...states.map((state) => percent(each.shares[state]))])));
}

function faults(run) {
  const marks = run.timeline?.marks || [];
  if (!marks.length) return null;
  return el("div", { class: "card" }, el("h3", {}, titled("Faults and recoveries", run)),
    table("In the order in which they happened; the timeline marks them", ["after", "what", "message"],
      marks.map((mark) => [seconds(mark.time), mark.kind, el("td", { class: "wrap" }, mark.text)])));
}

function sectionOf(page, run, name) {
  const body = [charts(page, name), ...(name === "time" ? [el("div", { class: "grid more" }, pools(run)), faults(run)] : [])].filter(Boolean);
  return body.length ? el("section", { id: name, tabindex: "-1" }, el("h2", {}, TITLES[name]), body) : null;
}

function settings(page, run) {
  const changed = run.settings.changed, differ = page.differences;
  return el("section", { id: "configuration", tabindex: "-1" }, el("h2", {}, "Configuration"),
    differ ? el("div", { class: "card" }, el("h3", {}, "Differences between the runs"), differ.rows.length
      ? table("Settings that are not the same in all runs", ["setting", ...page.runs.map((each) => each.name)],
          differ.rows.map((row) => [el("th", { scope: "row", class: "mono" }, row.key), ...row.values.map((value) => el("td", { class: "mono wrap" }, value))]))
      : el("p", {}, "None: their configurations are the same.")) : "",
    el("div", { class: "card" }, el("h3", {}, differ ? `${run.name}: differences from the defaults` : "Differences from the defaults"), changed.length
      ? table("", ["setting", "value", "default"], changed.map((each) => [el("th", { scope: "row", class: "mono" }, each.key),
          el("td", { class: "mono wrap" }, each.value), el("td", { class: "mono wrap soft" }, each.default)]))
      : el("p", {}, "None.")),
    later("The whole configuration, as it was resolved", () => el("pre", { tabindex: "0" }, run.settings.all)));
}

function verification(run) {
  const known = run.verification;
  return el("section", { id: "verify", tabindex: "-1" }, el("h2", { "data-nav": "Verify" }, titled("Environment, and how to verify", run)),
    el("div", { class: "card" }, el("h3", {}, "The run in numbers"), definitions(run.facts)),
    el("div", { class: "card" }, el("h3", {}, "Environment"), run.environment.length ? definitions(run.environment) : el("p", {}, "No checkpoint has recorded it yet.")),
    el("div", { class: "card" }, el("h3", {}, "Verify"),
      el("p", {}, known.digest ? ["Digest of the final weights: ", el("code", {}, known.digest), ". Equal digests are equal weights, bit for bit."] : "The digest of the weights is written when the run ends."),
      known.commands.map(([what, command]) => [el("p", { class: "soft" }, `To ${what}:`), el("pre", { class: "wrap", tabindex: "0" }, command)]),
      known.typed ? [el("p", { class: "soft" }, "This run was started with:"), el("pre", { class: "wrap", tabindex: "0" }, known.typed)] : ""));
}

const definitions = (rows) => el("dl", { class: "facts" }, rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
