"use strict";
// Every picture of the page: a function of its figures and a width that gives an SVG. Text goes in as text, never as HTML.
const charts = (() => {
  const style = {background: "none", color: "inherit", fontFamily: "inherit", fontSize: "12px", overflow: "visible"};
  const accent = "var(--accent)", second = "var(--second)", third = "var(--third)", fourth = "var(--fourth)", soft = "var(--soft)";

  function size(bytes) {
    let value = bytes;
    for (const unit of ["B", "kB", "MB"]) {
      if (value < 1000) return unit === "B" || value >= 100 ? `${value.toFixed(0)} ${unit}` : `${value.toFixed(2)} ${unit}`;
      value /= 1000;
    }
    return `${value.toFixed(2)} GB`;
  }
  const axisSize = (bytes) => size(bytes).replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " ");
  const kl = (value) => value === null ? "not predicted" : value >= 0.01 ? value.toFixed(4) : value < 1e-4 ? value.toPrecision(2) : value.toFixed(5);
  const percent = (value) => `${(100 * value).toFixed(1)} %`;
  // a line at every 1, 2 and 5 where there is room, else at powers of ten alone
  const logarithmic = (values) => {
    const low = d3.min(values) / 1.25, high = d3.max(values) * 1.25, decades = Math.log10(high / low);
    const digits = decades < 2.2 ? [1, 2, 5] : decades < 3.5 ? [1, 3] : [1];
    const powers = d3.range(Math.floor(Math.log10(low)), Math.ceil(Math.log10(high)) + 1);
    const ticks = powers.flatMap((power) => digits.map((digit) => Number(`${digit}e${power}`))).filter((tick) => tick >= low && tick <= high);
    return {type: "log", domain: [low, high], tickFormat: d3.format("~g"), grid: true, ticks};
  };

  // the figures of what the pointer is nearest to; long names are cut on a phone, where the table has them
  const tip = (rows, width, options, pointer = Plot.pointer) =>
    Plot.tip(rows, pointer({lineHeight: 1.3, lineWidth: width < 500 ? 22 : 38, textPadding: 7, ...options}));
  const within = ([x, y], left, right, middle) => x > left && x < right && Math.abs(y - middle) < 8;

  // those names that have room beside their point, the first ones first
  function withRoom(points, place) {
    const taken = [];
    return points.filter((point) => {
      const [x, y] = place(point), right = x + 7 * point.name.length + 14;
      const hidden = taken.some(([l, r, t]) => x - 6 < r && right > l && Math.abs(y - t) < 13);
      const covers = points.some((other) => other !== point && within(place(other), x + 4, right, y));
      if (hidden || covers) return false;
      taken.push([x - 6, right, y]);
      return true;
    });
  }

  function labelled(options, marks, points, x, y) {
    const bare = Plot.plot({...options, marks});
    const placeX = bare.scale("x").apply, placeY = bare.scale("y").apply;
    const named = withRoom(points, (point) => [placeX(point[x]), placeY(point[y])]);
    return Plot.plot({...options, marks: [...marks.slice(0, -1), Plot.text(named, {x, y, text: "name", dx: 13, textAnchor: "start", fill: soft, stroke: "var(--paper)", strokeWidth: 3}), marks.at(-1)]});
  }

  function frontier({points, marks}, width, stop) {
    const reach = d3.max(points, (d) => d.bytes) * 1.08;
    const shown = marks.filter((d) => d.bytes <= reach);
    const of = (kind) => shown.filter((d) => d.kind === kind);
    const dots = (kind, options) => Plot.dot(of(kind), {x: "bytes", y: "kl", ...options});
    const all = [...points.map((d) => ({...d, name: "best plan, predicted"})), ...shown];
    const told = (d) => {
      const what = {uniform: `all in ${d.name}, predicted`, threshold: "by thresholds, predicted", peer: `${d.name}, measured`}[d.kind] ?? d.name;
      return `${what}\n${size(d.bytes)}, ${d.bits.toFixed(2)} bits per weight\nKL ${kl(d.kl)}`;
    };
    const options = {
      width, height: Math.min(380, Math.max(280, width * 0.45)), marginLeft: 58, marginRight: 48, marginBottom: 38, style,
      x: {label: "size of the weights", tickFormat: axisSize, ticks: width < 500 ? 4 : 8},
      y: {...logarithmic(all.map((d) => d.kl)), label: "KL divergence"},
    };
    // below the line there is nothing, as no plan is better than the best; a phone has no room there, and a legend
    const first = d3.min(points, (d) => d.bytes), near = of("this").some((d) => (d.bytes - first) * width < 90 * (reach - first));
    const aside = near ? {dx: 4, dy: 20, textAnchor: "start"} : {dx: -11, dy: 12, textAnchor: "end"};
    const here = stop && stop.kl > 0 ? [stop] : [];
    const own = [
      Plot.ruleX(here, {x: "bytes", stroke: accent, strokeOpacity: 0.35}),
      Plot.line(points, {x: "bytes", y: "kl", stroke: accent, strokeWidth: 2}),
      Plot.dot(points, {x: "bytes", y: "kl", fill: accent, r: 2.5}),
      dots("uniform", {stroke: third, r: 4}),
      dots("threshold", {fill: third, symbol: "square", r: 4.5}),
      dots("peer", {fill: fourth, symbol: "square", r: 4.5}),
      dots("round", {stroke: second, r: 4.5}),
      Plot.ruleX(of("this"), {x: "bytes", y1: "low", y2: "high", stroke: second, strokeWidth: 2}),
      dots("this", {fill: second, symbol: "diamond", r: 6.5}),
      Plot.dot(here, {x: "bytes", y: "kl", stroke: accent, strokeWidth: 2, r: 8, className: "here"}),
      Plot.text(width < 500 ? [] : of("this"), {x: "bytes", y: "kl", text: "name", fontWeight: 600, ...aside}),
      tip(all, width, {x: "bytes", y: "kl", title: told}),
    ];
    return labelled(options, own, [...of("peer"), ...of("uniform")], "bytes", "kl");
  }

  function files(rows, width) {
    const told = (d) => `${d.name} in ${d.runtime}\n${size(d.bytes)}, ${d.bits.toFixed(2)} bits per weight\nKL ${kl(d.kl)}\nsame next token ${percent(d.same)}`;
    const runtimes = [...new Set(rows.map((d) => d.runtime))];
    const colour = (d) => [accent, second, fourth, third][runtimes.indexOf(d.runtime) % 4];
    const options = {
      width, height: Math.min(400, Math.max(300, width * 0.45)), marginLeft: 58, marginRight: 70, marginBottom: 38, style,
      x: {label: "size of the file", tickFormat: axisSize, ticks: width < 500 ? 3 : 6},
      y: {...logarithmic(rows.map((d) => d.kl)), label: "KL divergence, measured"},
    };
    const own = [
      Plot.dot(rows.filter((d) => !d.planned), {x: "bytes", y: "kl", stroke: colour, strokeWidth: 1.75, r: 4.5}),
      Plot.dot(rows.filter((d) => d.planned), {x: "bytes", y: "kl", fill: colour, symbol: "diamond", r: 6.5}),
      tip(rows, width, {x: "bytes", y: "kl", title: told}),
    ];
    return labelled(options, own, [...rows].sort((a, b) => b.planned - a.planned), "bytes", "kl");
  }

  // few bits are light and warm, many are dark and cool; on a logarithmic scale, as each further bit matters half as much
  const bits = (value) => d3.interpolateYlGnBu(0.08 + 0.9 * Math.min(1, Math.max(0, Math.log2(value / 1.8) / Math.log2(16 / 1.8))));
  const onto = (value) => (d3.lab(bits(value)).l > 62 ? "#16202b" : "#ffffff");

  function scale(_, width) {
    const steps = [2, 3, 4, 5, 6, 8, 16];
    return Plot.plot({
      width: Math.min(width, 360), height: 42, marginTop: 14, marginBottom: 4, marginLeft: 0, marginRight: 0, style: {...style, fontSize: "11px"},
      x: {type: "band", domain: steps, axis: null, padding: 0.04},
      marks: [
        Plot.cell(steps, {x: (d) => d, fill: bits}),
        Plot.text(steps, {x: (d) => d, text: (d) => String(d), fill: onto}),
        Plot.text(["bits per weight"], {text: (d) => d, frameAnchor: "top-left", dy: -13, fill: soft}),
      ],
    });
  }

  function map({cells, stops, formats}, width, stop) {
    const mine = stops.find((d) => d.mine);
    const rows = cells.map((cell, index) => {
      const [format, bytes, cost] = stop.cells[index];
      return {...cell, format: formats[format], per: 8 * bytes / cell.elements, bytes, cost, before: formats[mine.cells[index][0]]};
    });
    const told = (d) => {
      const lines = [d.name, `${d.format}, ${d.per.toFixed(2)} bits per weight`, `${d.shape}, ${size(d.bytes)}`, `predicted KL ${kl(d.cost)}`];
      if (stop.mine) lines.push(...d.reason.split("; ").filter(Boolean));
      else lines.push(d.before === d.format ? "as in this file" : `${d.before} in this file`);
      return lines.join("\n");
    };
    const layers = [...new Set(rows.filter((d) => d.layer !== null).map((d) => d.layer))];
    const roles = [...new Set(rows.filter((d) => d.layer !== null).map((d) => d.role))];
    const place = document.createElement("div");
    const outer = rows.filter((d) => d.layer === null);
    const left = Math.min(90, 14 + 7 * d3.max([...layers.map((d) => d.length), 3]));
    const part = (own, domainX, domainY, height, axis) => {
      const band = (width - left) / domainX.length;
      const text = (d) => band < 6.6 * d.format.length + 4 ? (band < 30 ? "" : d.per.toFixed(1)) : d.format;
      return Plot.plot({
        width, height, marginLeft: left, marginTop: 20, marginRight: 0, marginBottom: 4, style: {...style, fontSize: height / domainY.length < 15 ? "9px" : "11px"},
        x: {type: "band", domain: domainX, axis: "top", label: null, paddingInner: domainX.length > 1 ? 0.03 : 0, paddingOuter: 0, round: false, tickSize: 0},
        y: {type: "band", domain: domainY, label: axis, labelArrow: "none", labelAnchor: "top", padding: 0.06, tickSize: 0},
        marks: [
          Plot.cell(own, {x: "role", y: "layer", fill: (d) => bits(d.per), rx: 2, className: "cells"}),
          Plot.cell(own.filter((d) => d.before !== d.format), {x: "role", y: "layer", stroke: "currentColor", strokeWidth: 1.5, rx: 2}),
          Plot.text(own, {x: "role", y: "layer", text, fill: (d) => onto(d.per)}),
          tip(own, width, {x: "role", y: "layer", title: told, maxRadius: Infinity}),
        ],
      });
    };
    if (outer.length) {
      const own = outer.map((d) => ({...d, layer: "ends"}));
      place.append(part(own, [...new Set(own.map((d) => d.role))], ["ends"], 50, null));
    }
    if (layers.length) place.append(part(rows.filter((d) => d.layer !== null), roles, layers, 26 + layers.length * Math.min(30, Math.max(13, 640 / layers.length)), "layer"));
    return place;
  }

  function growth(rows, width) {
    const lines = rows.flatMap((d) => [
      {block: d.block, kl: d.measured, what: "measured", hidden: d.hidden},
      ...(d.predicted === null ? [] : [{block: d.block, kl: d.predicted, what: "predicted", hidden: d.hidden}]),
    ]);
    const names = rows.map((d) => d.block), every = Math.ceil(names.length / (width < 500 ? 8 : 16));
    const told = (d) => `up to ${/^\d+$/.test(d.block) ? `layer ${d.block}` : d.block}\nKL ${kl(d.kl)}, ${d.what}\nerror of its output ${d.hidden.toPrecision(2)}`;
    return Plot.plot({
      width, height: Math.min(300, Math.max(220, width * 0.36)), marginTop: 28, marginLeft: 62, marginRight: 24, marginBottom: 38, style,
      x: {type: "point", domain: names, label: "quantized up to layer", ticks: names.filter((_, i) => i % every === 0),
          tickFormat: (d) => (/^\d+$/.test(d) ? d : "ends"), labelArrow: "none"},
      y: {label: "KL divergence", grid: true, zero: true, nice: true, tickFormat: d3.format("~g"), ticks: 5},
      marks: [
        Plot.ruleY([0]),
        Plot.line(lines.filter((d) => d.what === "predicted"), {x: "block", y: "kl", stroke: accent, strokeDasharray: "5 4", strokeWidth: 2}),
        Plot.line(lines.filter((d) => d.what === "measured"), {x: "block", y: "kl", stroke: second, strokeWidth: 2}),
        Plot.dot(lines, {x: "block", y: "kl", fill: (d) => (d.what === "measured" ? second : accent), r: 3}),
        tip(lines, width, {x: "block", y: "kl", title: told, maxRadius: 80}),
      ],
    });
  }

  const shortened = (name, width) => {
    const most = Math.floor((width - 120) / 7);
    return name.length <= most ? name : `\u2026${name.slice(1 - most)}`;
  };

  const costly = (rows, width) => bars(rows.map((d) => ({...d, value: `${d.format}, ${kl(d.kl)}`})), width);
  const sources = (rows, width) => bars(rows.map((d) => ({name: d.name, kl: d.share, value: percent(d.share)})), width);

  function bars(rows, width) {
    return Plot.plot({
      width, height: 8 + 30 * rows.length, marginLeft: 0, marginRight: 0, marginTop: 4, marginBottom: 4, style,
      x: {axis: null, domain: [0, d3.max(rows, (d) => d.kl)]},
      y: {type: "band", domain: rows.map((d) => d.name), axis: null, padding: 0},
      marks: [
        Plot.barX(rows, {x: d3.max(rows, (d) => d.kl), y: "name", fill: "var(--line)", insetTop: 20, insetBottom: 5, rx: 1.5}),
        Plot.barX(rows, {x: "kl", y: "name", fill: accent, insetTop: 20, insetBottom: 5, rx: 1.5}),
        Plot.text(rows, {x: 0, y: "name", text: (d) => shortened(d.name, width), textAnchor: "start", dy: -5}),
        Plot.text(rows, {frameAnchor: "right", y: "name", text: (d) => d.value, textAnchor: "end", dy: -5, fill: soft}),
        tip(rows, width, {x: "kl", y: "name", title: (d) => `${d.name}\n${d.value}`, maxRadius: Infinity}, Plot.pointerY),
      ],
    });
  }

  function domains(rows, width) {
    const most = d3.max(rows, (d) => Math.max(d.kl, d.high));
    const told = (d) => `${d.name}\nKL ${d.value}, 95 %: ${kl(d.low)} to ${kl(d.high)}`;
    return Plot.plot({
      width, height: 38 + 34 * rows.length, marginLeft: 0, marginRight: 12, marginTop: 4, marginBottom: 30, style,
      x: {label: null, domain: [0, most], tickFormat: d3.format("~g"), ticks: width < 500 ? 4 : 7, grid: true},
      y: {type: "band", domain: rows.map((d) => d.name), axis: null, padding: 0},
      marks: [
        Plot.barX(rows, {x: "kl", y: "name", fill: accent, fillOpacity: 0.45, insetTop: 20, insetBottom: 5, rx: 1.5}),
        Plot.ruleY(rows, {x1: "low", x2: "high", y: "name", stroke: "currentColor", strokeWidth: 1.5, dy: 8}),
        Plot.text(rows, {x: 0, y: "name", text: (d) => shortened(d.name, width), textAnchor: "start", dy: -7}),
        Plot.text(rows, {frameAnchor: "right", y: "name", text: (d) => d.value, textAnchor: "end", dy: -7, fill: soft}),
        tip(rows, width, {x: "kl", y: "name", title: told, maxRadius: Infinity}, Plot.pointerY),
      ],
    });
  }

  function bins({low, high, shares}) {
    const wide = (high - low) / shares.length;
    return shares.map((share, i) => ({x1: low + i * wide, x2: low + (i + 1) * wide, share}));
  }

  function histogram(before, after, chosen, width) {
    const first = bins(before), then = after ? bins(after) : [];
    const present = [...first, ...then].map((d) => d.share).filter((d) => d > 0);
    const floor = d3.min(present) / 2;
    const told = (d) => `${d.x1.toPrecision(3)} to ${d.x2.toPrecision(3)}\n${(100 * d.share).toPrecision(3)} % of the values${d.then === undefined ? "" : `\n${(100 * d.then).toPrecision(3)} % in the file`}`;
    const both = first.map((d, i) => ({...d, then: then[i]?.share})).filter((d) => d.share > 0);
    return Plot.plot({
      width, height: 236, marginTop: 28, marginLeft: 56, marginRight: 12, marginBottom: 30, style,
      x: {label: null, tickFormat: d3.format("~g"), ticks: 6},
      y: {type: "log", domain: [floor, d3.max(present) * 1.2], label: "share of values", tickFormat: d3.format("~%"), ticks: 4, grid: true},
      marks: [
        Plot.rect(first.filter((d) => d.share > 0), {x1: "x1", x2: "x2", y1: floor, y2: "share", fill: accent, fillOpacity: 0.35, insetLeft: 0.5}),
        Plot.line(then.map((d) => ({...d, share: d.share > 0 ? d.share : floor})), {x: "x1", y: "share", stroke: second, strokeWidth: 1.5, curve: "step-after"}),
        Plot.ruleX(chosen ?? [], {stroke: "currentColor", strokeDasharray: "4 3", strokeWidth: 1.5}),
        tip(both, width, {x: (d) => (d.x1 + d.x2) / 2, y: "share", title: told}, Plot.pointerX),
      ],
    });
  }

  function memory(rows, width) {
    const uses = [...new Set(rows.map((d) => d.use))], parts = [...new Set(rows.map((d) => d.part))];
    return Plot.plot({
      width, height: 34 + 40 * uses.length, marginLeft: 0, marginRight: 20, marginTop: 4, marginBottom: 30, style,
      x: {label: null, tickFormat: axisSize, ticks: width < 500 ? 4 : 7, grid: true},
      y: {type: "band", domain: uses, axis: null, padding: 0},
      marks: [
        Plot.barX(rows, Plot.stackX({x: "bytes", y: "use", fill: (d) => `var(--part-${parts.indexOf(d.part) + 1})`, order: null, insetTop: 20, insetBottom: 4})),
        Plot.text(uses, {x: 0, y: (d) => d, text: (d) => `${d} cache`, textAnchor: "start", dy: -9}),
        tip(rows, width, Plot.stackX({x: "bytes", y: "use", title: (d) => `${d.part}\n${size(d.bytes)}`, order: null, maxRadius: Infinity})),
      ],
    });
  }

  function reached(rows, width) {
    const formats = [...new Set(rows.map((d) => d.format))];
    const told = (d) => `${d.format}, ${d.shape}, ${d.rows} ${d.rows === 1 ? "row" : "rows"}\n${percent(d.share)} of the limit (${d.bound})\n${d.gigabytes.toFixed(1)} GB/s, ${d.operations.toFixed(0)} GOP/s`;
    return Plot.plot({
      width, height: 50 + 26 * formats.length, marginLeft: 90, marginRight: 20, marginBottom: 36, style,
      x: {label: "share of the limit", domain: [0, Math.max(1, d3.max(rows, (d) => d.share))], tickFormat: "~%", grid: true, ticks: 5},
      y: {type: "point", domain: formats, label: null, tickSize: 0},
      marks: [
        Plot.dot(rows, {x: "share", y: "format", fill: (d) => (d.rows === 1 ? accent : second), fillOpacity: 0.75, r: 4.5}),
        tip(rows, width, {x: "share", y: "format", title: told}),
      ],
    });
  }

  return {frontier, files, scale, map, growth, costly, histogram, domains, sources, memory, reached};
})();
