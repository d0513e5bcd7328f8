"use strict";
// Draws the pictures into their places, and again when the width changes; the slider, the chooser of a weight, and the theme.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const stops = data.map?.stops ?? [];
  let stop = stops.find((each) => each.mine);
  let weight = 0;

  const drawn = {
    files: (width) => charts.files(data.files, width),
    frontier: (width) => charts.frontier(data.frontier, width, stop),
    bits: (width) => charts.scale(null, width),
    map: (width) => charts.map(data.map, width, stop),
    growth: (width) => charts.growth(data.growth, width),
    costly: (width) => charts.costly(data.costly, width),
    weights: (width) => charts.histogram(data.values[weight].before, data.values[weight].after, null, width),
    inputs: (width) => {
      const seen = data.values[weight].input;
      if (seen) return charts.histogram(seen.values, null, seen.chosen, width);
      const none = document.createElement("p");
      none.className = "missing";
      none.textContent = "Not recorded: it is looked up, or calibration did not keep it.";
      return none;
    },
    domains: (width) => charts.domains(data.domains, width),
    sources: (width) => charts.sources(data.sources, width),
    memory: (width) => charts.memory(data.memory, width),
    reached: (width) => charts.reached(data.reached, width),
  };

  function draw(...names) {
    for (const place of document.querySelectorAll("[data-chart]")) {
      if (names.length && !names.includes(place.dataset.chart)) continue;
      place.replaceChildren(drawn[place.dataset.chart](Math.max(240, place.clientWidth)));
    }
  }

  const slider = document.getElementById("size");
  if (slider) {
    const output = document.getElementById("stop"), back = document.getElementById("mine"), command = document.getElementById("command");
    const move = () => {
      stop = stops[Number(slider.value)];
      output.textContent = stop.said;
      slider.setAttribute("aria-valuetext", stop.said);
      back.disabled = stop.mine;
      if (command) command.textContent = stop.command;
      draw("frontier", "map");
    };
    slider.addEventListener("input", move);
    back.addEventListener("click", () => {
      slider.value = String(stops.findIndex((each) => each.mine));
      move();
      slider.focus();
    });
  }

  const chooser = document.getElementById("weight");
  if (chooser) {
    const choose = () => {
      weight = Number(chooser.value);
      document.getElementById("weight-said").textContent = data.values[weight].said;
      document.getElementById("input-said").textContent = data.values[weight].inputSaid;
      draw("weights", "inputs");
    };
    chooser.addEventListener("change", choose);
  }

  const theme = document.getElementById("theme"), root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const show = () => {
    theme.textContent = dark() ? "Light" : "Dark";
    theme.setAttribute("aria-label", dark() ? "Change to light colours" : "Change to dark colours");
  };
  theme.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  show();

  let width = 0, waiting;
  new ResizeObserver(() => {
    const now = document.querySelector("main").clientWidth;
    if (now === width) return;
    width = now;
    clearTimeout(waiting);
    waiting = setTimeout(() => draw(), 60);
  }).observe(document.querySelector("main"));
  draw();
  document.body.dataset.drawn = "true";
})();
