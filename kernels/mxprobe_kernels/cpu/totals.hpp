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
  vi nonzero, off_d, saturated, by_scale, excluded, clamped, amax;
  vi codes[16];  // of magnitudes, then of negative elements
  int64_t n_included, n_padded, n_blocks, n_nonfinite, n_excluded_nonzero;
  int32_t delta[DeltaTable::kNoBin + 1];
  int32_t granules[DeltaTable::kGranules];  // of bf16, which has no more bits than they tell apart: their bins later
};

// Four byte counters a lane -> codes first, first + 2, first + 4, first + 6.
INLINE void spread_codes(vi bytes, vi* codes) {
  for (int i = 0; i < 4; i++) codes[2 * i] += (bytes >> (8 * i)) & 0xFF;
}

// Whether there are elements whose squares vanish in fp32 beside the segment's scale, and hardly any larger ones that
// count to the same energy: its zeroed elements, or its D. `count` tells how many elements are not 0 and how many were
// added.
template <bool COVERS, bool LITE, class Count>
INLINE bool has_lost(const Sums& s, const Count& count) {
  const vf tiny = splat(0x1p-90f);  // what is lost is at most 2^-126 an element
  const vf zeroed2 = LITE ? s.e2 : s.z2, on_d2 = COVERS ? s.d2 : min(s.d2, s.e2_on_d);
  const bool some_zeroed = any_of(is_above(zeroed2, tiny)), some_on_d = LITE || any_of(is_above(on_d2, tiny));
  if (some_zeroed && some_on_d) return false;
  int64_t nonzero = 0, added = 0;
  count(nonzero, added);
  const double to_zero = LITE ? nonzero - lane_sum(s.off_d) : lane_sum(s.even & 0xFF) - double(added - nonzero);
  return (!some_zeroed && to_zero > 0) || (!some_on_d && nonzero > lane_sum(s.off_d));
}

// False where the energies have to be added by add_exactly; counts are added in any case.
template <bool COVERS, bool LITE, class Count>
INLINE bool flush(const Sums& s, int exponent, const Count& count, Totals& t) {
  const double f1 = std::ldexp(1.0, exponent), f2 = f1 * f1;
  t.off_d += s.off_d;
  if constexpr (!COVERS) t.saturated += s.saturated, t.by_scale += s.by_scale;
  if constexpr (!LITE) {
    spread_codes(s.even, t.codes);
    spread_codes(s.odd, t.codes + 1);
    spread_codes(s.minus_even, t.codes + 8);
    spread_codes(s.minus_odd, t.codes + 9);
  }
  if (has_lost<COVERS, LITE>(s, count)) return false;
  add_scaled(t.x2, s.x2, f2);
  add_scaled(t.e2, s.e2, f2);
  if constexpr (LITE) return true;
  add_scaled(t.xe, s.xe, f2);
  add_scaled(t.xr, s.xr, -f2 / 6);
  add_scaled(t.b2, s.b2, f2 / 36);
  add_scaled(t.g2, s.g2, f2 / 36);
  add_scaled(t.d2, s.d2, f2 / 36);
  add_scaled(t.bg, s.bg, -f2 / 36);
  add_scaled(t.z2, s.z2, f2);
  add_scaled(t.e, s.e, f1);
  if constexpr (!COVERS) {
    add_scaled(t.bd, s.bd, -f2 / 36);
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
  const double nonzero = lane_sum(t.nonzero) - double(t.n_excluded_nonzero);
  const double x2 = lane_sum(t.x2, LANES / 2), d2 = lane_sum(t.d2, LANES / 2);
  v[kX2] = x2;
  v[kE2] = lane_sum(t.e2, LANES / 2);
  v[kN] = double(t.n_included);
  v[kSaturated] = lane_sum(t.saturated);
  v[kNonfinite] = double(t.n_nonfinite);
  v[kBlocks] = double(t.n_blocks);
  v[kBlocksExcluded] = lane_sum(t.excluded);
  v[kAmax] = bits_to_float(lane_max(t.amax));
  if constexpr (LITE) {
    v[kZeroed] = nonzero - lane_sum(t.off_d);
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
  v[kDeadzone] = nonzero - lane_sum(t.off_d);
  v[kZeroed] = nonzero;
  for (int i = 1; i < 8; i++) v[kZeroed] -= codes[i];
  v[kZeroedByScale] = COVERS ? v[kZeroed] - v[kDeadzone] : lane_sum(t.by_scale);
  v[kClamped] = lane_sum(t.clamped);
  for (int i = 0; i < 32; i++) v[kDelta + i] = t.delta[i];
  for (int i = 0; i < DeltaTable::kGranules - 1; i++) v[kDelta + delta_table.bin[i]] += t.granules[i];
  for (int i = 0; i < 8; i++) {
    v[kCodes + i] = codes[i] - codes[8 + i];
    v[kCodes + 8 + i] = codes[8 + i];
  }
  v[kCodes] -= double(t.n_padded);
}

// Everything that belongs to a block: lane j < n_blocks has the bits of one's amax, all of `length` elements. Returns
// the exponents of their scales, kNone where a block is left out or not there; `exclude` takes back what one left out has
// been counted for.
template <DType D, bool LITE>
INLINE vi account(vi amax, int n_blocks, int length, int32_t bias, Totals& t) {
  const vi absent = lane_numbers() >= n_blocks, excluded = (amax >= kInfinity) & ~absent, out = absent | excluded;
  const vi zero = amax == 0;
  const vi raw = ((amax + bias) >> 23) - 129, exponent = zero ? splat(-127) : max(raw, splat(-127));
  t.n_blocks += n_blocks, t.n_included += int64_t(n_blocks) * length;
  t.excluded -= excluded;
  t.amax = max(t.amax, out ? splat(0) : amax);
  if constexpr (!LITE) {
    t.clamped -= (raw < -127) & ~zero & ~out;
    const vi own = out ? splat(0) : exponent;
    const vf a = as_float(out ? splat(0) : amax) * as_float((127 - own) << 23);
    constexpr int no_bin = DeltaTable::kGranules - 1;
    const vi granule = (as_int(a) >> DeltaTable::kShift) - DeltaTable::kFirst;
    const vi granules = a > 0.0f ? min(max(granule, splat(0)), splat(no_bin - 1)) : splat(no_bin);
    int32_t g[LANES];
    std::memcpy(g, &granules, sizeof g);
    in_memory(g);
    if constexpr (D == DType::kBFloat16) {
      for (int j = 0; j < LANES; j++) t.granules[g[j]]++;
    } else {
      float ratios[LANES];
      std::memcpy(ratios, &a, sizeof a);
      for (int j = 0; j < LANES; j++) {
        const bool past = ratios[j] > delta_table.edge[g[j]];
        t.delta[delta_table.bin[g[j]] - past]++;
      }
    }
  }
  return out ? splat(kNone) : exponent;
}

inline void exclude(int64_t n_nonfinite, int64_t n_nonzero, int length, Totals& t) {
  t.n_nonfinite += n_nonfinite, t.n_excluded_nonzero += n_nonzero, t.n_included -= length;
}

}  // namespace
}  // namespace ISA
}  // namespace mxprobe
