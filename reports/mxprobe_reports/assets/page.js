"use strict";
// State (which layer, which operand) and everything that follows it.

const state = { module: DATA.selected.module, role: DATA.selected.role, limit: 20, sort: { key: "out_error", down: true } };
const byId = (id) => document.getElementById(id);
const current = () => operandAt(state.module, state.role);
const heatKey = () => (byId("measure") ? byId("measure").value : DATA.measures[0].key);

// follows: redrawn when another layer is selected.
const CHARTS = {
  hurts: { figure: () => heatFigure("out_error", state), table: () => heatTable("out_error"), follows: true, picks: "cell" },
  where: { figure: () => heatFigure(heatKey(), state), table: () => heatTable(heatKey()), follows: true, picks: "cell" },
  operand: { figure: () => componentsFigure(current(), ""), table: () => componentsTable(current(), ""), follows: true },
  output: { figure: () => componentsFigure(current(), "out_"), table: () => componentsTable(current(), "out_"), follows: true },
  zeros: { figure: () => zerosFigure(current()), table: () => zerosTable(current()), follows: true },
  delta: { figure: () => deltaFigure(current()), table: () => deltaTable(current()), follows: true },
  depth: { figure: () => depthFigure(state), table: depthTable, follows: true, picks: "point" },
  realised: { figure: () => realisedFigure(state), table: realisedTable, follows: true, picks: "point" },
};
DATA.signals.forEach((signal, i) => {
  CHARTS["signal-" + signal.id] = { figure: () => signalFigure(i), table: () => signalTable(i), follows: false };
});

const visible = new Set();
function draw(node) {
  const chart = CHARTS[node.dataset.chart];
  const figure = chart.figure();
  if (typeof figure === "string") {
    Plotly.purge(node);
    node.replaceChildren(element("p", { class: "empty" }, figure));
    return;
  }
  if (!node.querySelector(".plot-container")) node.replaceChildren();
  Plotly.react(node, figure.data, figure.layout, CONFIG);
  if (chart.picks && !node.dataset.bound) {
    node.dataset.bound = "yes";
    node.on("plotly_click", ({ points: [point] }) => {
      if (chart.picks === "point") select(point.customdata, state.role);
      else if (operandAt(point.x, point.y) >= 0) select(point.x, point.y);
    });
  }
}
function tableOf(details) {
  const chart = CHARTS[details.dataset.table];
  if (typeof chart.figure() === "string") return null;
  return chart.table();
}
function fillTable(details) {
  const table = tableOf(details);
  const box = details.querySelector(".scroll");
  if (!table) return box.replaceChildren(element("p", { class: "note" }, "No data."));
  const kind = (i) => (table.format[i] !== "text" ? "num" : i === 0 ? "name" : null);
  const head = element("tr", {}, ...table.head.map((h, i) => element("th", { class: kind(i), scope: "col" }, h)));
  const rows = table.rows.map((row) => element("tr", {}, ...row.map((v, i) => element("td", { class: kind(i) }, FORMAT[table.format[i]](v)))));
  box.replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
}
function saveCsv(details) {
  const table = tableOf(details);
  if (!table) return;
  const cell = (v) => (typeof v === "string" ? '"' + v.replace(/"/g, '""') + '"' : Number.isFinite(v) ? String(v) : "");
  const text = [table.head, ...table.rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
  const link = element("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: details.dataset.table + ".csv" });
  link.click();
  URL.revokeObjectURL(link.href);
}

function select(module, role) {
  state.module = module;
  if (operandAt(module, role) >= 0) state.role = role;
  else state.role = Math.max(0, DATA.roles.findIndex((_, r) => operandAt(module, r) >= 0));
  keepInAddress();
  follow();
}
// Without selection the address stays as it was opened; with one it says all that is not the default.
function keepInAddress() {
  let fragment = "#layer=" + DATA.modules.slugs[state.module] + "&operand=" + DATA.roles[state.role].key;
  if (shown.from !== null) fragment += "&steps=" + shown.from + "-" + shown.to;
  if (shown.view > 0) fragment += "&rank=" + shown.view;
  history.replaceState(null, "", fragment);
}

// Steps outside the run are cut to it; the whole of it is no range.
function showSteps(from, to) {
  const steps = stepsOfView(DATA.views[0]);
  const [first, last] = [steps[0], steps[steps.length - 1]];
  const cut = (step, otherwise) => (Number.isFinite(step) ? Math.min(Math.max(step, first), last) : otherwise);
  const [low, high] = [cut(from, first), cut(to, last)].sort((a, b) => a - b);
  const whole = low === first && high === last;
  shown.from = whole ? null : low;
  shown.to = whole ? null : high;
  if (!byId("step-from")) return;
  byId("step-from").value = low;
  byId("step-to").value = high;
  byId("steps-all").hidden = whole;
}
function showRank(view) {
  shown.view = DATA.views[view] ? view : 0;
  if (byId("rank-select")) byId("rank-select").value = shown.view;
}
function showAgain() {
  keepInAddress();
  follow();
  for (const node of visible) if (node.dataset.chart.startsWith("signal-")) draw(node);
}
function follow() {
  if (state.module < 0) return;
  byId("layer-select").value = state.module;
  DATA.roles.forEach((role, r) => {
    const radio = byId("operand-" + role.key);
    radio.disabled = operandAt(state.module, r) < 0;
    radio.checked = r === state.role;
  });
  fillKeys();
  fillWhatifs();
  fillLayers();
  for (const node of document.querySelectorAll("[data-chart]")) if (CHARTS[node.dataset.chart].follows && visible.has(node)) draw(node);
  for (const details of document.querySelectorAll("details[data-table][open]")) fillTable(details);
}

function fillKeys() {
  const at = current();
  const get = (name) => valueOf("operands", name, at);
  const entries = [
    ["Output error", percent(get("out_error")), "Gaussian: " + percent(get("nmse_reference"))],
    ["Made on zeroed values", percent(get("out_zeroed")), "share of output error"],
    ["Operand error", percent(get("nmse")), "Gaussian: " + percent(get("nmse_reference"))],
    ["SQNR", decibel(get("sqnr_db")), "Gaussian: " + decibel(-10 * Math.log10(get("nmse_reference")))],
    ["Rounded to zero", percent(get("zero_frac")), "Gaussian: " + percent(get("zeroed_reference"))],
    ["Clipped", percent(get("saturated_frac")), "|x| > 6 s"],
    ["Rows measured", percent(get("sampled")), count(get("clusters")) + " units at least"],
  ];
  for (const phase of DATA.outputs) {
    const i = phase.module.indexOf(state.module);
    if (i < 0) continue;
    const ratio = phase.predicted[i] > 0 ? number(phase.realised[i] / phase.predicted[i]) + " × predicted" : "nothing predicted";
    entries.push(["Realised, " + phase.label, percent(phase.realised[i]), ratio]);
  }
  byId("keys").replaceChildren(...entries.map(([name, value, small]) => element("div", {}, element("dt", {}, name), element("dd", {}, value, element("small", {}, small)))));
}
function fillWhatifs() {
  const at = current();
  const rows = DATA.whatif.corrections.map((name, c) => [name, ...["output", "error", "on_deadzone", "zeroed"].map((k) => (at < 0 ? NaN : rowOf("whatif", k, at)[c]))]);
  const measured = rows.filter((row) => row.slice(1).some(Number.isFinite)).sort((a, b) => (Number.isFinite(a[1]) ? a[1] : a[2]) - (Number.isFinite(b[1]) ? b[1] : b[2]));
  const body = byId("whatifs");
  if (!measured.length) return body.replaceChildren(element("tr", {}, element("td", { colspan: 5, class: "note" }, "No correction was tried on this operand.")));
  body.replaceChildren(...measured.map((row) => element("tr", {}, element("td", { class: "name" }, row[0]), ...row.slice(1).map((v, i) => element("td", { class: "num" }, i === 3 ? percent(v) : number(v))))));
}

const LAYER_COLUMNS = [["out_error", percent], ["out_zeroed", percent], ["nmse", percent], ["sqnr_db", decibel], ["scale", percent], ["deadzone", percent], ["grid", percent], ["zero_frac", percent], ["saturated_frac", percent]];
function fillLayers() {
  const words = byId("layer-filter").value.toLowerCase();
  const role = byId("operand-filter").value;
  const { key, down } = state.sort;
  let rows = DATA.operands.module.map((_, i) => i).filter((i) => (role === "" || DATA.roles[DATA.operands.role[i]].key === role) && operandName(i).toLowerCase().includes(words));
  const value = (i) => (key === "module" ? DATA.operands.module[i] : key === "role" ? DATA.operands.role[i] : valueOf("operands", key, i));
  const rank = (v) => (Number.isFinite(v) ? v : down ? -Infinity : Infinity);
  rows.sort((a, b) => (down ? rank(value(b)) - rank(value(a)) : rank(value(a)) - rank(value(b))) || a - b);
  const found = rows.length;
  rows = rows.slice(0, state.limit);
  byId("layers").replaceChildren(...rows.map((i) => {
    const [m, r] = [DATA.operands.module[i], DATA.operands.role[i]];
    const pick = element("button", { class: "pick", type: "button", onclick: () => { select(m, r); byId("layer").scrollIntoView(); } }, DATA.modules.names[m]);
    return element("tr", { class: i === current() ? "selected" : null }, element("td", {}, pick), element("td", {}, DATA.roles[r].label),
      ...LAYER_COLUMNS.map(([name, format]) => element("td", { class: "num" }, format(valueOf("operands", name, i)))));
  }));
  byId("layers-count").textContent = found > rows.length ? `${rows.length} of ${found} operands` : `${found} operands`;
  byId("layers-more").hidden = found <= rows.length;
  for (const th of document.querySelectorAll("#layers-table th")) {
    if (th.dataset.key === key) th.setAttribute("aria-sort", down ? "descending" : "ascending");
    else th.removeAttribute("aria-sort");
  }
}

function readFragment() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (!wanted.has("layer")) return false;
  const module = DATA.modules.slugs.indexOf(wanted.get("layer"));
  if (module < 0) return false;
  const role = DATA.roles.findIndex((r) => r.key === wanted.get("operand"));
  const steps = (wanted.get("steps") || "").match(/^(-?\d+)-(\d+)$/);
  showSteps(steps ? Number(steps[1]) : NaN, steps ? Number(steps[2]) : NaN);
  showRank(Number(wanted.get("rank") || 0));
  select(module, role < 0 ? state.role : role);
  return true;
}

function start() {
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) { visible.delete(target); continue; }
      visible.add(target);
      draw(target);
    }
  }, { rootMargin: "160px" });
  document.querySelectorAll("[data-chart]").forEach((node) => observer.observe(node));
  const redraw = () => visible.forEach(draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => {
    document.body.classList.add("printing");
    document.querySelectorAll("#verdict details, #against details").forEach((details) => { details.open = true; });
    for (const node of document.querySelectorAll("[data-chart]")) {
      draw(node);
      // Resizing by itself comes after a delay, which printing does not wait for.
      if (node.layout) Plotly.relayout(node, { width: node.clientWidth, height: node.clientHeight });
    }
  });
  addEventListener("afterprint", () => {
    document.body.classList.remove("printing");
    redraw();
  });
  for (const details of document.querySelectorAll("details[data-table]")) {
    details.addEventListener("toggle", () => details.open && fillTable(details));
    details.querySelector("button").addEventListener("click", () => saveCsv(details));
  }
  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.addEventListener("click", () => {
      getSelection().selectAllChildren(byId(button.dataset.copy));
      document.execCommand("copy");
      button.textContent = "Copied";
    });
  }
  if (!DATA.operands.module.length) return;
  byId("measure").addEventListener("change", () => { draw(byId("chart-where")); byId("measure-help").textContent = measure(heatKey()).help; follow(); });
  byId("layer-select").addEventListener("change", (event) => select(Number(event.target.value), state.role));
  const hop = (by) => select((state.module + by + DATA.modules.names.length) % DATA.modules.names.length, state.role);
  byId("layer-previous").addEventListener("click", () => hop(-1));
  byId("layer-next").addEventListener("click", () => hop(1));
  DATA.roles.forEach((role, r) => byId("operand-" + role.key).addEventListener("change", () => select(state.module, r)));
  for (const button of document.querySelectorAll("button[data-pick]")) {
    button.addEventListener("click", () => { const [m, r] = button.dataset.pick.split(",").map(Number); select(m, r); });
  }
  if (byId("step-from")) {
    const read = () => { showSteps(parseInt(byId("step-from").value, 10), parseInt(byId("step-to").value, 10)); showAgain(); };
    byId("step-from").addEventListener("change", read);
    byId("step-to").addEventListener("change", read);
    byId("steps-all").addEventListener("click", () => { showSteps(NaN, NaN); showAgain(); byId("step-from").focus(); });
  }
  if (byId("rank-select")) byId("rank-select").addEventListener("change", (event) => { showRank(Number(event.target.value)); showAgain(); });
  byId("layer-filter").addEventListener("input", fillLayers);
  byId("operand-filter").addEventListener("change", fillLayers);
  byId("layers-more").addEventListener("click", () => { state.limit = Infinity; fillLayers(); });
  for (const th of document.querySelectorAll("#layers-table th")) {
    th.querySelector("button").addEventListener("click", () => {
      state.sort = { key: th.dataset.key, down: state.sort.key === th.dataset.key ? !state.sort.down : th.dataset.key !== "module" };
      fillLayers();
    });
  }
  addEventListener("hashchange", readFragment);
  if (readFragment()) byId("layer").scrollIntoView();
  else follow();
}
start();
