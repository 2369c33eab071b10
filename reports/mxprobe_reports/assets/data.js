"use strict";
// The page's data: decoded once, looked up by module and operand, and formatted for people.

const DATA = JSON.parse(document.getElementById("data").textContent);

function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed.f32), (c) => c.charCodeAt(0));
  return { values: new Float32Array(bytes.buffer), shape: packed.shape };
}

const decoded = new Map();
function column(group, name) {
  const key = group + "/" + name;
  if (!decoded.has(key)) decoded.set(key, unpack(group === "against" ? DATA.against[name] : DATA[group].columns[name]));
  return decoded.get(key);
}

// A row of a 2-D column, or one number of a 1-D column.
function rowOf(group, name, index) {
  const { values, shape } = column(group, name);
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
const viewLines = new Map();
function viewColumn(view, name) {
  const key = view.label + "/" + name;
  if (!viewLines.has(key)) viewLines.set(key, unpack(view.columns[name]));
  return viewLines.get(key);
}
function currentView() {
  return DATA.views[shown.view];
}
function stepsOfView(view) {
  if (!viewLines.has(view.label)) viewLines.set(view.label, unpack(view.steps).values);
  return viewLines.get(view.label);
}
function lineOf(view, name, index) {
  const { values, shape } = viewColumn(view, name);
  return values.subarray(index * shape[1], (index + 1) * shape[1]);
}
function isAll() {
  return shown.view === 0 && shown.from === null;
}

// Ratios over the steps shown: each bin weighted with its own energy or count, so that this is sums over sums.
function meanOver(name, weight, index) {
  const view = currentView();
  const steps = stepsOfView(view);
  const line = lineOf(view, name, index);
  const weights = lineOf(view, weight, index);
  let above = 0;
  let below = 0;
  for (let i = 0; i < steps.length; i++) {
    if (!isStepShown(steps[i]) || !Number.isFinite(line[i]) || !(weights[i] > 0)) continue;
    above += line[i] * weights[i];
    below += weights[i];
  }
  return below > 0 ? above / below : NaN;
}
const partsOf = (prefix, weight) => (i) => ["scale", "deadzone", "grid"].reduce((sum, name) => sum + meanOver(prefix + name, weight, i), 0);
const outError = partsOf("out_", "output");
const operandError = partsOf("", "signal");
const OVER_STEPS = {
  out_error: outError, nmse: operandError,
  sqnr_db: (i) => -10 * Math.log10(operandError(i)),
  nmse_ratio: (i) => operandError(i) / column("operands", "nmse_reference").values[i],
  zero_frac: (i) => meanOver("zero_frac", "values", i), saturated_frac: (i) => meanOver("saturated_frac", "values", i),
};
for (const name of ["scale", "deadzone", "grid", "zeroed", "saturated"]) OVER_STEPS["out_" + name] = (i) => meanOver("out_" + name, "output", i) / outError(i);
for (const name of ["scale", "deadzone", "grid"]) OVER_STEPS[name] = (i) => meanOver(name, "signal", i) / operandError(i);

function valueOf(group, name, index) {
  if (index < 0) return NaN;
  if (name === "b_over_a") return column("against", "error").values[index] / column("operands", "out_error").values[index];
  if (group === "operands" && !isAll() && OVER_STEPS[name]) return OVER_STEPS[name](index);
  return column(group, name).values[index];
}
// Energy of the output and of the parts of its error, added over the operands of a role and the steps shown.
function splitOf(role) {
  const view = currentView();
  const steps = stepsOfView(view);
  const sums = { output: 0, scale: 0, deadzone: 0, grid: 0 };
  DATA.operands.role.forEach((r, i) => {
    if (r !== role) return;
    const output = lineOf(view, "output", i);
    const parts = PARTS.map(([name]) => [name, lineOf(view, "out_" + name, i)]);
    for (let s = 0; s < steps.length; s++) {
      if (!isStepShown(steps[s]) || !(output[s] > 0) || !parts.every(([, line]) => Number.isFinite(line[s]))) continue;
      sums.output += output[s];
      for (const [name, line] of parts) sums[name] += line[s] * output[s];
    }
  });
  return sums;
}
// Realised and predicted error of module i of a phase, relative to its output, over the steps shown.
function realisedOf(phase, i) {
  if (shown.from === null) return [phase.realised[i], phase.predicted[i]];
  const steps = unpackOnce(phase.steps).values;
  const { values, shape } = unpackOnce(phase.binned);
  const sums = [0, 1, 2].map((k) => {
    const start = (k * shape[1] + i) * shape[2];
    return values.subarray(start, start + shape[2]).reduce((sum, v, s) => sum + (isStepShown(steps[s]) ? v : 0), 0);
  });
  return sums[0] > 0 ? [sums[1] / sums[0], sums[2] / sums[0]] : [NaN, NaN];
}
const unpacked = new Map();
function unpackOnce(packed) {
  if (!unpacked.has(packed)) unpacked.set(packed, unpack(packed));
  return unpacked.get(packed);
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
function tick(x) {
  return Number((100 * x).toPrecision(2)) + " %";
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
