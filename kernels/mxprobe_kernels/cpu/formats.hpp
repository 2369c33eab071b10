// Scales and elements of every block format in double, operation by operation as in rounding.py and torch_backend.py, so
// that the bits are theirs. Included once per instruction set. Loops over a block are plain: the compiler makes vectors.
//
//   s = 2^e by the bits of amax (E8M0),  max(e4m3(amax / qmax / unit), 2^-9) unit (E4M3),  fp32(amax / qmax) (FP32),
//       e6m2(bf16(amax bf16(1/7))) (E6M2)
//   c = min(rne(|x| / s), qmax)     rne to the element's grid; HiF4 has two more levels of scale
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "quantize.hpp"

namespace mxprobe {
namespace ISA {
namespace {

inline double from_bits(int64_t bits) {
  double v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}
inline int64_t to_bits(double v) {
  int64_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}
inline double pow2(int64_t e) { return from_bits((e + 1023) << 52); }

// z >= 0 to the nearest of a mini-float, ties to even. Adding and taking away 1.5 * 2^52 steps rounds to a step.
inline double round_minifloat(double z, int mantissa_bits, int min_exponent, double top) {
  const int64_t exponent = std::max<int64_t>((to_bits(z) >> 52) - 1023, min_exponent) - mantissa_bits;
  const double magic = 1.5 * pow2(exponent + 52);
  return std::min((z + magic) - magic, top);
}

inline double round_bf16(double z) { return round_minifloat(z, 7, -126, 3.3895313892515355e38); }

struct BlockScale {
  double scale;
  int exponent;  // of a power of two; else -127
  bool clamped;
};

inline BlockScale scale_for(const Format& f, int32_t amax, int32_t bias, double target) {
  float top;
  std::memcpy(&top, &amax, sizeof top);
  if (f.scale == ScaleType::kE8M0) {
    const int raw = ((amax + bias) >> 23) - 127 - f.max_exponent, held = std::min(std::max(raw, -127), 127);
    const int exponent = amax ? held : -127;
    return {pow2(exponent), exponent, amax && raw != held};
  }
  if (f.scale == ScaleType::kE4M3) {
    const double step = round_minifloat(double(top) / target / f.unit, 3, -6, 448.0);
    return {std::max(step, 0.001953125) * f.unit, -127, amax && step == 0};
  }
  if (f.scale == ScaleType::kFP32) {
    const double ideal = float(double(top) / f.qmax);
    return {ideal > 0 ? ideal : 1.0, -127, amax && ideal == 0};
  }
  const double ideal = round_bf16(double(top) * 0.142578125), held = std::min(std::max(ideal, 0x1p-48), 49152.0);
  return {round_minifloat(held, 2, -48, 49152.0), -127, amax && held != ideal};
}

// c of a block from z = |x| / s.
inline void round_block(const Format& f, const double* z, double* c) {
  if (f.scale != ScaleType::kE6M2) {
    for (int j = 0; j < f.block; j++) c[j] = round_minifloat(z[j], f.mantissa_bits, f.min_exponent, f.qmax);
    return;
  }
  for (int i = 0; i < f.block; i += 8) {
    double top[2];
    for (int h = 0; h < 2; h++) {
      const double* g = z + i + 4 * h;
      top[h] = std::max(std::max(g[0], g[1]), std::max(g[2], g[3]));
    }
    const double first = std::max(top[0], top[1]) >= 4 ? 2 : 1;
    for (int j = 0; j < 8; j++) {
      const double unit = first * (top[j / 4] >= 2 * first ? 2 : 1);
      c[i + j] = std::min(std::floor(z[i + j] / unit * 4 + 0.5) / 4, 1.75) * unit;
    }
  }
}

inline void divide(const Format& f, const double* x, double scale, double* z) {
  const double inverse = f.scale == ScaleType::kE6M2 ? round_bf16(1.0 / scale) : 1.0 / scale;
  // Exact where the scale is a power of two; the converter of HiF4 multiplies.
  if (f.scale == ScaleType::kE8M0 || f.scale == ScaleType::kE6M2)
    for (int j = 0; j < f.block; j++) z[j] = x[j] * inverse;
  else
    for (int j = 0; j < f.block; j++) z[j] = x[j] / scale;
}

// Added by halves, so that every backend finds the same bits. z and c are scratch.
inline double squared_error(const Format& f, const double* x, double scale, double* z, double* c) {
  divide(f, x, scale, z);
  round_block(f, z, c);
  for (int j = 0; j < f.block; j++) z[j] = c[j] * scale - x[j], z[j] *= z[j];
  for (int half = f.block / 2; half; half /= 2)
    for (int j = 0; j < half; j++) z[j] += z[j + half];
  return z[0];
}

inline BlockScale scale_of(const Format& f, int32_t amax, const double* x, double* z, double* c) {
  if (!f.four_over_six) return scale_for(f, amax, f.bias, f.qmax);
  const BlockScale six = scale_for(f, amax, f.bias, 6.0), four = scale_for(f, amax, f.floor_bias, 4.0);
  const double error = squared_error(f, x, six.scale, z, c);
  return squared_error(f, x, four.scale, z, c) < error ? four : six;
}

// Bits of a block's amax, its magnitudes in double; false where it is not finite.
inline bool read_block(const float* x, int n, double* magnitude, int32_t& amax) {
  amax = 0;
  for (int j = 0; j < n; j++) {
    int32_t bits;
    std::memcpy(&bits, x + j, sizeof bits);
    amax = std::max(amax, bits & 0x7FFFFFFF);
  }
  if (amax >= 0x7F800000) return false;
  for (int j = 0; j < n; j++) magnitude[j] = std::abs(double(x[j]));
  return true;
}

}  // namespace
}  // namespace ISA
}  // namespace mxprobe
