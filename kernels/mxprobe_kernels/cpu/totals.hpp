// What a tile sums, in double: from the sums of its segments, or element by element where those have lost something.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "sums.hpp"

namespace mxprobe {
namespace ISA {
namespace {

// What a tile sums.
struct Totals {
  vd x2, xe, xr, e2, b2, g2, d2, bg, z2, e, bd, b2_saturated, e2_on_d, e2_saturated;
  vi on_d, zeros, saturated, by_scale, excluded, clamped, amax;
  vi codes[16];  // of magnitudes, then of negative elements
  int64_t n_included, n_padded, n_blocks, n_nonfinite;
  int32_t delta[32];
};

// Four byte counters a lane -> codes first, first + 2, first + 4, first + 6.
INLINE void spread_codes(vi bytes, vi* codes) {
  for (int i = 0; i < 4; i++) codes[2 * i] += (bytes >> (8 * i)) & 0xFF;
}

// Whether there are elements whose squares vanish in fp32 beside the segment's scale, and hardly any larger ones that
// count to the same energy: its zeroed elements, or its D.
template <bool COVERS, bool LITE>
INLINE bool has_lost(const Sums& s) {
  constexpr double tiny = 0x1p-90;  // what is lost is at most 2^-126 an element
  const double zeroed2 = lane_sum(LITE ? s.e2 : s.z2), on_d2 = LITE ? 1 : lane_sum(COVERS ? s.d2 : min(s.d2, s.e2_on_d));
  if (zeroed2 >= tiny && on_d2 >= tiny) return false;
  const double zeros = lane_sum(s.zeros), at_zero = lane_sum(LITE ? s.on_d : s.even & 0xFF);
  return (zeroed2 < tiny && at_zero > zeros) || (on_d2 < tiny && lane_sum(s.on_d) > zeros);
}

// False where the energies have to be added by add_exactly; counts are added in any case.
template <bool COVERS, bool LITE>
INLINE bool flush(const Sums& s, int exponent, Totals& t) {
  const double f1 = std::ldexp(1.0, exponent), f2 = f1 * f1;
  t.on_d += s.on_d, t.zeros += s.zeros;
  if constexpr (!COVERS) t.saturated += s.saturated, t.by_scale += s.by_scale;
  if constexpr (!LITE) {
    spread_codes(s.even, t.codes);
    spread_codes(s.odd, t.codes + 1);
    spread_codes(s.minus_even, t.codes + 8);
    spread_codes(s.minus_odd, t.codes + 9);
  }
  if (has_lost<COVERS, LITE>(s)) return false;
  add_scaled(t.x2, s.x2, f2);
  add_scaled(t.e2, s.e2, f2);
  if constexpr (LITE) return true;
  add_scaled(t.xe, s.xe, f2);
  add_scaled(t.xr, s.xr, f2 / 6);
  add_scaled(t.b2, s.b2, f2 / 36);
  add_scaled(t.g2, s.g2, f2 / 36);
  add_scaled(t.d2, s.d2, f2 / 36);
  add_scaled(t.bg, s.bg, f2 / 36);
  add_scaled(t.z2, s.z2, f2);
  add_scaled(t.e, s.e, f1);
  if constexpr (!COVERS) {
    add_scaled(t.bd, s.bd, f2 / 36);
    add_scaled(t.b2_saturated, s.b2_saturated, f2 / 36);
    add_scaled(t.e2_on_d, s.e2_on_d, f2);
    add_scaled(t.e2_saturated, s.e2_saturated, f2);
  }
  return true;
}

// To the nearest of E2M1, ties to even.
inline double round_exactly(double z) {
  const double step = std::ldexp(0.5, std::max(std::ilogb(std::max(z, 1.0)), 0));
  return std::min(std::nearbyint(z / step) * step, 6.0);
}

// The energies of the lanes in `keep`, in double and one after the other.
void add_exactly(vi bits, vi keep, vi amax, vi exponent, Totals& t) {
  const vf values = as_float(bits), tops = as_float(amax);
  for (int j = 0; j < LANES; j++) {
    if (!keep[j] || values[j] == 0) continue;
    const double x = std::abs(values[j]), top = tops[j], s = std::ldexp(1.0, exponent[j]);
    const double c = round_exactly(x / s), c_star = round_exactly(6 * x / top), q_star = c_star * top / 6;
    const double e = c * s - x, r = q_star - x, b = c * s - q_star;
    t.x2[0] += x * x, t.xe[0] += x * e, t.xr[0] += x * r, t.e2[0] += e * e, t.b2[0] += b * b;
    t.e[0] += bits[j] < 0 ? -e : e;
    if (c == 0) t.z2[0] += x * x;
    if (c_star == 0) t.d2[0] += r * r, t.bd[0] += b * r, t.e2_on_d[0] += e * e;
    else t.g2[0] += r * r, t.bg[0] += b * r;
    if (x > 6 * s) t.b2_saturated[0] += b * b, t.e2_saturated[0] += e * e;
  }
}

template <bool COVERS, bool LITE>
void finish(const Totals& t, double* v) {
  const double x2 = lane_sum(t.x2, LANES / 2), d2 = lane_sum(t.d2, LANES / 2), zeros = lane_sum(t.zeros);
  v[kX2] = x2;
  v[kE2] = lane_sum(t.e2, LANES / 2);
  v[kN] = double(t.n_included);
  v[kSaturated] = lane_sum(t.saturated);
  v[kNonfinite] = double(t.n_nonfinite);
  v[kBlocks] = double(t.n_blocks);
  v[kBlocksExcluded] = lane_sum(t.excluded);
  v[kAmax] = bits_to_float(lane_max(t.amax));
  if constexpr (LITE) {
    v[kZeroed] = lane_sum(t.on_d) - zeros;
    return;
  }
  v[kScale2] = lane_sum(t.b2, LANES / 2);
  v[kDz2] = d2;
  v[kGrid2] = lane_sum(t.g2, LANES / 2);
  v[kScaleGrid] = lane_sum(t.bg, LANES / 2);
  v[kScaleDz] = lane_sum(t.bd, LANES / 2);
  v[kXQ] = x2 + lane_sum(t.xe, LANES / 2);
  v[kXQStar] = x2 + lane_sum(t.xr, LANES / 2);
  v[kE] = lane_sum(t.e, LANES / 2);
  v[kSat2] = lane_sum(t.b2_saturated, LANES / 2);
  v[kE2OnD] = COVERS ? d2 : lane_sum(t.e2_on_d, LANES / 2);  // Q = 0 wherever Q* = 0, where s >= s*
  v[kE2Zeroed] = lane_sum(t.z2, LANES / 2);
  v[kE2Saturated] = lane_sum(t.e2_saturated, LANES / 2);
  double codes[16];
  for (int i = 0; i < 16; i++) codes[i] = lane_sum(t.codes[i]);
  v[kDeadzone] = lane_sum(t.on_d) - zeros;
  v[kZeroed] = codes[0] - zeros;
  v[kZeroedByScale] = COVERS ? v[kZeroed] - v[kDeadzone] : lane_sum(t.by_scale);
  v[kClamped] = lane_sum(t.clamped);
  for (int i = 0; i < 32; i++) v[kDelta + i] = t.delta[i];
  for (int i = 0; i < 8; i++) {
    v[kCodes + i] = codes[i] - codes[8 + i];
    v[kCodes + 8 + i] = codes[8 + i];
  }
  v[kCodes] -= double(t.n_padded);
}

// Everything that belongs to a block: lane j < n_blocks has the bits of one's amax, all of `length` elements. Returns
// the exponents of their scales, kNone where a block is left out or not there.
template <bool LITE>
INLINE vi account(vi amax, int n_blocks, int length, int32_t bias, Totals& t) {
  const vi absent = lane_numbers() >= n_blocks, excluded = (amax >= kInfinity) & ~absent, out = absent | excluded;
  const vi zero = amax == 0;
  const vi raw = ((amax + bias) >> 23) - 129, exponent = zero ? splat(-127) : max(raw, splat(-127));
  int n_excluded = 0;
  t.n_blocks += n_blocks;
  t.excluded -= excluded;
  t.amax = max(t.amax, out ? splat(0) : amax);
  if (lane_max(-excluded)) n_excluded = int(-lane_sum(excluded));
  t.n_included += int64_t(n_blocks - n_excluded) * length;
  if constexpr (!LITE) {
    t.n_padded += int64_t(n_blocks - n_excluded) * (kBlock - length);
    t.clamped -= (raw < -127) & ~zero & ~out;
    const vi own = out ? splat(0) : exponent;
    const vf a = as_float(out ? splat(0) : amax) * as_float((127 - own) << 23);
    float ratios[LANES];
    std::memcpy(ratios, &a, sizeof a);
    for (int j = 0; j < n_blocks; j++)
      if (ratios[j] > 0) t.delta[delta_table.bin_of(ratios[j])]++;
  }
  return out ? splat(kNone) : exponent;
}

}  // namespace
}  // namespace ISA
}  // namespace mxprobe
