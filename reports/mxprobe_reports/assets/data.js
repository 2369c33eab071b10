"use strict";
// The page's data: decoded once, looked up by module and operand, and formatted for people.

const DATA = JSON.parse(document.getElementById("data").textContent);

const unpacked = new Map();
function unpack(packed) {
  if (!unpacked.has(packed)) {
    const bytes = Uint8Array.from(atob(packed.f32), (c) => c.charCodeAt(0));
    unpacked.set(packed, { values: new Float32Array(bytes.buffer), shape: packed.shape });
  }
  return unpacked.get(packed);
}
// A row of a 2-D column.
function rowOf(packed, index) {
  const { values, shape } = unpack(packed);
  return values.subarray(index * shape[1], (index + 1) * shape[1]);
}
// Which steps, rank and operands are shown; null is all of them. `operands` is a role or the end of several.
const shown = { view: 0, from: null, to: null, operands: "" };
function isRoleShown(role) {
  return DATA.roles[role].key.endsWith(shown.operands);
}
function rolesShown() {
  return DATA.roles.map((_, r) => r).filter(isRoleShown);
}
function isStepShown(step) {
  return shown.from === null || (step >= shown.from && step <= shown.to);
}
function filtersOn() {
  return [["steps", shown.from !== null], ["rank", shown.view > 0], ["operands", shown.operands !== ""]].filter(([, on]) => on).map(([name]) => name);
}
function currentView() {
  return DATA.views[shown.view];
}
function stepsOfView(view) {
  return unpack(view.steps).values;
}
function lineOf(view, name, index) {
  return rowOf(view.columns[name], index);
}
function isAll() {
  return shown.view === 0 && shown.from === null;
}

// A ratio over the steps shown, of some operands together: sums over sums, each bin weighted with its energy or count.
// DATA.ratios says for each column which lines are added above and below (none: the weight itself), and the weight.
function ratioOver(name, indices) {
  const [above, below, weight] = DATA.ratios[name];
  const view = currentView();
  const steps = stepsOfView(view);
  let over = 0;
  let under = 0;
  for (const index of indices) {
    const weights = lineOf(view, weight, index);
    const [tops, bottoms] = [above, below].map((names) => names.map((line) => lineOf(view, line, index)));
    for (let s = 0; s < steps.length; s++) {
      if (!isStepShown(steps[s]) || !(weights[s] > 0)) continue;
      let [top, bottom] = [0, below.length ? 0 : 1];
      for (const line of tops) top += line[s];
      for (const line of bottoms) bottom += line[s];
      if (!Number.isFinite(top) || !Number.isFinite(bottom)) continue;
      over += top * weights[s];
      under += bottom * weights[s];
    }
  }
  return under > 0 ? over / under : NaN;
}
function valueOf(name, index) {
  if (index < 0) return NaN;
  if (!isAll()) {
    if (name === "sqnr_db") return -10 * Math.log10(ratioOver("nmse", [index]));
    if (name === "nmse_ratio") return ratioOver("nmse", [index]) / valueOf("nmse_reference", index);
    if (DATA.ratios[name]) return ratioOver(name, [index]);
  }
  return unpack(DATA.operands.columns[name]).values[index];
}
// Realised and predicted error of module i of a phase, relative to its output, over the steps shown.
function realisedOf(phase, i) {
  if (shown.from === null) return [phase.realised[i], phase.predicted[i]];
  const steps = unpack(phase.steps).values;
  const { values, shape } = unpack(phase.binned);
  const sums = [0, 1, 2].map((k) => {
    const start = (k * shape[1] + i) * shape[2];
    return values.subarray(start, start + shape[2]).reduce((sum, v, s) => sum + (isStepShown(steps[s]) ? v : 0), 0);
  });
  return sums[0] > 0 ? [sums[1] / sums[0], sums[2] / sums[0]] : [NaN, NaN];
}
function bandOf(index, name) {
  return index < 0 ? undefined : DATA.bands[DATA.operands.rule[index]][name];
}

const operandIndex = new Map();
DATA.operands.module.forEach((module, i) => operandIndex.set(module + "," + DATA.operands.role[i], i));
function operandAt(module, role) {
  const index = operandIndex.get(module + "," + role);
  return index === undefined ? -1 : index;
}
function operandName(index) {
  return DATA.modules.names[DATA.operands.module[index]] + " · " + DATA.roles[DATA.operands.role[index]].label;
}

function count(x) {
  return Number.isFinite(x) ? String(Math.round(x)) : "–";
}
function decibel(x) {
  return Number.isFinite(x) ? x.toFixed(1).replace("-", "−") + " dB" : "–";
}
const FORMAT = { number, percent, decibel, text: (x) => x, times: (x) => (Number.isFinite(x) ? number(x) + " ×" : "–") };

// Plotly reads a subset of HTML, and TeX between dollar signs, in every label: names must reach it as text.
function plain(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/\$/g, "&#36;");
}
function shorten(text, length) {
  return text.length <= length ? text : text.slice(0, length / 2 - 1) + "…" + text.slice(1 - length / 2);
}

function element(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "onclick") node.addEventListener("click", value);
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}
