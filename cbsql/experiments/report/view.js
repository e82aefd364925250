"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const steps = data.steps;
const last = steps.q.length - 1;
const find = (id) => document.getElementById(id);
const films = {};
let now = 0, timer = null;

// A film is compressed, and each frame is the difference from the one before.
async function unpack(film) {
  const packed = Uint8Array.from(atob(film.data), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const size = film.shape.slice(1).reduce((a, b) => a * b);
  for (let i = size; i < bytes.length; i++) bytes[i] += bytes[i - size];
  return { height: film.shape[1], width: film.shape[2], size, frame: (step) => bytes.subarray(step * size, (step + 1) * size) };
}

function paint(canvas, film, colour) {
  canvas.width = film.width;
  canvas.height = film.height;
  const image = new ImageData(film.width, film.height);
  for (let i = 0; i < film.width * film.height; i++) {
    const [r, g, b] = colour(i);
    image.data.set([r, g, b, 255], 4 * i);
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

const nats = (pixel) => films.surprises.frame(now)[pixel] * data.natsPerUnit;

function paintAll() {
  if (films.pictures) {
    const frame = films.pictures.frame(now);
    const channels = films.pictures.size / (films.pictures.width * films.pictures.height);
    paint(find("picture"), films.pictures, (i) =>
      channels === 1 ? [frame[i], frame[i], frame[i]] : frame.subarray(channels * i, channels * i + 3));
  }
  if (films.symbols) {
    const frame = films.symbols.frame(now);
    const heat = find("heat").checked;
    paint(find("symbols"), films.symbols, (i) => {
      const grey = (frame[i] / (data.levels - 1)) * (heat ? 150 : 255);
      const hot = heat ? Math.min(nats(i) / 8, 1) : 0;
      // From the grey of the frame over red to pale yellow.
      const low = Math.min(2 * hot, 1), high = Math.max(2 * hot - 1, 0);
      return [255, 90 + 143 * high, 54 + 114 * high].map((tone) => grey + low * (tone - grey));
    });
  }
}

function show(step) {
  now = Math.min(Math.max(step, 0), last);
  find("scrubber").value = now;
  find("at").textContent = `step ${now + 1} of ${last + 1}`;
  const rewarded = steps.reward[now] ? ` Reward ${format(steps.reward[now])}.` : "";
  const beta = steps.beta[now] ?? Infinity;
  find("trust").replaceChildren("β = ", element("b", {}, format(beta)),
    ...(steps.count ? [", n = ", element("b", {}, format(steps.count[now]))] : []), `.${rewarded}`);
  [...find("values").tBodies[0].rows].forEach((row, action) => {
    row.cells[1].textContent = format(steps.q[now][action]);
    row.cells[2].textContent = steps.policy[now][action].toFixed(2);
    row.cells[3].firstChild.style.width = `${100 * steps.policy[now][action]}%`;
    row.classList.toggle("taken", steps.action[now] === action);
    row.classList.toggle("random", steps.explored[now]);
  });
  (steps.observation?.[now] ?? []).forEach((value, i) => { find("observation").rows[i].cells[1].textContent = format(value); });
  for (const mark of marks) mark(now);
  paintAll();
}

for (const name of data.actions) {
  const bar = element("td", {}, element("span", { class: "bar" }));
  find("values").tBodies[0].append(element("tr", {}, element("th", { scope: "row" }, name), element("td"), element("td"), bar));
}
(steps.observation?.[0] ?? []).forEach((_, i) => {
  find("observation").append(element("tr", {}, element("th", { scope: "row" }, `component ${i + 1}`), element("td")));
});

// Curves over the game.
const x = steps.q.map((_, step) => step + 1);
const grey = { colour: "#777777", dash: "2 3" };
const mean = (list) => list.reduce((a, b) => a + b, 0) / list.length;
const lines = {
  // In powers of ten. Below the least of them a backup is the mean, whatever the count.
  "beta-line": steps.count && [{ name: "β", colour: "#d7301f", y: steps.beta.map((beta) => Math.log10(Math.max(beta, 1e-6))) }],
  "value-line": [
    { name: "mean", ...grey, y: steps.q.map(mean) },
    { name: "greedy", colour: "#777777", y: steps.q.map((q) => Math.max(...q)) },
    { name: "soft", colour: "#d7301f", strong: true, y: steps.value },
  ],
  "surprise-line": steps.surprise && [{ name: "−log ρ", colour: "#084594", y: steps.surprise }],
};
const marks = [];
for (const [id, series] of Object.entries(lines)) {
  find(id).hidden = !series;
  if (!series) continue;
  const mark = lineChart(find(id).querySelector(".chart"), {
    series: series.map((one) => ({ ...one, x })), label: `${find(id).querySelector("h4").textContent} over the game`,
    xName: "step", pick: (step) => show(step - 1),
    ...(id === "beta-line" && { powers: true, formatY: (power) => format(10 ** power) }),
  });
  marks.push((step) => mark(step + 1));
}

// Playback.
function play(start) {
  clearInterval(timer);
  timer = null;
  if (start) {
    if (now === last) show(0);
    const wait = 1000 / (data.framesPerSecond * Number(find("speed").value));
    timer = setInterval(() => { if (now < last) show(now + 1); else play(false); }, wait);
  }
  find("play").textContent = start ? "pause" : "play";
  find("play").setAttribute("aria-pressed", String(start));
}
find("play").addEventListener("click", () => play(timer === null));
find("back").addEventListener("click", () => { play(false); show(now - 1); });
find("forward").addEventListener("click", () => { play(false); show(now + 1); });
find("scrubber").addEventListener("input", () => { play(false); show(Number(find("scrubber").value)); });
find("speed").addEventListener("change", () => play(timer !== null));
find("heat").addEventListener("change", paintAll);
for (const [id, choose] of [["least", Math.min], ["most", Math.max]]) {
  find(id).hidden = !steps.count;
  find(id).addEventListener("click", () => { play(false); show(steps.beta.indexOf(choose(...steps.beta))); });
}
document.addEventListener("keydown", (event) => {
  // A button has a use for the space bar, other controls for arrows too.
  if (event.target.closest(event.key === " " ? "button, input, select, svg" : "input, select, svg")) return;
  const actions = { " ": () => play(timer === null), ArrowLeft: () => find("back").click(), ArrowRight: () => find("forward").click() };
  if (!(event.key in actions)) return;
  event.preventDefault();
  actions[event.key]();
});
find("symbols").addEventListener("pointermove", (event) => {
  const box = find("symbols").getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / box.width * films.symbols.width);
  const row = Math.floor((event.clientY - box.top) / box.height * films.symbols.height);
  const pixel = row * films.symbols.width + column;
  find("pixel").textContent = `row ${row + 1}, column ${column + 1}: level ${films.symbols.frame(now)[pixel]}, ${nats(pixel).toFixed(1)} nats`;
});

find("picture").hidden = !data.films.pictures;
find("counted").hidden = !data.films.symbols;
show(0);
Promise.all(Object.entries(data.films).map(async ([name, film]) => { films[name] = await unpack(film); })).then(() => {
  paintAll();
  document.documentElement.dataset.ready = "true";
});
