"use strict";

// Figures: drawn from the JSON in the page, in the reader's colour scheme, and again when that changes.
const {dark, figures} = JSON.parse(document.getElementById("figures").textContent);
const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function inScheme(item) {
  let text = JSON.stringify(item);
  if (prefersDark.matches) {
    for (const [light, exchanged] of Object.entries(dark)) text = text.replaceAll(light, exchanged);
  }
  return JSON.parse(text);
}

let drawing = Promise.resolve();
let views = [];

async function drawFigures() {
  for (const view of views) view.clear();
  views = [];
  for (const place of document.querySelectorAll("[data-figure]")) {
    place.replaceChildren();
    delete place.dataset.drawn;
    views.push(await Bokeh.embed.embed_item(inScheme(figures[place.dataset.figure]), place));
    place.dataset.drawn = "";
  }
}

function redraw() {
  drawing = drawing.then(drawFigures);
}

// Samples: search, filters and order, a page at a time. A page without samples has no form.
const PAGE = 12;

function startSearch(form) {
  const list = document.querySelector("#samples .cards");
  const more = document.querySelector("#samples .more");
  const cards = [...list.children].map((element, position) => ({
    element,
    position,
    mode: element.dataset.mode,
    changed: element.dataset.changed,
    gain: element.dataset.gain === "" ? null : Number(element.dataset.gain),
    text: [...element.querySelectorAll(".text")].map((part) => part.textContent).join("\n").toLowerCase(),
  }));
  let shown = PAGE;

  function matching() {
    const value = (name) => form.elements[name]?.value ?? "";
    const text = value("text").trim().toLowerCase();
    const sign = {gains: 1, losses: -1}[value("order")] ?? 0; // 0: as in the page, the largest changes first
    return cards
      .filter((card) => card.text.includes(text))
      .filter((card) => !value("mode") || card.mode === value("mode"))
      .filter((card) => !value("changed") || card.changed === value("changed"))
      .filter((card) => sign === 0 || (card.gain !== null && sign * card.gain > 0))
      .sort((a, b) => sign * (b.gain - a.gain) || a.position - b.position);
  }

  function show() {
    const found = matching();
    list.replaceChildren(...found.slice(0, shown).map((card) => card.element));
    more.hidden = found.length <= shown;
    form.querySelector("output").textContent = `${found.length} of ${cards.length}`;
  }

  form.addEventListener("input", () => {
    shown = PAGE;
    show();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  more.addEventListener("click", () => {
    shown += PAGE;
    show();
  });
  show();
}

const search = document.querySelector("#samples form");
if (search !== null) startSearch(search);
redraw();
prefersDark.addEventListener("change", redraw);
