"use strict";
// Line charts in SVG, followed by pointer or arrow keys.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, ...children) {
  const made = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function format(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return "∞";
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`.replace("-", "−");
  if (size && size < 1e-3) return (+value.toPrecision(3)).toExponential().replaceAll("-", "−");
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}K`.replace("-", "−");
  return String(+value.toPrecision(3)).replace("-", "−");
}

function ticks(low, high, about, least = 0) {
  const rough = Math.max((high - low) / about, least);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

function extent(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const value of list ?? []) {
    if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
  }
  if (low > high) return [0, 1];
  return low === high ? [low, low + 1] : [low, high];
}

function path(points) {
  return points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

// Draws `options.series`, each with x, y and perhaps low and high, into a container. Others may be
// `label` (for screen readers), `xName`, `zero` (start the y axis there), `top` (end it there or above), `powers` (y are exponents: go from a whole one to another), `reference` (a level),
// `pick` (told an x that was clicked) and `formatY`. Returns a function that marks an x.
function lineChart(container, options) {
  const readout = element("output", { class: "readout" });
  let index = null, mark = () => {}, marked = null;
  const series = options.series;
  const grid = [...series].sort((a, b) => b.x.length - a.x.length)[0]?.x ?? [];
  const formatY = options.formatY ?? format;

  function draw() {
    const width = container.clientWidth, height = container.clientHeight;
    if (!width || !height) return;
    const margin = { left: 44, right: 8, top: 8, bottom: options.xName ? 34 : 20 };
    const [x0, x1] = extent(series.map((one) => one.x));
    let [y0, y1] = extent(series.flatMap((one) => [one.y, one.low, one.high]));
    if (options.zero) y0 = Math.min(y0, 0);
    y1 = Math.max(y1, options.reference ?? y1, options.top ?? y1);
    if (options.powers) [y0, y1] = [Math.floor(y0), Math.ceil(y1)];
    const toX = (x) => margin.left + ((x - x0) / (x1 - x0)) * (width - margin.left - margin.right);
    const toY = (y) => height - margin.bottom - ((y - y0) / (y1 - y0)) * (height - margin.top - margin.bottom);
    const svg = element("svg:svg", { viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img", "aria-label": options.label });
    for (const y of ticks(y0, y1, height / 45, options.powers ? 1 : 0)) {
      svg.append(
        element("svg:line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: toY(y), y2: toY(y) }),
        element("svg:text", { x: margin.left - 6, y: toY(y) + 4, "text-anchor": "end" }, formatY(y)));
    }
    for (const x of ticks(x0, x1, width / 80)) {
      const anchor = toX(x) > width - 24 ? "end" : "middle";  // the last one stays inside
      svg.append(element("svg:text", { x: anchor === "end" ? width : toX(x), y: height - margin.bottom + 15, "text-anchor": anchor }, format(x)));
    }
    if (options.xName) {
      svg.append(element("svg:text", { x: width - margin.right, y: height - 4, "text-anchor": "end" }, options.xName));
    }
    if (options.reference !== undefined) {
      svg.append(element("svg:line", { class: "rule", x1: margin.left, x2: width - margin.right, y1: toY(options.reference), y2: toY(options.reference) }));
    }
    // What is missing, such as the mean of a part of a run in which no game ended, is passed over.
    const seen = (one, y) => one.x.map((x, i) => [x, y[i]]).filter((point) => point[1] !== null)
      .map((point) => [toX(point[0]), toY(point[1])]);
    for (const one of series.filter((line) => line.low)) {
      const around = [...seen(one, one.low), ...seen(one, one.high).reverse()];
      if (around.length) svg.append(element("svg:path", { class: "band", style: `--c:${one.colour}`, d: `${path(around)}Z` }));
    }
    for (const one of series) {
      svg.append(element("svg:path", { class: "ink", style: `--c:${one.colour}`, d: path(seen(one, one.y)), "stroke-width": one.strong ? 2.6 : 1.5, "stroke-dasharray": one.dash || undefined, "stroke-linejoin": "round" }));
    }
    const pointer = element("svg:g");
    const cursor = element("svg:line", { class: "cursor", y1: margin.top, y2: height - margin.bottom, visibility: "hidden" });
    svg.append(cursor, pointer);
    mark = (x) => {
      marked = x;
      cursor.setAttribute("visibility", "visible");
      cursor.setAttribute("x1", toX(x));
      cursor.setAttribute("x2", toX(x));
    };
    if (marked !== null) mark(marked);

    function show() {
      pointer.replaceChildren();
      readout.replaceChildren();
      if (index === null || !series.length) return;
      const at = grid[index];
      pointer.append(element("svg:line", { class: "rule", x1: toX(at), x2: toX(at), y1: margin.top, y2: height - margin.bottom }));
      readout.append(`${options.xName ?? ""} ${format(at)}`);
      for (const one of series) {
        const i = nearest(one.x, at);
        if (one.y[i] === null || one.y[i] === undefined) continue;
        pointer.append(element("svg:circle", { class: "dot", style: `--c:${one.colour}`, cx: toX(one.x[i]), cy: toY(one.y[i]), r: 4 }));
        readout.append(element("div", {}, element("i", { style: `--c:${one.colour}` }), `${one.name} ${formatY(one.y[i])}`));
      }
      const left = toX(at) < width / 2;
      readout.style.left = left ? `${toX(at) + 10}px` : "";
      readout.style.right = left ? "" : `${width - toX(at) + 10}px`;
    }
    const fromEvent = (event) => {
      const box = svg.getBoundingClientRect();
      return x0 + (((event.clientX - box.left) * width / box.width - margin.left) / (width - margin.left - margin.right)) * (x1 - x0);
    };
    svg.addEventListener("pointermove", (event) => { index = nearest(grid, fromEvent(event)); show(); });
    svg.addEventListener("pointerleave", () => { index = null; show(); });
    svg.addEventListener("blur", () => { index = null; show(); });
    if (options.pick) svg.addEventListener("click", (event) => options.pick(grid[nearest(grid, fromEvent(event))]));
    svg.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -grid.length, End: grid.length };
      if (event.key === "Escape") index = null;
      else if (event.key in moves) index = Math.min(Math.max((index ?? -1) + moves[event.key], 0), grid.length - 1);
      else return;
      event.preventDefault();
      event.stopPropagation();
      show();
      if (options.pick && index !== null) options.pick(grid[index]);
    });
    const focused = container.contains(document.activeElement), followed = index;
    container.replaceChildren(svg, readout);  // the old drawing loses the focus, which ends following
    index = followed;
    if (focused) svg.focus();
    show();
  }
  container.observer?.disconnect();
  container.observer = new ResizeObserver(draw);
  container.observer.observe(container);
  draw();
  return (x) => mark(x);
}

function nearest(list, value) {
  let low = 0, high = list.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle] < value) low = middle; else high = middle;
  }
  return Math.abs(list[low] - value) <= Math.abs(list[high] - value) ? low : high;
}

// Buttons that show and hide series by name; `change` is called with the names hidden.
function legend(container, series, change) {
  const hidden = new Set();
  container.replaceChildren(...series.map((one) => {
    const key = element("svg:svg", { viewBox: "0 0 26 8", "aria-hidden": "true" },
      element("svg:path", { class: "ink", style: `--c:${one.colour}`, d: "M0 4H26", "stroke-width": one.strong ? 3 : 2, "stroke-dasharray": one.dash || undefined }));
    const button = element("button", { type: "button", "aria-pressed": "true" }, key, one.name);
    button.addEventListener("click", () => {
      const show = hidden.delete(one.name);
      if (!show) hidden.add(one.name);
      button.setAttribute("aria-pressed", String(show));
      change(hidden);
    });
    return button;
  }));
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
