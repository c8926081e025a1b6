"use strict";
// Images: before and after, the browser with its slider through training, and one image large.

const inside = JSON.parse(document.getElementById("pictures").textContent);
const SMALL = 160;

const versionName = (each) => (each.baseline ? "baseline" : `version ${each.version}`);

function sourceOf(run, evaluation, place, index) {
  const file = evaluation.prompts[place]?.files[index];
  if (!file) return null;
  return inside[`${run.number}/${evaluation.folder}/${file}`] || null;
}

function scoreText(each, index) {
  const scores = Object.entries(each?.scores || {}).filter(([, values]) => values[index] !== undefined);
  const text = scores.map(([name, values]) => `${name} ${number(values[index])}`).join(" · ");
  return each?.said?.[index] ? `${text} · ${each.said[index]}` : text;
}

function shot(run, evaluation, prompt, index, caption) {
  const source = evaluation && sourceOf(run, evaluation, prompt.place, index);
  const each = evaluation?.prompts[prompt.place];
  const says = `${evaluation ? versionName(evaluation) : ""}, image ${index + 1} of: ${prompt.text.slice(0, 200)}`;
  const body = source
    ? el("button", { "aria-label": `Enlarge: ${says}`, onclick: () => enlarge(run, prompt, index, evaluation) },
        el("img", { src: source, alt: says, onload: (event) => event.target.classList.toggle("small", event.target.naturalWidth < SMALL) }))
    : el("div", { class: "gone" }, each?.files[index] ? "left out to keep this file small" : "no image");
  return el("figure", { class: "shot" }, body, el("figcaption", {}, caption ? [caption, el("br")] : "", scoreText(each, index)));
}

// The images that a prompt edits; of several the first `most`.
function originals(run, prompt, most = Infinity) {
  return prompt.sources.slice(0, most).map((file) => inside[`${run.number}/${file}`]).map((source) => el("figure", { class: "shot" }, source
    ? el("img", { src: source, alt: `source of: ${prompt.text.slice(0, 200)}`, onload: (event) => event.target.classList.toggle("small", event.target.naturalWidth < SMALL) })
    : el("div", { class: "gone" }, "left out to keep this file small"), el("figcaption", {}, "source")));
}

// The first prompts that both the first and the last version have, in the order of the prompts: not selected by score.
function pairs(run) {
  const policy = run.pictures?.evaluations.filter((each) => !each.baseline) || [], before = policy[0], after = policy[policy.length - 1];
  if (policy.length < 2) return null;
  const both = run.pictures.prompts.filter(({ place }) => before.prompts[place] && after.prompts[place]).slice(0, 4);
  if (!both.length) return null;
  const shown = both.map((prompt) => el("figure", { class: prompt.sources.length ? "pair edited" : "pair" }, originals(run, prompt, 1),
    shot(run, before, prompt, 0, `before: version ${before.version}`), shot(run, after, prompt, 0, `after: version ${after.version}`),
    el("figcaption", { class: "prompt clamp", dir: "auto", title: prompt.text.slice(0, 300) }, prompt.text)));
  return el("section", { class: "card wide", "aria-labelledby": "pairs-title" }, el("h3", { id: "pairs-title" }, "Before and after"),
    el("div", { class: shown.length > 1 ? "pairs" : "pairs one" }, shown),
    el("p", { class: "help" }, "The same prompt and the same initial noise. The first prompts of the file, the first image of each: not chosen by their scores."));
}

function browser(run) {
  const data = run.pictures;
  if (!data) return null;
  const last = data.evaluations.length - 1;
  let timer = 0;
  const grid = el("div", { class: "shots" }), told = el("output", { for: "slider", "aria-live": "polite" }), text = el("p", { class: "prompt", dir: "auto" });
  const show = (index) => {
    const evaluation = data.evaluations[index], prompt = data.prompts.find((each) => String(each.place) === choice.value);
    told.textContent = `${versionName(evaluation)} (${index + 1} of ${last + 1})`;
    slider.setAttribute("aria-valuetext", versionName(evaluation));
    text.textContent = prompt ? prompt.text : "";
    const files = prompt ? Math.max(0, ...data.evaluations.map((each) => each.prompts[prompt.place]?.files.length || 0)) : 0;
    grid.replaceChildren(...(prompt
      ? [...originals(run, prompt), ...Array.from({ length: files }, (_, i) => shot(run, evaluation, prompt, i))]
      : data.prompts.flatMap((each) => [...originals(run, each, 1), shot(run, evaluation, each, 0, el("span", { class: "prompt clamp", dir: "auto" }, each.text))])));
  };
  const slider = el("input", { type: "range", id: "slider", min: 0, max: last, value: last, "aria-label": "Version", oninput: () => show(Number(slider.value)) });
  const choice = el("select", { id: "prompt", onchange: () => show(Number(slider.value)) },
    el("option", { value: "all" }, "all prompts, one image each"),
    data.prompts.map((each) => el("option", { value: each.place }, `${each.place + 1}: ${each.text.slice(0, 70)}`)));
  const next = () => {
    if (!play.isConnected) return clearInterval(timer);
    slider.value = (Number(slider.value) + 1) % (last + 1);
    return show(Number(slider.value));
  };
  const play = toggle({ id: "play" }, false, (on) => {
    clearInterval(timer);
    if (on) timer = setInterval(next, 700);
  }, "Play");
  show(last);
  return el("section", { class: "card", "aria-label": "Images of evaluations" },
    el("div", { class: "bar" }, el("label", {}, "Prompt ", choice)),
    el("div", { class: "bar" }, el("label", { for: "slider" }, "Through training"), slider, told, last > 0 ? play : ""), text, grid);
}

// One image large beside the same of the first evaluation; left and right arrows go through training.
function enlarge(run, prompt, index, evaluation) {
  const list = run.pictures.evaluations.filter((each) => sourceOf(run, each, prompt.place, index));
  const policy = list.filter((each) => !each.baseline);
  let at = list.indexOf(evaluation);
  const body = el("div", { class: prompt.sources.length ? "two edited" : "two" }), title = el("h3", { "aria-live": "polite" });
  const large = (each) => el("figure", { class: "shot" },
    el("img", { src: sourceOf(run, each, prompt.place, index), alt: `${versionName(each)}: ${prompt.text.slice(0, 200)}`,
      onload: (event) => event.target.classList.toggle("small", event.target.naturalWidth < SMALL * 2) }),
    el("figcaption", {}, versionName(each), el("br"), scoreText(each.prompts[prompt.place], index)));
  const show = () => {
    title.textContent = `${versionName(list[at])}, image ${index + 1}`;
    body.replaceChildren(...originals(run, prompt, 1), large(policy[0] || list[0]), large(list[at]));
  };
  const move = (step) => { at = Math.min(list.length - 1, Math.max(0, at + step)); show(); };
  const dialog = el("dialog", { "aria-label": "Image", onclose: () => dialog.remove(), onkeydown: (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) { event.preventDefault(); move(step); }
  } }, el("div", { class: "bar" }, title, el("button", { onclick: () => move(-1) }, "Earlier"), el("button", { onclick: () => move(1) }, "Later"),
    el("button", { onclick: () => dialog.close(), autofocus: true }, "Close")), body, el("p", { class: "prompt", dir: "auto" }, prompt.text));
  document.body.append(dialog);
  show();
  dialog.showModal();
}
