"use strict";
// Figures and their tables, made from DATA on demand. A figure is { data, layout }; a string is the reason there is none.

const CONFIG = { displayModeBar: false, displaylogo: false, showSendToCloud: false, responsive: true };

function theme() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue("--" + name).trim();
  const names = ["ink", "soft", "faint", "line", "grid-line", "card", "scale", "deadzone", "grid", "saturation", "b", "sans"];
  return Object.fromEntries(names.map((name) => [name, get(name)]));
}

function layout(t, extra) {
  const axis = {
    gridcolor: t["grid-line"], linecolor: t.line, zerolinecolor: t.line, tickcolor: t.line, ticks: "", automargin: true,
    tickfont: { color: t.faint, size: 11 }, title: { font: { color: t.faint, size: 11 }, standoff: 6 }, fixedrange: true,
  };
  const { xaxis, yaxis, ...rest } = extra;
  const title = (a) => (a && a.title ? { ...a, title: { ...axis.title, text: a.title } } : a);
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: t.sans, size: 11.5, color: t.soft },
    margin: { l: 40, r: 8, t: 6, b: 22 }, showlegend: false, dragmode: false,
    hoverlabel: { bgcolor: t.card, bordercolor: t.line, font: { color: t.ink, size: 12, family: t.sans }, align: "left" },
    xaxis: { ...axis, showgrid: false, ...title(xaxis) }, yaxis: { ...axis, ...title(yaxis) }, ...rest,
  };
}
const LEGEND = (t) => ({
  showlegend: true,
  legend: { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom", font: { size: 11.5, color: t.soft } },
});
const UNIFIED = { hovermode: "x unified" };

function line(t, name, steps, values, color, extra) {
  const few = steps.length <= 60;
  return {
    type: "scatter", mode: few ? "lines+markers" : "lines", name, x: steps, y: values, connectgaps: false,
    line: { color, width: 1.8 }, marker: { color, size: 4 }, ...extra,
  };
}

// Dashed level of the same quantity on Gaussian data of the tensor's own magnitude; the band of any magnitude is a shape.
function reference(t, steps, level) {
  return line(t, "Gaussian", [steps[0], steps[steps.length - 1]], [level, level], t.faint, {
    mode: "lines", line: { color: t.faint, width: 1.2, dash: "dash" },
  });
}
function bandShape(t, band) {
  if (!band) return [];
  const [y0, y1] = band;
  return [{ type: "rect", xref: "paper", x0: 0, x1: 1, y0, y1, layer: "below", line: { width: 0 }, fillcolor: t.faint, opacity: 0.28 }];
}
const B_LINE = (t) => ({ mode: "lines", line: { color: t.b, width: 1.8, dash: "dash" } });
function stepAxis(extra) {
  return shown.from === null ? extra : { ...extra, range: [shown.from, shown.to], autorange: false };
}

function signalFigure(index) {
  const t = theme();
  const signal = DATA.signals[index];
  const steps = unpack(signal.steps).values;
  const raw = unpack(signal.values).values;
  const data = [];
  if (signal.smooth) {
    data.push({ type: "scatter", mode: "lines", name: "each step", x: steps, y: raw, line: { color: t.faint, width: 1 }, opacity: 0.45, hoverinfo: "skip" });
    data.push(line(t, "running mean", steps, unpack(signal.smooth).values, t.ink, { mode: "lines" }));
  } else data.push(line(t, plain(signal.title), steps, raw, t.ink));
  if (signal.against) data.push(line(t, "B", unpack(signal.against.steps).values, unpack(signal.against.values).values, t.b, B_LINE(t)));
  const mark = (step, color, dash) => ({ type: "line", xref: "x", yref: "paper", x0: step, x1: step, y0: 0, y1: 1, line: { color, width: 1.2, dash } });
  const label = (step, text, hovertext, color) => ({ x: step, y: 1, xref: "x", yref: "paper", yanchor: "bottom", text, hovertext, showarrow: false, font: { size: 10, color }, captureevents: true });
  const events = new Map();
  for (const event of DATA.events) if (isStepShown(event.step)) events.set(event.step, [...(events.get(event.step) || []), event]);
  const shapes = Array.from(events.keys(), (step) => mark(step, t.faint, "dot"));
  const annotations = Array.from(events, ([step, all]) => label(
    step, [...new Set(all.map((event) => EVENT_MARKS[event.kind] || "•"))].join(""),
    all.map((event) => plain(event.kind.replace(/_/g, " ")) + " at step " + step + (event.detail ? ": " + plain(event.detail) : "")).join("<br>"), t.faint,
  ));
  if (signal.step) {
    shapes.push(mark(signal.step.at, t.saturation, "dash"));
    annotations.push(label(signal.step.at, "◆", "step at " + signal.step.at + ", p " + number(signal.step.p) + ", associated", t.saturation));
  }
  const yaxis = { nticks: 4, rangemode: signal.from_zero ? "tozero" : "normal", tickformat: signal.is_share ? ".2~p" : "" };
  const [low, high] = signalSteps();
  const xaxis = stepAxis({ nticks: 6, range: low < high ? [low, high] : [low - 1, low + 1] });
  return { data, layout: layout(t, { ...UNIFIED, shapes, annotations, margin: { l: 38, r: 8, t: annotations.length ? 14 : 6, b: 20 }, yaxis, xaxis }) };
}
const EVENT_MARKS = {
  attached: "▸", detached: "◂", nonfinite: "∞", flight: "∞", error: "!", rank_lost: "!", emulation: "⇄", recipe: "⇄", weight_sync: "⇄", weight_noise: "≈",
  checkpoint_saved: "▾", checkpoint_loaded: "▴", resume: "▴",
};
// One axis for all signals, so that what happened at a step stands in one place.
function signalSteps() {
  const lines = DATA.signals.flatMap((s) => (s.against ? [s, s.against] : [s]));
  const ends = lines.flatMap((s) => { const steps = unpack(s.steps).values; return [steps[0], steps[steps.length - 1]]; });
  return [Math.min(...ends), Math.max(...ends)];
}
function signalTable(index) {
  const signal = DATA.signals[index];
  const steps = unpack(signal.steps).values;
  const raw = unpack(signal.values).values;
  if (!signal.against) return { head: ["step", signal.title], format: ["number", "number"], rows: stepRows(steps, (s, i) => [s, raw[i]]) };
  const other = unpack(signal.against.steps).values;
  const drawn = unpack(signal.against.values).values;
  const a = new Map(Array.from(steps, (s, i) => [s, raw[i]]));
  const b = new Map(Array.from(other, (s, i) => [s, drawn[i]]));
  const rows = [...new Set([...steps, ...other])].sort((x, y) => x - y).filter(isStepShown).map((s) => [s, a.has(s) ? a.get(s) : NaN, b.has(s) ? b.get(s) : NaN]);
  return { head: ["step", signal.title, "B, as drawn"], format: ["number", "number", "number"], rows };
}

function measure(key) {
  return DATA.measures.find((m) => m.key === key);
}
function moduleTicks() {
  const { kinds, blocks } = DATA.modules;
  const isFirst = (i) => i === 0 || blocks[i] !== blocks[i - 1];
  if (kinds.length <= 32) {
    const flat = kinds.length <= 16;
    const below = (i) => (isFirst(i) ? "<br>layer " + plain(shorten(blocks[i], 8)) : "");
    const ticktext = kinds.map((kind, i) => plain(shorten(kind, flat ? 8 : 10)) + (flat ? below(i) : ""));
    return { tickvals: kinds.map((_, i) => i), ticktext, tickangle: flat ? 0 : -90 };
  }
  const firsts = blocks.map((_, i) => (isFirst(i) ? i : -1)).filter((i) => i >= 0);
  const every = Math.ceil(firsts.length / 16);
  const shown = firsts.filter((_, i) => i % every === 0);
  return { tickvals: shown, ticktext: shown.map((i) => (i === 0 ? "layer " : "") + plain(shorten(blocks[i], 8))), tickangle: 0 };
}

// What the charts over all layers share: the axis, the name of a layer, the band behind the selected one.
function moduleAxis() {
  return { ...moduleTicks(), range: [-0.6, DATA.modules.names.length - 0.4], zeroline: false };
}
function moduleLabel(m) {
  return plain(shorten(DATA.modules.names[m], 60));
}
function selectedShape(t, selected) {
  if (selected.module < 0) return [];
  return [{ type: "rect", layer: "below", yref: "paper", y0: 0, y1: 1, x0: selected.module - 0.5, x1: selected.module + 0.5, line: { width: 0 }, fillcolor: t["grid-line"] }];
}

function heatFigure(key, selected) {
  if (!DATA.operands.module.length) return "No operand was measured in this trace.";
  const t = theme();
  const m = measure(key);
  const modules = DATA.modules.names;
  const roles = rolesShown();
  const cells = roles.map((r) => modules.map((_, i) => valueOf(key, operandAt(i, r))));
  const z = cells.map((row) => row.map((v) => (!Number.isFinite(v) ? null : m.log ? Math.log10(Math.max(v, 1e-12)) : v)));
  const text = cells.map((row, y) => row.map((v, i) => {
    const at = operandAt(i, roles[y]);
    if (at < 0) return "";
    const share = (c) => percent(valueOf(c, at));
    return [
      moduleLabel(i) + " · " + DATA.roles[roles[y]].label, plain(m.label) + ": <b>" + FORMAT[m.format](v) + "</b>",
      "Gaussian data: " + percent(valueOf("nmse_reference", at)) + " output error, " + percent(valueOf("zeroed_reference", at)) + " zeroed",
      "split of the output error: scale " + share("out_scale") + ", deadzone " + share("out_deadzone") + ", grid " + share("out_grid"),
    ].join("<br>");
  }));
  const ticks = m.ticks.map((v) => (m.log ? Math.log10(v) : v));
  const data = [{
    type: "heatmap", z, text, hovertemplate: "%{text}<extra></extra>", hoverongaps: false,
    xgap: modules.length <= 60 ? 2 : 0, ygap: 2, zmin: ticks[0], zmax: ticks[ticks.length - 1],
    colorscale: m.diverging ? [[0, "#3b6fb6"], [0.5, t["grid-line"]], [1, "#b5533c"]] : "Cividis",
    colorbar: {
      thickness: 8, len: 1, outlinewidth: 0, x: 1.01, xpad: 0, tickvals: ticks, ticktext: m.ticktext,
      tickfont: { size: 10.5, color: t.faint }, ticklen: 2, tickcolor: t.line,
    },
  }];
  const y = roles.indexOf(selected.role);
  const shapes = selected.module < 0 || y < 0 ? [] : [{
    type: "rect", x0: selected.module - 0.5, x1: selected.module + 0.5, y0: y - 0.5, y1: y + 0.5,
    line: { color: t.ink, width: 2 },
  }];
  const yaxis = { tickvals: roles.map((_, i) => i), ticktext: roles.map((r) => DATA.roles[r].label), autorange: "reversed", showgrid: false, zeroline: false };
  const xaxis = { ...moduleTicks(), zeroline: false, range: [-0.5, modules.length - 0.5] };
  return { data, layout: layout(t, { shapes, xaxis, yaxis, margin: { l: 58, r: 54, t: 4, b: 20 } }) };
}
function heatTable(key) {
  const m = measure(key);
  return {
    head: ["module", ...rolesShown().map((r) => DATA.roles[r].label)], format: ["text", ...rolesShown().map(() => m.format)],
    rows: DATA.modules.names.map((name, i) => [name, ...rolesShown().map((r) => valueOf(key, operandAt(i, r)))]),
  };
}

const PARTS = ["scale", "deadzone", "grid"];
function seriesOf(index, names, view = currentView()) {
  return names.map((name) => lineOf(view, name, index));
}
function total(rows) {
  return rows[0].map((_, i) => rows.reduce((sum, row) => sum + row[i], 0));
}
function stepRows(steps, row) {
  return Array.from(steps, row).filter((cells) => isStepShown(cells[0]));
}
function stepsOf() {
  return stepsOfView(currentView());
}

// prefix "" is the operand's own error, "out_" that of the GEMM it feeds.
function componentsFigure(index, prefix) {
  if (index < 0) return "This operand was not measured.";
  const t = theme();
  const steps = stepsOf();
  const rows = seriesOf(index, PARTS.map((name) => prefix + name));
  const data = PARTS.map((name, i) => line(t, name, steps, rows[i], t[name]));
  data.unshift(line(t, "total", steps, total(rows), t.ink, { line: { color: t.ink, width: 2.2 } }));
  if (prefix) data.push(line(t, "on zeroed", steps, seriesOf(index, ["out_zeroed"])[0], t.deadzone, { line: { color: t.deadzone, width: 1.4, dash: "dot" } }));
  if (DATA.against) {
    const view = DATA.against.view;
    data.push(line(t, "total of B", stepsOfView(view), total(seriesOf(index, PARTS.map((name) => prefix + name), view)), t.b, B_LINE(t)));
  }
  data.push(reference(t, steps, valueOf("nmse_reference", index)));
  return stepFigure(t, data, {}, bandShape(t, bandOf(index, "nmse")));
}
function stepFigure(t, data, yaxis, shapes) {
  data.forEach((trace) => { trace.hovertemplate = "%{y:.3p}"; });
  return { data, layout: layout(t, { ...UNIFIED, ...LEGEND(t), shapes, margin: { l: 46, r: 8, t: 34, b: 34 }, xaxis: stepAxis({ title: "step", zeroline: false }), yaxis: { tickformat: ".2~p", rangemode: "tozero", ...yaxis } }) };
}
function componentsTable(index, prefix) {
  const names = PARTS.map((name) => prefix + name);
  const rows = seriesOf(index, names);
  const sum = total(rows);
  const head = ["step", "total", ...PARTS];
  if (prefix) { head.push("made on zeroed values"); rows.push(seriesOf(index, ["out_zeroed"])[0]); }
  return { head, format: ["number", ...head.slice(1).map(() => "percent")], rows: stepRows(stepsOf(), (s, i) => [s, sum[i], ...rows.map((r) => r[i])]) };
}

function zerosFigure(index) {
  if (index < 0) return "This operand was not measured.";
  const t = theme();
  const steps = stepsOf();
  return stepFigure(t, [
    line(t, "rounded to zero", steps, seriesOf(index, ["zero_frac"])[0], t.deadzone),
    line(t, "clipped", steps, seriesOf(index, ["saturated_frac"])[0], t.saturation),
    ...(DATA.against ? [line(t, "zeroed in B", stepsOfView(DATA.against.view), lineOf(DATA.against.view, "zero_frac", index), t.b, B_LINE(t))] : []),
    reference(t, steps, valueOf("zeroed_reference", index)),
  ], {}, bandShape(t, bandOf(index, "zero_frac")));
}
function zerosTable(index) {
  const [zeroed, clipped] = seriesOf(index, ["zero_frac", "saturated_frac"]);
  return { head: ["step", "rounded to zero", "clipped"], format: ["number", "percent", "percent"], rows: stepRows(stepsOf(), (s, i) => [s, zeroed[i], clipped[i]]) };
}

function deltaBins(index) {
  const shares = rowOf(DATA.operands.columns.delta, index);
  return Array.from(shares, (share, i) => [i / shares.length, (i + 1) / shares.length, share]);
}
function deltaFigure(index) {
  if (index < 0) return "This operand was not measured.";
  const t = theme();
  const bins = deltaBins(index);
  if (!bins.some((b) => b[2] > 0)) return "No block scale was recorded for this operand.";
  const data = [{
    type: "bar", x: bins.map((b) => (b[0] + b[1]) / 2), y: bins.map((b) => b[2]), width: 1 / bins.length, marker: { color: t.scale, line: { width: 0 } },
    customdata: bins, hovertemplate: "%{customdata[0]:.3f} to %{customdata[1]:.3f} octaves<br>%{y:.2p} of blocks<extra></extra>",
  }];
  return { data, layout: layout(t, { bargap: 0.12, margin: { l: 46, r: 8, t: 34, b: 34 }, xaxis: { title: "log₂(s / s*), octaves", range: [0, 1] }, yaxis: { tickformat: ".2~p" } }) };
}
function deltaTable(index) {
  return { head: ["from, octaves", "to, octaves", "share of blocks"], format: ["number", "number", "percent"], rows: deltaBins(index) };
}

const WGRAD = [["g_wgrad", "deadzone", "circle"], ["x_wgrad", "scale", "diamond"]];
function depthFigure(selected) {
  const t = theme();
  const chosen = WGRAD.filter(([key]) => key.endsWith(shown.operands));
  if (!chosen.length) return "The operands shown are not those of weight gradients.";
  const data = chosen.map(([key, color, symbol]) => {
    const r = DATA.roles.findIndex((role) => role.key === key);
    const at = DATA.modules.names.map((_, i) => operandAt(i, r));
    const y = at.map((i) => { const v = valueOf("out_error", i); return v > 0 ? v : null; });
    const text = at.map((i, m) => moduleLabel(m) + "<br>" + (r < 0 ? "" : plain(DATA.roles[r].label)) + " <b>" + percent(y[m] === null ? NaN : y[m]) + "</b>");
    return {
      type: "scatter", mode: "markers", name: (r < 0 ? key : DATA.roles[r].label) + " rounded", x: at.map((_, m) => m), y, text, customdata: at.map((_, m) => m),
      hovertemplate: "%{text}<extra></extra>", marker: { color: t[color], symbol, size: DATA.modules.names.length > 60 ? 4 : 7 },
    };
  });
  if (!data.some((d) => d.y.some((v) => v !== null))) return "No weight-gradient operand was measured in the steps shown.";
  const both = DATA.gradients;
  if (both) {
    const extra = (name, y, marker, words) => ({
      type: "scatter", mode: "markers", name, x: both.module, y: y.map((v) => (v > 0 ? v : null)), customdata: both.module, hovertemplate: "%{text}<extra></extra>", marker,
      text: both.module.map((m, i) => moduleLabel(m) + "<br>" + words + " <b>" + percent(y[i] === null ? NaN : y[i]) + "</b>" + (both.withheld[i] ? ", mostly noise: not attributed" : "")),
    });
    const size = DATA.modules.names.length > 60 ? 4 : 7;
    data.push(extra("both rounded", both.total, { color: t.ink, symbol: "square-open", size }, "G and X rounded"));
    data.push(extra("sampling noise", both.noise, { color: t.faint, symbol: "x-thin", size, line: { width: 1.4, color: t.faint } }, "sampling noise"));
  }
  const shapes = bandShape(t, DATA.bands.length === 1 ? DATA.bands[0].nmse : undefined);
  shapes.push(...selectedShape(t, selected));
  return { data, layout: layout(t, { ...LEGEND(t), shapes, xaxis: moduleAxis(), yaxis: { type: "log", tickformat: ".2~p", zeroline: false, nticks: 6 }, margin: { l: 46, r: 8, t: 30, b: 22 } }) };
}
function depthTable() {
  const roles = WGRAD.map(([key]) => DATA.roles.findIndex((role) => role.key === key && key.endsWith(shown.operands))).filter((r) => r >= 0);
  const both = DATA.gradients;
  const extra = both ? ["total", "scale", "deadzone", "grid", "noise"] : [];
  const named = (name) => (name === "noise" ? "sampling noise" : name === "total" ? "both rounded" : "both rounded, " + name);
  const of = (name, m) => { const i = both.module.indexOf(m); return i < 0 || both[name][i] === null ? NaN : both[name][i]; };
  return {
    head: ["module", "layer", ...roles.map((r) => DATA.roles[r].label), ...extra.map(named)], format: ["text", "text", ...roles.map(() => "percent"), ...extra.map(() => "percent")],
    rows: DATA.modules.names.map((name, m) => [name, DATA.modules.blocks[m], ...roles.map((r) => valueOf("out_error", operandAt(m, r))), ...extra.map((key) => of(key, m))]),
  };
}

function exclusionFigure() {
  const t = theme();
  const colors = [t.ink, t.b];
  const data = DATA.exclusion.flatMap((curve, c) => {
    const text = curve.module.map((name, k) => (k ? k + " kept, the last: " + plain(shorten(name, 60)) : "none kept") + "<br>" + percent(curve.work[k]) + " of the work, predicted KL <b>" + number(curve.kl[k]) + "</b>");
    const common = { type: "scatter", x: curve.work, text, hovertemplate: "%{text}<extra></extra>" };
    const at = { ...common, x: [curve.work[curve.knee]], y: [curve.kl[curve.knee]], text: [text[curve.knee]] };
    return [
      { ...common, y: curve.kl, mode: curve.kl.length <= 60 ? "lines+markers" : "lines", name: curve.label, line: { color: colors[c % 2], width: 1.8, dash: c ? "dash" : "solid" }, marker: { size: 4, color: colors[c % 2] } },
      { ...at, mode: "markers", name: curve.label + ", knee", marker: { symbol: "diamond", size: 10, color: colors[c % 2] } },
    ];
  });
  const xaxis = { title: "share of the forward GEMM work kept out", tickformat: ".0%", range: [-0.02, 1.02] };
  return { data, layout: layout(t, { ...LEGEND(t), xaxis, yaxis: { title: "predicted KL, nats a token", rangemode: "tozero" }, margin: { l: 60, r: 8, t: 30, b: 34 } }) };
}
function exclusionTable() {
  const rows = DATA.exclusion.flatMap((curve) => curve.module.map((name, k) => [curve.label, String(k), name || "none", curve.work[k], curve.kl[k], k === curve.knee ? "knee" : ""]));
  return { head: ["way", "kept", "the last of them", "share of the work", "predicted KL, nats a token", ""], format: ["text", "text", "text", "percent", "number", "text"], rows };
}

const FLOOR = 1e-8;
function realisedFigure(selected) {
  if (!DATA.outputs.length) return "No layer output was compared in this trace.";
  const t = theme();
  const data = [];
  for (const phase of DATA.outputs) {
    const color = phase.phase === "train" ? t.faint : t.ink;
    const side = phase.phase === "train" ? -0.14 : 0.14;
    const xs = phase.module.map((m) => m + side);
    const symbol = phase.phase === "train" ? "diamond" : "circle";
    const errors = phase.module.map((_, i) => realisedOf(phase, i));
    const info = phase.module.map((m, i) => [
      moduleLabel(m) + " · " + phase.label, "realised <b>" + number(errors[i][0]) + "</b>, predicted " + number(errors[i][1]),
      "X " + plain(phase.recipe_x[i]) + ", W " + plain(phase.recipe_w[i]) + (phase.exact[i] ? ", reproduced exactly" : ", not reproduced exactly"),
    ].join("<br>"));
    const common = { type: "scatter", mode: "markers", x: xs, customdata: phase.module, text: info, hovertemplate: "%{text}<extra></extra>" };
    const lift = (side) => errors.map((e) => (Number.isFinite(e[side]) ? Math.max(e[side], FLOOR) : null));
    data.push({ ...common, name: phase.label + ", predicted", y: lift(1), marker: { symbol: symbol + "-open", size: 12, color, line: { width: 1.4, color } } });
    data.push({ ...common, name: phase.label + ", realised", y: lift(0), marker: { symbol, size: 6, color } });
  }
  const exponents = [-8, -6, -4, -2, 0];
  const yaxis = { type: "log", tickvals: exponents.map((e) => 10 ** e), ticktext: exponents.map((e) => (e === -8 ? "≤ " : "") + power(e)), range: [-8.4, 0.9], zeroline: false };
  return { data, layout: layout(t, { ...LEGEND(t), shapes: selectedShape(t, selected), xaxis: moduleAxis(), yaxis, margin: { l: 46, r: 8, t: 30, b: 22 } }) };
}
function realisedTable() {
  const head = ["module", "phase", "realised", "predicted", "realised / predicted", "recipe X", "recipe W", "exact"];
  const rows = DATA.outputs.flatMap((phase) => phase.module.map((m, i) => {
    const [realised, predicted] = realisedOf(phase, i);
    return [DATA.modules.names[m], phase.label, realised, predicted, predicted > 0 ? realised / predicted : NaN, phase.recipe_x[i], phase.recipe_w[i], phase.exact[i] ? "yes" : "no"];
  }));
  return { head, format: ["text", "text", "number", "number", "number", "text", "text", "text"], rows };
}
