"use strict";
// How numbers are written: digit for digit what mxprobe/numbers.py writes, which says the rules; a test compares them.

const SUPERSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹";
function power(exponent) {
  return "10" + String(exponent).replace(/./g, (c) => (c === "-" ? "⁻" : SUPERSCRIPT[c]));
}
function number(x) {
  if (!Number.isFinite(x)) return "–";
  const size = Math.abs(x);
  const sign = x < 0 ? "−" : "";
  if (size < 1e6 && Number.isInteger(size)) return sign + size;
  const exponent = Number(size.toExponential(2).split("e")[1]);
  if (exponent < -3 || exponent >= 6) {
    const [mantissa, rounded] = size.toExponential(1).split("e");
    return sign + mantissa + "×" + power(Number(rounded));
  }
  const text = size.toFixed(Math.max(2 - exponent, 0));
  return sign + (exponent < -1 ? text.replace(/0+$/, "") : text);
}
function percent(x) {
  if (!Number.isFinite(x)) return "–";
  const size = Math.abs(100 * x);
  if (size > 0 && size < 0.005) return x > 0 ? "< 0.01 %" : "> −0.01 %";
  return (x < 0 ? "−" : "") + (size >= 99.95 ? number(size) : size.toFixed(size >= 0.995 ? 1 : 2)) + " %";
}
