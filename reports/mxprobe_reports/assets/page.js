"use strict";
// State (which layer, which operand) and everything that follows it.

const state = { module: DATA.selected.module, role: DATA.selected.role, limit: 20, sort: { key: "out_error", down: true } };
const N_WORST = 5;
const byId = (id) => document.getElementById(id);
const current = () => operandAt(state.module, state.role);
const heatKey = () => (byId("measure") ? byId("measure").value : DATA.measures[0].key);

// follows: redrawn when another layer is selected.
const CHARTS = {
  hurts: { figure: () => heatFigure(DATA.hurts, state), table: () => heatTable(DATA.hurts), follows: true, picks: "cell" },
  where: { figure: () => heatFigure(heatKey(), state), table: () => heatTable(heatKey()), follows: true, picks: "cell" },
  operand: { figure: () => componentsFigure(current(), ""), table: () => componentsTable(current(), ""), follows: true },
  output: { figure: () => componentsFigure(current(), "out_"), table: () => componentsTable(current(), "out_"), follows: true },
  zeros: { figure: () => zerosFigure(current()), table: () => zerosTable(current()), follows: true },
  delta: { figure: () => deltaFigure(current()), table: () => deltaTable(current()), follows: true },
  depth: { figure: () => depthFigure(state), table: depthTable, follows: true, picks: "point" },
  realised: { figure: () => realisedFigure(state), table: realisedTable, follows: true, picks: "point" },
};
CHARTS.exclusion = { figure: exclusionFigure, table: exclusionTable, follows: false };
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
      else if (operandAt(point.x, rolesShown()[point.y]) >= 0) select(point.x, rolesShown()[point.y]);
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

// The same operand of another module, or the first of those shown that was measured there.
function choose(module, role) {
  const fits = (r) => operandAt(module, r) >= 0 && isRoleShown(r);
  state.module = module;
  state.role = fits(role) ? role : Math.max(0, DATA.roles.findIndex((_, r) => fits(r)));
}
function select(module, role) {
  choose(module, role);
  keepInAddress();
  follow();
}
// Arrow keys in a chart: along the layers, and in a heatmap along the operands, past those that were not measured.
function onChartKey(event, picks) {
  const roles = picks === "cell" ? rolesShown() : [state.role];
  const last = DATA.modules.names.length - 1;
  const moves = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], Home: [-Infinity, 0], End: [Infinity, 0], ...(picks === "cell" ? { ArrowDown: [0, 1], ArrowUp: [0, -1] } : {}) };
  if (event.key === "Enter") {
    event.preventDefault();
    byId("layer").scrollIntoView();
    byId("layer-select").focus({ preventScroll: true });
  }
  if (!moves[event.key] || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  const [dx, dy] = moves[event.key];
  let x = Number.isFinite(dx) ? state.module + dx : dx > 0 ? last : 0;
  let y = roles.indexOf(state.role) + dy;
  const [stepX, stepY] = [Number.isFinite(dx) ? dx : -Math.sign(dx), dy];
  while (x >= 0 && x <= last && y >= 0 && y < roles.length) {
    if (operandAt(x, roles[y]) >= 0) return select(x, roles[y]);
    x += stepX;
    y += stepY;
  }
}
// Without selection the address stays as it was opened; with one it says all that is not the default.
function keepInAddress() {
  let fragment = "#layer=" + DATA.modules.slugs[state.module] + "&operand=" + DATA.roles[state.role].key;
  if (shown.from !== null) fragment += "&steps=" + shown.from + "-" + shown.to;
  if (shown.view > 0) fragment += "&rank=" + shown.view;
  if (shown.operands) fragment += "&show=" + shown.operands;
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
function showOperands(operands) {
  const filter = byId("operand-filter");
  shown.operands = filter && Array.from(filter.options).some((o) => o.value === operands) ? operands : "";
  if (filter) filter.value = shown.operands;
  if (state.module >= 0) choose(state.module, state.role);
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
    radio.disabled = operandAt(state.module, r) < 0 || !isRoleShown(r);
    radio.checked = r === state.role;
  });
  fillKeys();
  fillWorst();
  fillSplit();
  fillSignals();
  fillScopes();
  fillWhatifs();
  fillLayers();
  for (const node of document.querySelectorAll("[data-chart]")) if (CHARTS[node.dataset.chart].follows && visible.has(node)) draw(node);
  for (const details of document.querySelectorAll("details[data-table][open]")) fillTable(details);
}

// Each panel that does not follow one of the filters says so itself.
function fillScopes() {
  const on = filtersOn();
  for (const note of document.querySelectorAll(".scope")) {
    const missed = note.dataset.scope.split(" ").filter((name) => on.includes(name));
    note.hidden = !missed.length;
    note.textContent = missed.length ? "of all " + missed.map((name) => (name === "rank" ? "ranks" : name)).join(", ").replace(/, (\w+)$/, " and $1") : "";
  }
}
// The columns of a table that the template has headed: key and format of each.
function columnsOf(body) {
  return Array.from(body.parentNode.querySelectorAll("th[data-format]"), (th) => [th.dataset.key, FORMAT[th.dataset.format]]);
}
function fillWorst() {
  const body = byId("worst");
  const columns = columnsOf(body);
  const value = (i) => { const v = valueOf(columns[0][0], i); return Number.isFinite(v) ? v : -1; };
  const order = DATA.operands.role.map((_, i) => i).filter((i) => isRoleShown(DATA.operands.role[i]));
  const values = new Map(order.map((i) => [i, value(i)]));
  order.sort((a, b) => values.get(b) - values.get(a) || a - b);
  body.replaceChildren(...order.slice(0, N_WORST).map((i) => operandRow(i, columns, false)));
}
// A row of a table of operands; its name selects it, and may go to the selected layer.
function operandRow(i, columns, goes) {
  const [m, r] = [DATA.operands.module[i], DATA.operands.role[i]];
  const onclick = () => { select(m, r); if (goes) byId("layer").scrollIntoView(); };
  const pick = element("button", { class: "pick", type: "button", onclick }, DATA.modules.names[m]);
  const cells = columns.map(([name, format]) => element("td", { class: "num" }, format(valueOf(name, i))));
  return element("tr", { class: i === current() ? "selected" : null }, element("td", {}, pick), element("td", {}, DATA.roles[r].label), ...cells);
}
function fillSplit() {
  const lines = rolesShown().flatMap((r) => {
    const operands = DATA.operands.role.map((_, i) => i).filter((i) => DATA.operands.role[i] === r);
    const error = ratioOver("out_error", operands);
    const label = element("span", { class: r === state.role ? "current" : null }, DATA.roles[r].label);
    if (!(error > 0)) return [label, element("span", { class: "note" }, "not measured"), element("span", { class: "total" }, "–")];
    const shares = PARTS.map((name) => [name, ratioOver("out_" + name, operands)]);
    const whole = shares.reduce((sum, [, v]) => sum + Math.max(v, 0), 0) || 1;
    let words = shares.map(([name, v]) => name + " " + percent(v)).join(", ");
    if (shares[0][1] < 0) words += " (no scale problem: the power-of-two scales do better than amax/6)";
    const bars = shares.filter(([, v]) => v > 0).map(([name, v]) => element("i", { class: name, style: `width: ${(100 * v / whole).toFixed(2)}%` }));
    return [label, element("div", { class: "bar", role: "img", "aria-label": words, title: words }, ...bars), element("span", { class: "total" }, percent(error))];
  });
  byId("split").replaceChildren(...lines);
}
// The numbers above the curves: of the last tenth of the steps shown, and of the first.
const written = new Map();
function fillSignals() {
  for (const signal of DATA.signals) {
    const [recent, first] = ["recent", "first"].map((name) => document.querySelector(`[data-${name}="${signal.id}"]`));
    if (!written.has(signal.id)) written.set(signal.id, [recent.textContent, first.textContent]);
    const show = signal.is_share ? percent : number;
    const steps = unpack(signal.steps).values;
    const values = Array.from(unpack(signal.values).values).filter((v, i) => Number.isFinite(v) && isStepShown(steps[i]));
    const n = Math.max(1, Math.round(values.length / 10));
    const mean = (part) => (part.length ? part.reduce((a, b) => a + b, 0) / part.length : NaN);
    const texts = [show(mean(values.slice(-n))), values.length > 1 ? "from " + show(mean(values.slice(0, n))) : values.length ? "one step only" : "no step in the range"];
    [recent.textContent, first.textContent] = shown.from === null ? written.get(signal.id) : texts;
  }
}

function fillKeys() {
  const at = current();
  const get = (name) => valueOf(name, at);
  const entries = [
    ["Output error", percent(get("out_error")), "Gaussian: " + percent(get("nmse_reference"))],
    ["On zeroed values", percent(get("out_zeroed")), "share of output error"],
    ["Operand error", percent(get("nmse")), "Gaussian: " + percent(get("nmse_reference"))],
    ["SQNR", decibel(get("sqnr_db")), "Gaussian: " + decibel(get("sqnr_reference"))],
    ["Rounded to zero", percent(get("zero_frac")), "Gaussian: " + percent(get("zeroed_reference"))],
    ["Clipped", percent(get("saturated_frac")), "|x| > 6 s"],
    ["Rows measured", percent(get("sampled")), isAll() ? count(get("clusters")) + " units at least" : "all steps and ranks"],
  ];
  if (Number.isFinite(get("predicted_kl"))) {
    const ranks = Number.isFinite(get("rank_low")) ? `rank ${count(get("rank_low"))} to ${count(get("rank_high"))} (90 %)` : "nats per token";
    entries.unshift(["KL, predicted", number(get("predicted_kl")), ranks]);
  }
  for (const phase of DATA.outputs) {
    const i = phase.module.indexOf(state.module);
    if (i < 0) continue;
    const [realised, predicted] = realisedOf(phase, i);
    const ratio = predicted > 0 ? number(realised / predicted) + " × predicted" : "nothing predicted";
    entries.push(["Realised, " + phase.label, percent(realised), ratio + (shown.view > 0 ? ", all ranks" : "")]);
  }
  byId("keys").replaceChildren(...entries.map(([name, value, small]) => element("div", {}, element("dt", {}, name), element("dd", {}, value, element("small", {}, small)))));
}
function fillWhatifs() {
  const at = current();
  const rows = DATA.whatif.corrections.map((name, c) => [name, ...["output", "error", "on_deadzone", "zeroed"].map((k) => (at < 0 ? NaN : rowOf(DATA.whatif.columns[k], at)[c]))]);
  const measured = rows.filter((row) => row.slice(1).some(Number.isFinite)).sort((a, b) => (Number.isFinite(a[1]) ? a[1] : a[2]) - (Number.isFinite(b[1]) ? b[1] : b[2]));
  const body = byId("whatifs");
  if (!measured.length) return body.replaceChildren(element("tr", {}, element("td", { colspan: 5, class: "note" }, "No correction was tried on this operand.")));
  body.replaceChildren(...measured.map((row) => element("tr", {}, element("td", { class: "name" }, row[0]), ...row.slice(1).map((v, i) => element("td", { class: "num" }, i === 3 ? percent(v) : number(v))))));
}

function fillLayers() {
  const words = byId("layer-filter").value.toLowerCase();
  const { key, down } = state.sort;
  const columns = columnsOf(byId("layers"));
  let rows = DATA.operands.module.map((_, i) => i).filter((i) => isRoleShown(DATA.operands.role[i]) && operandName(i).toLowerCase().includes(words));
  const value = (i) => (key === "module" ? DATA.operands.module[i] : key === "role" ? DATA.operands.role[i] : valueOf(key, i));
  const rank = (v) => (Number.isFinite(v) ? v : down ? -Infinity : Infinity);
  const ranks = new Map(rows.map((i) => [i, rank(value(i))]));
  rows.sort((a, b) => (down ? ranks.get(b) - ranks.get(a) : ranks.get(a) - ranks.get(b)) || a - b);
  const found = rows.length;
  rows = rows.slice(0, state.limit);
  byId("layers").replaceChildren(...rows.map((i) => operandRow(i, columns, true)));
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
  showOperands(wanted.get("show") || "");
  select(module, role < 0 ? state.role : role);
  for (const node of visible) if (node.dataset.chart.startsWith("signal-")) draw(node);
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
  const unfold = () => { const target = byId(location.hash.slice(1)); if (target && target.tagName === "DETAILS") target.open = true; };
  addEventListener("hashchange", unfold);
  unfold();
  if (!DATA.operands.module.length) return;
  byId("measure").addEventListener("change", () => {
    const { help, basis } = measure(heatKey());
    byId("measure-help").textContent = help;
    byId("measure-basis").replaceChildren(element("span", { class: "basis " + (basis || "measured") }, basis || "measured"));
    draw(byId("chart-where"));
    follow();
  });
  for (const node of document.querySelectorAll("[data-chart][tabindex]")) {
    node.addEventListener("keydown", (event) => onChartKey(event, CHARTS[node.dataset.chart].picks));
  }
  byId("layer-select").addEventListener("change", (event) => select(Number(event.target.value), state.role));
  const hop = (by) => select((state.module + by + DATA.modules.names.length) % DATA.modules.names.length, state.role);
  byId("layer-previous").addEventListener("click", () => hop(-1));
  byId("layer-next").addEventListener("click", () => hop(1));
  DATA.roles.forEach((role, r) => byId("operand-" + role.key).addEventListener("change", () => select(state.module, r)));
  if (byId("step-from")) {
    const read = () => { showSteps(parseInt(byId("step-from").value, 10), parseInt(byId("step-to").value, 10)); showAgain(); };
    byId("step-from").addEventListener("change", read);
    byId("step-to").addEventListener("change", read);
    byId("steps-all").addEventListener("click", () => { showSteps(NaN, NaN); showAgain(); byId("step-from").focus(); });
  }
  if (byId("rank-select")) byId("rank-select").addEventListener("change", (event) => { showRank(Number(event.target.value)); showAgain(); });
  byId("layer-filter").addEventListener("input", fillLayers);
  if (byId("operand-filter")) byId("operand-filter").addEventListener("change", (event) => { showOperands(event.target.value); showAgain(); });
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
