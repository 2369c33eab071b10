// Quantize and dequantize blocks of fp32, bit for bit as the float64 torch path does; and the decomposition of any format
// (statistics.cpp is that of MXFP4, by other arithmetic). Compiled once per instruction set, like statistics.cpp.
#include "quantize.hpp"

#include <vector>

#include "formats.hpp"
#include "statistics.hpp"

namespace mxprobe {
namespace ISA {
namespace {

struct Scratch {
  std::vector<double> x, z, c, ideal;
  explicit Scratch(int n) : x(n), z(n), c(n), ideal(n) {}
};

template <class Out>
void run(const Format& f, const float* x, int64_t n_blocks, Out* q, int32_t* exponents) {
  Scratch s(f.block);
  for (int64_t i = 0; i < n_blocks; i++, x += f.block, q += f.block) {
    int32_t amax;
    if (!read_block(x, f.block, s.x.data(), amax)) {
      exponents[i] = -127;
      std::fill(q, q + f.block, Out(from_bits(0x7FF8000000000000)));
      continue;
    }
    const BlockScale scale = scale_of(f, amax, s.x.data(), s.z.data(), s.c.data());
    exponents[i] = scale.exponent;
    divide(f, s.x.data(), scale.scale, s.z.data());
    round_block(f, s.z.data(), s.c.data());
    for (int j = 0; j < f.block; j++)
      q[j] = Out(from_bits(to_bits(s.c[j] * scale.scale) | (to_bits(double(x[j])) & INT64_MIN)));
  }
}

// Of a finite block: v += its sums, and counts of its elements; codes of padding among them.
void add_block(const Format& f, const float* x, int32_t amax, Scratch& s, bool codes, double* v) {
  const BlockScale scale = scale_of(f, amax, s.x.data(), s.z.data(), s.c.data());
  float amax_float;
  std::memcpy(&amax_float, &amax, sizeof amax_float);
  const double top = amax ? amax_float : 1.0;
  for (int j = 0; j < f.block; j++) s.z[j] = s.x[j] * f.qmax / top;
  round_block(f, s.z.data(), s.ideal.data());
  divide(f, s.x.data(), scale.scale, s.z.data());
  round_block(f, s.z.data(), s.c.data());
  for (int j = 0; j < f.block; j++) {
    const double a = s.x[j], q = s.c[j] * scale.scale, q_star = s.ideal[j] * top / f.qmax;
    const double e = q - a, b = q - q_star, r = q_star - a, e2 = e * e, b2 = b * b;
    const bool negative = to_bits(double(x[j])) < 0;
    v[kX2] += a * a, v[kE2] += e2, v[kScale2] += b2, v[kXQ] += a * q, v[kXQStar] += a * q_star;
    v[kE] += negative ? -e : e;
    if (codes) v[kCodes + 8 * negative + int(std::min(std::min(s.c[j] * 2, s.c[j] + 2), s.c[j] / 2 + 4))]++;
    if (s.z[j] > f.qmax) v[kSat2] += b2, v[kE2Saturated] += e2, v[kSaturated]++;
    if (a == 0) continue;
    if (s.ideal[j] == 0) v[kDz2] += r * r, v[kScaleDz] += b * r, v[kE2OnD] += e2, v[kDeadzone]++;
    else v[kGrid2] += r * r, v[kScaleGrid] += b * r;
    if (s.c[j] == 0) v[kE2Zeroed] += e2, v[kZeroed]++, v[kZeroedByScale] += s.ideal[j] != 0;
  }
  v[kClamped] += scale.clamped;
  v[kAmax] = std::max(v[kAmax], double(amax_float));
  if (amax) {
    int bin = 0;
    while (bin < 31 && scale.scale * f.qmax / top >= std::exp2((bin + 1) / 32.0)) bin++;
    v[kDelta + bin]++;
  }
}

}  // namespace

void quantize(const Format& f, const float* x, int64_t n_blocks, void* q, bool to_double, int32_t* exponents) {
  if (to_double) run(f, x, n_blocks, static_cast<double*>(q), exponents);
  else run(f, x, n_blocks, static_cast<float*>(q), exponents);
}

void format_statistics(const Format& f, const float* x, const Grid& g, double* v) {
  Scratch s(f.block);
  const bool codes = f.qmax == 6 && f.mantissa_bits == 1;
  for (int64_t r = 0; r < g.rows; r++)
    for (int64_t k = 0; k < g.across; k++, x += f.block) {
      const int64_t height = r + 1 < g.rows ? g.height : g.last_height, width = k + 1 < g.across ? g.width : g.last_width;
      int32_t amax;
      v[kBlocks]++;
      if (!read_block(x, f.block, s.x.data(), amax)) {
        v[kBlocksExcluded]++;
        for (int j = 0; j < f.block; j++) v[kNonfinite] += (to_bits(double(x[j])) & INT64_MAX) >= 0x7FF0000000000000;
        continue;
      }
      v[kN] += double(height * width);
      if (codes) v[kCodes] -= double(f.block - height * width);  // padding reads as +0
      add_block(f, x, amax, s, codes, v);
    }
}

}  // namespace ISA
}  // namespace mxprobe
