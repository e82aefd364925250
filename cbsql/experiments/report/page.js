"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const all = (selector) => [...document.querySelectorAll(selector)];

// The chain-walk.
const reading = document.getElementById("reading");
if (reading) {
  const extras = document.getElementById("extras");
  let hidden = new Set();
  const draw = () => {
    const one = figures.chains[reading.value];
    const series = one.series.filter((line) => (extras.checked || !line.extra) && !hidden.has(line.name));
    lineChart(document.getElementById("chain-chart"), {
      series, xName: "training episode", reference: one.optimum, label: `Return over training episodes, ${one.name}`,
    });
    for (const table of all(".reading")) table.hidden = table.dataset.reading !== reading.value;
  };
  const restart = () => {
    hidden = new Set();
    const shown = figures.chains[reading.value].series.filter((line) => extras.checked || !line.extra);
    legend(document.getElementById("chain-legend"), shown, (names) => { hidden = names; draw(); });
    draw();
  };
  extras.closest("label").hidden = !figures.chains.some((one) => one.series.some((line) => line.extra));
  reading.addEventListener("change", restart);
  extras.addEventListener("change", restart);
  restart();
}

// Learning curves, beta and counts: small charts that share an x axis, and in each group a legend.
const axes = document.getElementById("axes");
if (axes) {
  const names = { score: "score", beta: "β", count: "count" };
  const hidden = new Map();
  const shownIn = (place) => {
    const trusted = document.querySelector("#trusted :checked").value;
    const quantity = place.dataset.quantity === "trusted" ? trusted : place.dataset.quantity;
    const charts = figures.groups[place.dataset.group].charts;
    return [quantity, charts.filter((chart) => chart.series.some((one) => one[quantity]))];
  };
  const draw = (place) => {
    const x = axes.querySelector(":checked").value;
    const [quantity, charts] = shownIn(place);
    place.replaceChildren();
    for (const chart of charts) {
      const box = element("div", { class: "chart" });
      place.append(element("figure", {}, element("figcaption", {}, chart.game), box));
      const series = chart.series.filter((one) => one[quantity] && !hidden.get(place).has(one.name))
        .map((one) => ({ ...one, x: one[x], ...one[quantity] }));
      lineChart(box, { series, xName: x, zero: true, label: `${names[quantity]} over ${x} in ${chart.game}` });
    }
  };
  const start = (place) => {
    const [quantity, charts] = shownIn(place);
    const there = (name) => charts.some((chart) => chart.series.some((one) => one.name === name && one[quantity]));
    const series = figures.groups[place.dataset.group].legend.filter((one) => there(one.name));
    hidden.set(place, new Set());
    legend(place.previousElementSibling, series, (gone) => { hidden.set(place, gone); draw(place); });
    draw(place);
  };
  axes.addEventListener("change", () => all("[data-quantity]").forEach(draw));
  document.getElementById("trusted").addEventListener("change", () => all("[data-quantity=trusted]").forEach(start));
  // A hidden chart has no size: show the sections that have something before they are drawn.
  for (const section of all("[data-trust]")) {
    section.hidden = !figures.groups[section.dataset.trust].charts.some((chart) => chart.series.some((one) => one.beta));
  }
  all("[data-quantity]").forEach(start);
}
for (const place of all("[data-profile]")) {
  lineChart(place, {
    ...figures.profiles[place.dataset.profile], xName: "normalised score", zero: true, top: 1,
    label: "Fraction of runs above each normalised score",
  });
}

// The list of runs.
const filter = document.getElementById("filter");
if (filter) {
  const rows = all("#all tbody tr");
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = [...row.cells].slice(0, 3).map((cell) => cell.textContent).join(" ").toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    document.getElementById("shown").textContent = `${shown} of ${rows.length} runs`;
  });
}
for (const button of all(".copy")) {
  button.addEventListener("click", async () => {
    const code = button.previousElementSibling;
    getSelection().selectAllChildren(code); // for browsers that do not let a file write there
    try { await navigator.clipboard.writeText(code.textContent); button.textContent = "copied"; }
    catch { button.textContent = "selected"; }
  });
}
