// Quantize and dequantize blocks of fp32, bit for bit as the float64 torch path does. Compiled once per instruction set,
// like statistics.cpp. Loops over a block are plain: the compiler makes vectors of them.
//
//   s = 2^e by the bits of amax (E8M0)  or  max(e4m3(amax / qmax / unit), 2^-9) unit (E4M3)
//   q = sign(x) s min(rne(|x| / s), qmax)     rne to the element's grid, in double
#include "quantize.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

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

template <bool POWER_OF_TWO, class Out>
void run(const Quantize& f, const float* x, int64_t n_blocks, Out* q, int32_t* exponents) {
  constexpr int kMost = 1024;
  int32_t bits[kMost];
  for (int64_t i = 0; i < n_blocks; i++, x += f.block, q += f.block) {
    std::memcpy(bits, x, f.block * sizeof *x);
    int32_t amax = 0;
    for (int j = 0; j < f.block; j++) amax = std::max(amax, bits[j] & 0x7FFFFFFF);
    exponents[i] = -127;
    if (amax >= 0x7F800000) {
      const double nan = from_bits(0x7FF8000000000000);
      for (int j = 0; j < f.block; j++) q[j] = Out(nan);
      continue;
    }
    double scale;
    if (POWER_OF_TWO) {
      const int raw = ((amax + f.bias) >> 23) - 127 - f.max_exponent;
      if (amax) exponents[i] = std::min(std::max(raw, -127), 127);
      scale = pow2(exponents[i]);
    } else {
      float top;
      std::memcpy(&top, &amax, sizeof top);
      scale = std::max(round_minifloat(top / f.qmax / f.unit, 3, -6, 448.0), 0.001953125) * f.unit;
    }
    const double inverse = 1.0 / scale;  // exact where the scale is a power of two
    for (int j = 0; j < f.block; j++) {
      const double x_abs = std::abs(x[j]), z = POWER_OF_TWO ? x_abs * inverse : x_abs / scale;
      const double c = round_minifloat(z, f.mantissa_bits, f.min_exponent, f.qmax) * scale;
      q[j] = Out(from_bits(to_bits(c) | (int64_t(bits[j]) & INT64_MIN)));
    }
  }
}

template <class Out>
void run(const Quantize& f, const float* x, int64_t n_blocks, Out* q, int32_t* exponents) {
  if (f.unit == 0) run<true>(f, x, n_blocks, q, exponents);
  else run<false>(f, x, n_blocks, q, exponents);
}

}  // namespace

void quantize(const Quantize& f, const float* x, int64_t n_blocks, void* q, bool to_double, int32_t* exponents) {
  if (to_double) run(f, x, n_blocks, static_cast<double*>(q), exponents);
  else run(f, x, n_blocks, static_cast<float*>(q), exponents);
}

}  // namespace ISA
}  // namespace mxprobe
