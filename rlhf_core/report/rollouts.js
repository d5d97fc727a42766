"use strict";

// The page's data are JSON, gzipped, in base64: an index with the texts, and blocks with the tokens of some rollouts each.
async function unpack(element) {
  const bytes = Uint8Array.from(atob(element.textContent), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

const ROW = 54; // height of a row in pixels, as in the style
const SPARE = 6; // rows drawn beyond each edge of the list
const TOKENS = 4000; // shown at once of a response
const CACHED = 16; // blocks
const LABELS = {
  reward: "reward before KL", score: "score", advantage: "advantage (mean)", kl: "KL (sum, nats)", mismatch: "trainer less engine (largest)", tokens: "sampled tokens",
};
const label = (name) => LABELS[name] ?? name.replace(/^score_/, "score: ");

const controls = document.getElementById("controls");
const list = document.getElementById("list");
const details = document.getElementById("details");
const blocks = [...document.querySelectorAll(".block")];
const cache = new Map();
let data;
let entries = []; // of the list: {rollout} or {head, text, members}
let chosen = -1; // place in `entries`
let kept = null; // rollout that stays beside the chosen one
let only = null; // number of the one prompt that is shown
let lowered; // texts in lower case, made at the first search

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// Characters that can't be seen, or that reorder text, by number.
function visible(text) {
  return text.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, (c) =>
    "\n\t\u200c\u200d".includes(c) ? c : `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const text = Number.isInteger(value) ? value.toLocaleString("en") : size < 1e-3 || size >= 1e6 ? value.toExponential(2) : value.toPrecision(3);
  return text.replace("-", "−");
}

const field = (name) => controls.elements[name].value;
const snippet = (text) => visible(text.slice(0, 160).replace(/\s+/g, " "));

function promptSnippet(prompt) {
  const [head, tail] = data.common;
  const text = data.prompts[prompt][0];
  return snippet(text.slice(head, text.length - tail) || text);
}

// The list ------------------------------------------------------------------------------------------------------------

function matching() {
  const measure = data.measures[field("measure")] ?? [];
  const [text, finished] = [field("text").trim().toLowerCase(), field("finished")];
  const steps = [field("step"), field("step") && field("other")].filter(Boolean).map(Number);
  const [from, to] = [field("from"), field("to")].map((value) => (value === "" ? null : Number(value)));
  if (text && lowered === undefined) {
    lowered = {prompts: data.prompts.map(([prompt]) => prompt.toLowerCase()), responses: data.response.map((response) => response.toLowerCase())};
  }
  const found = [];
  for (let i = 0; i < data.step.length; i++) {
    if (steps.length && !steps.includes(data.step[i])) continue;
    if (only !== null && data.prompt[i] !== only) continue;
    if (finished && data.finished[i] !== Number(finished)) continue;
    const value = measure[i] ?? null;
    if ((from !== null || to !== null) && (value === null || value < (from ?? -Infinity) || value > (to ?? Infinity))) continue;
    if (text && !lowered.responses[i].includes(text) && !lowered.prompts[data.prompt[i]].includes(text)) continue;
    found.push(i);
  }
  const sign = Number(field("order"));
  if (sign) {
    const worst = sign > 0 ? Infinity : -Infinity;
    found.sort((a, b) => sign * ((measure[a] ?? worst) - (measure[b] ?? worst)) || a - b);
  }
  return found;
}

// One entry for each rollout; with a heading for each prompt, where prompts are together. Prompts of both compared steps come first.
function toEntries(found) {
  if (!controls.elements.grouped.checked) return found.map((rollout) => ({rollout}));
  const groups = new Map();
  for (const rollout of found) {
    const prompt = data.prompt[rollout];
    if (!groups.has(prompt)) groups.set(prompt, []);
    groups.get(prompt).push(rollout);
  }
  const stepsOf = (members) => new Set(members.map((i) => data.step[i])).size;
  const ordered = [...groups].map(([prompt, members]) => ({prompt, members, shared: stepsOf(members) > 1}));
  if (field("other")) ordered.sort((a, b) => b.shared - a.shared);
  return ordered.flatMap(({prompt, members}) => [{head: prompt, members}, ...members.map((rollout) => ({rollout}))]);
}

function refresh() {
  const before = entries[chosen]?.rollout;
  const found = matching();
  entries = toEntries(found);
  chosen = entries.findIndex((entry) => entry.rollout === before && before !== undefined);
  list.querySelector(".space").style.height = `${entries.length * ROW}px`;
  controls.querySelector("output").textContent = `${found.length.toLocaleString("en")} of ${data.step.length.toLocaleString("en")}`;
  controls.elements.only.hidden = only === null;
  controls.elements.only.textContent = only === null ? "" : `Only the prompt “${promptSnippet(only).slice(0, 40)}” ✕`;
  if (chosen < 0) choose(entries.findIndex((entry) => entry.rollout !== undefined), {scroll: false});
  if (chosen < 0) details.replaceChildren(make("p", {className: "muted", textContent: "No rollout matches."}));
  list.scrollTop = chosen > 0 ? list.scrollTop : 0;
  drawRows();
}

function drawRows() {
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - SPARE);
  const last = Math.min(entries.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + SPARE);
  const rows = [];
  for (let at = first; at < last; at++) rows.push(drawRow(entries[at], at));
  list.replaceChildren(list.querySelector(".space"), ...rows);
  if (entries[chosen] && chosen >= first && chosen < last) list.setAttribute("aria-activedescendant", `row-${chosen}`);
  else list.removeAttribute("aria-activedescendant");
}

function drawRow(entry, at) {
  const measure = field("measure");
  const row = make("div", {className: "row", id: `row-${at}`});
  row.style.top = `${at * ROW}px`;
  row.dataset.at = at;
  if (entry.rollout === undefined) {
    const values = entry.members.map((i) => data.measures[measure][i]).filter((value) => value !== null);
    const mean = values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
    row.classList.add("head");
    row.setAttribute("role", "presentation");
    const count = `${entry.members.length} rollout${entry.members.length > 1 ? "s" : ""}, mean ${label(measure)}`;
    row.append(make("span", {className: "snippet", dir: "auto", textContent: promptSnippet(entry.head)}),
      make("div", {}, make("span", {className: "muted", textContent: count}), make("span", {className: "value", textContent: number(mean)})));
    return row;
  }
  const i = entry.rollout;
  row.setAttribute("role", "option");
  row.setAttribute("aria-selected", String(at === chosen));
  const ended = data.finished[i] ? "" : " · cut off";
  row.append(
    make("div", {},
      make("span", {textContent: `step ${data.step[i]} · group ${data.group[i]}${ended}`}),
      make("span", {className: "muted", dir: "auto", textContent: controls.elements.grouped.checked ? "" : promptSnippet(data.prompt[i])}),
      make("span", {className: "value", textContent: number(data.measures[measure][i])})),
    make("span", {className: "snippet", dir: "auto", textContent: snippet(data.response[i]) || "(empty)"}));
  return row;
}

function choose(at, {scroll = true} = {}) {
  if (entries[at]?.rollout === undefined) return;
  chosen = at;
  if (scroll) {
    const top = at * ROW;
    if (top < list.scrollTop) list.scrollTop = top;
    if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
  }
  drawRows();
  show();
}

// The next entry with a rollout from `at` on, in the direction of `step`.
function nearest(at, step) {
  let place = Math.min(Math.max(at, 0), entries.length - 1);
  while (entries[place] && entries[place].rollout === undefined) place += step;
  return entries[place] ? place : chosen;
}

const page = () => Math.max(1, Math.floor(list.clientHeight / ROW) - 1);
const LIST_KEYS = {
  ArrowDown: () => nearest(chosen + 1, 1),
  ArrowUp: () => nearest(chosen - 1, -1),
  PageDown: () => nearest(chosen + page(), 1),
  PageUp: () => nearest(chosen - page(), -1),
  Home: () => nearest(0, 1),
  End: () => nearest(entries.length - 1, -1),
};

// The chosen rollout --------------------------------------------------------------------------------------------------

function tokensOf(rollout) {
  const block = Math.floor(rollout / data.block);
  if (!cache.has(block)) {
    if (cache.size >= CACHED) cache.delete(cache.keys().next().value);
    cache.set(block, unpack(blocks[block]));
  }
  return cache.get(block).then((unpacked) => unpacked[rollout % data.block]);
}

let showing = 0;

async function show() {
  const turn = ++showing;
  const rollouts = [kept, entries[chosen]?.rollout].filter((i, at, all) => i !== null && i !== undefined && all.indexOf(i) === at);
  const tokens = await Promise.all(rollouts.map(tokensOf));
  if (turn !== showing) return;
  const panes = make("div", {className: rollouts.length > 1 ? "panes two" : "panes"});
  rollouts.forEach((rollout, at) => panes.append(pane(rollout, tokens[at])));
  details.replaceChildren(legend(), panes);
}

function pane(i, tokens) {
  const [prompt, id, source, expected] = data.prompts[data.prompt[i]];
  const keep = make("button", {type: "button", textContent: kept === i ? "Don't keep" : "Keep beside"});
  keep.setAttribute("aria-pressed", String(kept === i));
  keep.addEventListener("click", () => { kept = kept === i ? null : i; show(); });
  const facts = make("dl", {className: "facts"});
  const told = [...Object.keys(data.measures).map((name) => [label(name), number(data.measures[name][i])]), ["ended", data.finished[i] ? "by the model" : "cut off"]];
  if (expected !== null) told.push(["label", visible(expected)]);
  for (const [name, value] of told) facts.append(make("div", {}, make("dt", {textContent: name}), make("dd", {textContent: value})));
  const alone = make("button", {type: "button", textContent: "Only this prompt"});
  alone.addEventListener("click", () => { only = data.prompt[i]; refresh(); });
  return make("section", {className: "pane"},
    make("h2", {}, `Step ${data.step[i]}, group ${data.group[i]}`, make("span", {className: "chip", textContent: visible(source)}), keep),
    facts,
    make("h3", {}, "Prompt, as the model reads it ", make("span", {className: "chip", textContent: visible(id)})),
    make("div", {className: "text", dir: "auto", tabIndex: 0, textContent: visible(prompt)}),
    make("h3", {textContent: "Response"}),
    ...response(tokens),
    make("h3", {textContent: "Its group"}),
    siblings(i), make("p", {}, alone));
}

function siblings(i) {
  const measure = field("measure");
  const box = make("div", {className: "siblings"});
  for (let j = 0; j < data.step.length; j++) {
    if (data.step[j] !== data.step[i] || data.group[j] !== data.group[i]) continue;
    const button = make("button", {type: "button", textContent: number(data.measures[measure][j]), title: snippet(data.response[j])});
    button.setAttribute("aria-label", `${label(measure)} ${number(data.measures[measure][j])}: ${snippet(data.response[j])}`);
    button.setAttribute("aria-current", String(i === j));
    button.addEventListener("click", () => reveal(j));
    box.append(button);
  }
  return box;
}

// Chooses a rollout, which the filters may hide.
function reveal(rollout) {
  let at = entries.findIndex((entry) => entry.rollout === rollout);
  if (at < 0) {
    for (const name of ["text", "finished", "from", "to", "step", "other"]) controls.elements[name].value = "";
    only = data.prompt[rollout];
    refresh();
    at = entries.findIndex((entry) => entry.rollout === rollout);
  }
  choose(at);
}

const valueAt = (values, place) => (Array.isArray(values) ? values[place] : values);
const COLOURED = {advantage: "a", kl: "k", mismatch: "m"};

function legend() {
  const name = field("colour");
  const bar = make("div", {className: "legend"});
  const scale = data.scales[name];
  if (scale) {
    bar.append(make("span", {}, `${controls.elements.colour.selectedOptions[0].textContent}: ${number(-scale)}`, make("i"), number(scale)));
    bar.append("Strong values are underlined, negative ones by dots.");
  }
  if (data.untrained) bar.append(make("span", {className: "tokens", style: "padding: 0 4px; border: 0"}, make("span", {className: "untrained", textContent: "not trained on"})));
  return bar;
}

function response(tokens) {
  const box = make("p", {className: "tokens", tabIndex: 0});
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "Tokens; the arrow keys go from one to the next");
  const readout = make("p", {className: "readout muted", textContent: "Point at a token, or go to one with the arrow keys."});
  readout.setAttribute("aria-live", "polite");
  const more = make("button", {type: "button", className: "more", textContent: "Show more"});
  const spans = [];
  const severalVersions = Array.isArray(tokens.v) && new Set(tokens.v.filter((version) => version !== null)).size > 1;
  let [current, version] = [-1, null];
  function extend() {
    const end = Math.min(tokens.t.length, spans.length + TOKENS);
    const added = [];
    for (let place = spans.length; place < end; place++) {
      const sampledBy = valueAt(tokens.v, place);
      if (severalVersions && sampledBy !== null && sampledBy !== version) {
        version = sampledBy;
        added.push(make("sup", {textContent: `v${version}`, title: "version of the policy that samples from here on"}));
      }
      spans.push(token(tokens, place));
      added.push(spans[place]);
    }
    box.append(...added);
    more.hidden = spans.length === tokens.t.length;
  }
  function point(place) {
    if (place < 0 || place >= spans.length) return;
    spans[current]?.classList.remove("current");
    current = place;
    spans[current].classList.add("current");
    readout.textContent = told(tokens, place);
    readout.classList.remove("muted");
  }
  more.addEventListener("click", extend);
  box.addEventListener("pointerover", (event) => { if (event.target.dataset?.place) point(Number(event.target.dataset.place)); });
  box.addEventListener("keydown", (event) => {
    const places = {ArrowRight: current + 1, ArrowDown: current + 1, ArrowLeft: current - 1, ArrowUp: current - 1, Home: 0, End: spans.length - 1};
    if (!(event.key in places)) return;
    event.preventDefault();
    point(places[event.key]);
    spans[current]?.scrollIntoView({block: "nearest"});
  });
  extend();
  return [box, more, readout];
}

function token(tokens, place) {
  const piece = data.pieces[tokens.t[place]][1];
  const span = make("span", {textContent: visible(piece).replace(/\n/g, "↵\n") || "▫"});
  if (piece === "") span.classList.add("mark");
  span.dataset.place = place;
  if (!valueAt(tokens.u, place)) span.classList.add("untrained");
  const [value, scale] = [valueAt(tokens[COLOURED[field("colour")]] ?? null, place) ?? null, data.scales[field("colour")]];
  if (value !== null && scale) {
    const share = Math.min(1, Math.abs(value) / scale);
    span.classList.add(value < 0 ? "minus" : "plus");
    if (share > 0.5) span.classList.add("strong");
    if (share > 0.02) span.style.backgroundColor = `rgba(var(--${value < 0 ? "minus" : "plus"}), calc(${share.toFixed(3)} * var(--strongest)))`;
  }
  return span;
}

function told(tokens, place) {
  const [id, piece] = data.pieces[tokens.t[place]];
  const [engine, kl, mismatch, version] = ["e", "k", "m", "v"].map((name) => valueAt(tokens[name], place) ?? null);
  const parts = [`Token ${place + 1} of ${tokens.t.length}: ${JSON.stringify(visible(piece))} (id ${id})`];
  if (version === null) parts.push("put in, not sampled");
  else parts.push(`sampled by policy version ${version}`);
  if (!valueAt(tokens.u, place)) parts.push("not trained on");
  else parts.push(`advantage ${number(valueAt(tokens.a, place) ?? null)}`);
  if (engine !== null) parts.push(`engine's log-probability ${number(engine)} (${(100 * Math.exp(engine)).toPrecision(3)}%)`);
  if (mismatch !== null) parts.push(`trainer less engine ${number(mismatch)}`);
  if (kl !== null) parts.push(`KL ${number(kl)} nats`);
  return parts.join(" · ");
}

// Means by step -------------------------------------------------------------------------------------------------------

const BINS = 24;

function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}

function histogram(values, [low, high]) {
  const bins = new Array(BINS).fill(0);
  for (const value of values) if (value !== null) bins[Math.min(BINS - 1, Math.floor((BINS * (value - low)) / (high - low || 1)))]++;
  const highest = Math.max(...bins, 1);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [name, value] of Object.entries({width: 4 * BINS, height: 20, role: "img", "aria-label": `from ${number(low)} to ${number(high)}: ${bins.join(", ")}`})) svg.setAttribute(name, value);
  bins.forEach((count, bin) => {
    const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const height = (20 * count) / highest;
    for (const [name, value] of Object.entries({x: 4 * bin, y: 20 - height, width: 3, height})) bar.setAttribute(name, value);
    svg.append(bar);
  });
  return svg;
}

function drawSteps() {
  const names = Object.keys(data.measures);
  const measure = field("measure");
  const ofStep = new Map();
  data.step.forEach((step, i) => { if (!ofStep.has(step)) ofStep.set(step, []); ofStep.get(step).push(i); });
  const known = data.measures[measure].filter((value) => value !== null);
  const range = [known.reduce((a, b) => Math.min(a, b), Infinity), known.reduce((a, b) => Math.max(a, b), -Infinity)];
  const figures = (members) => [...names.map((name) => mean(members.map((i) => data.measures[name][i]))), mean(members.map((i) => data.finished[i]))];
  const cells = (values) => values.map((value) => make("td", {className: "n", textContent: number(value)}));
  const rows = [...ofStep].map(([step, members]) => {
    const row = make("tr", {}, make("th", {scope: "row", textContent: step}), make("td", {className: "n muted", textContent: `${members.length} of ${data.of[step]}`}),
      ...cells(figures(members)), make("td", {}, histogram(members.map((i) => data.measures[measure][i]), range)));
    if ([field("step"), field("other")].includes(String(step))) row.className = "chosen";
    return row;
  });
  const [first, second] = ["step", "other"].map((name) => ofStep.get(Number(field(name))));
  if (first && second) {
    const [a, b] = [figures(first), figures(second)];
    rows.push(make("tr", {className: "change"}, make("th", {scope: "row", textContent: `${field("other")} less ${field("step")}`}), make("td"),
      ...cells(b.map((value, place) => (value === null || a[place] === null ? null : value - a[place]))), make("td")));
  }
  const heads = ["Step", "saved", ...names.map(label), "ended by the model"].map((text, place) => make("th", {scope: "col", className: place ? "n" : "", textContent: text}));
  const table = document.querySelector("#steps table");
  table.tHead.replaceChildren(make("tr", {}, ...heads, make("th", {scope: "col", textContent: `${label(measure)} of each rollout`})));
  table.tBodies[0].replaceChildren(...rows);
}

// Start ---------------------------------------------------------------------------------------------------------------

async function start() {
  data = await unpack(document.getElementById("index"));
  controls.elements.measure.append(...Object.keys(data.measures).map((name) => make("option", {value: name, textContent: label(name)})));
  if (data.measures.reward) controls.elements.measure.value = "reward";
  list.addEventListener("scroll", drawRows, {passive: true});
  new ResizeObserver(drawRows).observe(list);
  list.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row) choose(Number(row.dataset.at), {scroll: false});
  });
  list.addEventListener("keydown", (event) => {
    if (!(event.key in LIST_KEYS) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choose(LIST_KEYS[event.key]());
  });
  controls.addEventListener("input", (event) => {
    const name = event.target.name;
    if (name === "other" && field("other")) {
      if (!field("step")) controls.elements.step.value = String(data.step[0]);
      controls.elements.grouped.checked = true;
      document.getElementById("steps").open = true;
    }
    if (["step", "other", "measure"].includes(name)) drawSteps();
    if (name === "colour") show();
    else refresh();
  });
  controls.elements.only.addEventListener("click", () => { only = null; refresh(); });
  controls.addEventListener("submit", (event) => event.preventDefault());
  refresh();
  document.body.dataset.ready = performance.now().toFixed(0);
  drawSteps();
}

start();
