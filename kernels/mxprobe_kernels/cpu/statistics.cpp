// MXFP4 statistics in one pass over a matrix, for CPUs. Compiled once per instruction set, with
//   -DISA=name -DLANES=n     n fp32 lanes of a vector register
// by build_cpu.py; dispatch.cpp picks one at run time.
//
// With s the block's power-of-two scale and m its amax, everything is computed in units of s:
//
//   u = x / s    a = m / s      exact
//   c = rne(u), at most 6         Q  = s c
//   c* = rne(6 u / a)             Q* = s c* a / 6
//   e = c - u                     Q - x
//   r = c* a - 6 u                Q* - x in sixths: d on D (c* = 0), g elsewhere
//   b = 6 c - c* a                Q - Q* in sixths
//
// The quotient 6 u / a is computed as u * (6 / a) and snapped to multiples of 2^-17, so that exact ties are exact;
// bf16 and fp16 have no other quotient so close to a tie. For fp32, the sign of 6 u - t a says on which side of t the
// quotient lies; r and b are exact to their own size where they nearly cancel. Both come from fused multiplications,
// whose rounding errors are exact numbers; without them, from u and a split into 12-bit halves.
//
// rne adds and takes away 1.5 * 2^22 times the power of two below u, whose last place is the grid's. It is done in
// units in which that number is 1.5 times a power of two, so that two instructions make it: u comes in sixteenths, and
// c goes in units of 2^-26, whose exponent and first mantissa bit then end in the four bits 0, 8, 10 .. 15.
//
// A segment is 128 elements a lane. Its largest scale 2^E is known before anything is summed, so that its sums are fp32
// multiples of 2^E or 4^E, and every block carries the weight w = s / 2^E; segments and tiles are added in double, tiles
// in their order whatever the thread count.
#include "statistics.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "vectors.hpp"

namespace mxprobe {
namespace ISA {
namespace {

constexpr int kBlock = 32;
constexpr int kVectors = kBlock / LANES;  // vectors of a row block
constexpr int kGroups = 4;                // of LANES blocks in a segment
constexpr int kStrip = 4;                 // vectors of columns taken together
constexpr int kNone = -128;               // no exponent
constexpr int kSpread = 30;               // binades of scales that are summed together: w >= 2^-30
constexpr int kWiden = 15;                // vectors that 4-bit counters hold

constexpr float kSixteenth = 0.0625f;
constexpr float kUnit = 1.4901161193847656e-08f;  // 2^-26, of c
constexpr float kPerUnit = 67108864.0f;

// c in kUnit, from u in sixteenths; not yet saturated.
INLINE vf round_to_grid(vf u) {
  const vf step = one_and_a_half(at_least(u, splat(kSixteenth)));
  return (u * 2.384185791015625e-07f + step) - step;
}

// What a segment sums, per lane.
struct Sums {
  vf x2, xe, xr, e2, b2, g2, d2, bg, z2, e;
  vf bd, b2_saturated, e2_on_d, e2_saturated;
  vi on_d, zeros, saturated, by_scale;  // elements with c* = 0 and with x = 0, padding among them
  vi nibbles, minus_nibbles;            // eight 4-bit counters of codes
  vi even, odd, minus_even, minus_odd;  // the same in bytes: codes 0 2 4 6, codes 1 3 5 7
};

// 1 << 4 code
INLINE vi nibble_of(vf c) {
  const vi top = as_int(c) >> 22;  // in its last four bits 0, 8, 10, 11 .. 15
#ifdef MXPROBE_LOOK_UP
  const vi table = {1, 0, 0, 0, 0, 0, 0, 0, 1 << 4, 0, 1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28};
  return look_up(top, table);
#else
  const vi code = max(top - 200, top > 0 ? splat(1) : splat(0));
#ifdef __AVX2__
  return splat(1) << (code << 2);
#else
  return __builtin_convertvector(as_float((code << 25) + 0x3F800000), vi);
#endif
#endif
}

// Scale of a block (or of a column per lane) beside that of its segment, 2^E: w = s / 2^E, a_w = a w.
struct Scale {
  vf inverse;  // 1 / 16 s
  vf ratio;    // 6 / a
  vf w, w6;    // w and 6 w, per kUnit
  vf a_w;      // a_w per kUnit
  vf high, low, high16, low16;  // a_w in 12-bit halves, per kUnit and in sixteenths
};

INLINE Scale scale_of(vi amax, vi exponent, int top) {
  Scale k;
  const vf inverse = as_float((127 - exponent) << 23), m = as_float(amax);
  k.inverse = inverse * kSixteenth;
  k.ratio = 6.0f / (amax > 0 ? m * inverse : splat(1.0f));
  k.w = as_float((exponent - (top - 127 - 26)) << 23);
  k.w6 = 6.0f * k.w;
  const vf a_w = m * pow2(-top), high = as_float(as_int(a_w) & ~0xFFF), low = a_w - high;
  k.a_w = a_w * kPerUnit;
  k.high = high * kPerUnit, k.low = low * kPerUnit, k.high16 = high * 16.0f, k.low16 = low * 16.0f;
  return k;
}

INLINE Scale lane_of(const Scale& k, int j) {
  return {splat(k.inverse[j]), splat(k.ratio[j]), splat(k.w[j]),      splat(k.w6[j]),   splat(k.a_w[j]),
          splat(k.high[j]),    splat(k.low[j]),   splat(k.high16[j]), splat(k.low16[j])};
}

template <DType D, bool COVERS, bool LITE>
INLINE void add(Sums& s, vi bits, const Scale& k, vf inverse_top) {
  const vf x = as_float(kSigned ? bits : bits & 0x7FFFFFFF);
  const vf u = x * k.inverse, x_w = x * inverse_top;
  vf c = round_to_grid(u);
  if constexpr (!COVERS) c = at_most(c, splat(6.0f * kUnit));
  const vf e = c * k.w - x_w;  // e, r and b carry the weight w
  const Mask at_zero = is_zero(c);
  s.x2 += x_w * x_w;
  s.e2 += e * e;
  add_where(is_zero(x), s.zeros, splat(1));
  if constexpr (!COVERS) add_where(is_above(magnitude(u), splat(6.0f * kSixteenth)), s.saturated, splat(1));
  if constexpr (LITE) {
    add_where(at_zero, s.on_d, splat(1));
    return;
  }
  vf t = (u * k.ratio + 6.0f) - 6.0f;
  vf r, b, c_star;
  if constexpr (D != DType::kFloat32) {
    c_star = round_to_grid(t);
    const vf ideal = c_star * k.a_w;
    r = ideal - x_w * 6.0f;
    b = c * k.w6 - ideal;
  } else if constexpr (kFused) {
    const vf six = splat(6.0f), a16 = k.a_w * (16.0f * kUnit);
    const vf near = t * a16;
    const vf side = fused(x_w, six, near) - fused(t, a16, near);
    t += clipped(side * 1e30f, splat(2.384185791015625e-07f));
    c_star = round_to_grid(t);
    const vf ideal = c_star * k.a_w;
    r = fused(c_star, k.a_w, ideal) - fused(x_w, six, ideal);
    b = -fused(c_star, k.a_w, c * k.w6);
  } else {
    const vf high = as_float(as_int(x_w) & ~0xFFF), high6 = high * 6.0f, low6 = (x_w - high) * 6.0f;
    const vf side = (high6 - t * k.high16) + (low6 - t * k.low16);
    t += clipped(side * 1e30f, splat(2.384185791015625e-07f));
    c_star = round_to_grid(t);
    const vf ideal_high = c_star * k.high, ideal_low = c_star * k.low;
    r = (ideal_high - high6) + (ideal_low - low6);
    b = (c * k.w6 - ideal_high) - ideal_low;
  }
  const Mask on_d = is_zero(c_star), off_d = none_of(on_d);
  s.xe += e * x_w;
  s.xr += r * x_w;
  s.b2 += b * b;
  add_where(on_d, s.d2, r, r);
  add_where(off_d, s.g2, r, r);
  add_where(off_d, s.bg, r, b);
  add_where(at_zero, s.z2, x_w, x_w);
  add_where(on_d, s.on_d, splat(1));
  s.e += kSigned ? e : as_float(as_int(e) ^ (bits & INT32_MIN));
  if constexpr (!COVERS) {
    const Mask over = is_above(magnitude(u), splat(6.0f * kSixteenth));
    add_where(on_d, s.bd, b, r);
    add_where(on_d, s.e2_on_d, e, e);
    add_where(over, s.b2_saturated, b, b);
    add_where(over, s.e2_saturated, e, e);
    add_where(at_zero & off_d, s.by_scale, splat(1));
  }
  const vi one = nibble_of(c);
  s.nibbles += one;
  add_where(is_negative(bits), s.minus_nibbles, one);
}

INLINE void widen(Sums& s) {
  s.even += s.nibbles & 0x0F0F0F0F;
  s.odd += (s.nibbles >> 4) & 0x0F0F0F0F;
  s.minus_even += s.minus_nibbles & 0x0F0F0F0F;
  s.minus_odd += (s.minus_nibbles >> 4) & 0x0F0F0F0F;
  s.nibbles = s.minus_nibbles = vi{};
}

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

template <DType D>
int64_t count_nonfinite(const char* p, int64_t stride, int n, int lane) {
  int64_t found = 0;
  for (int i = 0; i < n; i++) {
    const vi bad = (load<D>(p + i * stride) & 0x7FFFFFFF) >= kInfinity;
    if (lane < 0) found -= int64_t(lane_sum(bad));
    else found -= bad[lane];
  }
  return found;
}

// n_blocks <= kGroups LANES whole blocks of a row, all of which count for `length` elements.
template <DType D, bool COVERS, bool LITE>
void row_segment(const char* p, int n_blocks, int length, int32_t bias, Totals& t) {
  constexpr int stride = kBlock * element_bytes<D>, vector = LANES * element_bytes<D>;
  const int n_groups = (n_blocks + LANES - 1) / LANES;
  vi amax[kGroups], exponent[kGroups];
  int top = kNone;
  for (int g = 0; g < n_groups; g++) {
    const int first = g * LANES, n = std::min(LANES, n_blocks - first);
    Raw<D> m[LANES];
    for (int i = 0; i < LANES; i++) {
      const char* block = p + int64_t(first + std::min(i, n - 1)) * stride;
      m[i] = load_magnitude<D>(block);
      for (int k = 1; k < kVectors; k++) m[i] = max(m[i], load_magnitude<D>(block + k * vector));
    }
    amax[g] = expand<D>(lane_maxima(m));
    exponent[g] = account<LITE>(amax[g], n, length, bias, t);
    top = std::max(top, int(lane_max(exponent[g])));
    if (lane_max(amax[g]) >= kInfinity)
      for (int i = 0; i < n; i++)
        if (amax[g][i] >= kInfinity) t.n_nonfinite += count_nonfinite<D>(p + (first + i) * stride, vector, kVectors, -1);
  }
  // Blocks far below the largest scale would vanish beside it: they wait for a pass of their own.
  while (top > kNone) {
    Sums s{};
    const vf inverse_top = splat(pow2(-top));
    int vectors = 0, next = kNone;
    for (int g = 0; g < n_groups; g++) {
      const Scale scales = scale_of(amax[g], max(exponent[g], splat(top - kSpread)), top);
      int32_t exponents[LANES];
      std::memcpy(exponents, &exponent[g], sizeof exponents);
      const int n = std::min(LANES, n_blocks - g * LANES);
      for (int i = 0; i < n; i++) {
        if (exponents[i] > top || exponents[i] == kNone) continue;
        if (exponents[i] < top - kSpread) {
          next = std::max(next, exponents[i]);
          continue;
        }
        const Scale scale = lane_of(scales, i);
        const char* block = p + int64_t(g * LANES + i) * stride;
        for (int k = 0; k < kVectors; k++) add<D, COVERS, LITE>(s, load<D>(block + k * vector), scale, inverse_top);
        if (!LITE && (vectors += kVectors) > kWiden - kVectors) widen(s), vectors = 0;
      }
    }
    if (!LITE) widen(s);
    if (!flush<COVERS, LITE>(s, top, t))
      for (int i = 0; i < n_blocks; i++) {
        const int g = i / LANES, j = i % LANES, own = exponent[g][j];
        if (own > top || own < top - kSpread || own == kNone) continue;
        for (int k = 0; k < kVectors; k++)
          add_exactly(load<D>(p + int64_t(i) * stride + k * vector), splat(-1), splat(amax[g][j]), splat(own), t);
      }
    top = next;
  }
}

// kStrip vectors of columns and `length` <= 32 rows of them.
template <DType D, bool COVERS, bool LITE>
void column_strip(const char* p, int64_t stride, int length, int columns, int32_t bias, Totals& t) {
  constexpr int vector = LANES * element_bytes<D>;
  Raw<D> m[kStrip] = {};
  vi amax[kStrip], exponent[kStrip];
  for (int i = 0; i < length; i++)
    for (int k = 0; k < kStrip; k++) m[k] = max(m[k], load_magnitude<D>(p + i * stride + k * vector));
  int top = kNone;
  for (int k = 0; k < kStrip; k++) {
    const int n = std::min(LANES, std::max(columns - k * LANES, 0));
    amax[k] = expand<D>(m[k]);
    exponent[k] = account<LITE>(amax[k], n, length, bias, t);
    t.n_padded -= int64_t(kBlock - length) * n;  // rows that are not there are never added
    top = std::max(top, int(lane_max(exponent[k])));
    if (lane_max(amax[k]) >= kInfinity)
      for (int j = 0; j < n; j++)
        if (amax[k][j] >= kInfinity) {
          t.n_nonfinite += count_nonfinite<D>(p + k * vector, stride, length, j);
          t.n_padded += kBlock - length;
        }
  }
  while (top > kNone) {
    Sums s{};
    const vf inverse_top = splat(pow2(-top));
    int next = kNone;
    for (int k = 0; k < kStrip; k++) {
      const vi far = exponent[k] < top - kSpread, past = exponent[k] > top, absent = exponent[k] == kNone;
      const vi skip = far | past | absent;
      next = std::max(next, int(lane_max(far & ~absent ? exponent[k] : splat(kNone))));
      const Scale scale = scale_of(skip ? splat(0) : amax[k], skip ? splat(top) : exponent[k], top);
      const vi keep = ~skip;
      for (int i = 0; i < length; i++) {
        add<D, COVERS, LITE>(s, load<D>(p + i * stride + k * vector) & keep, scale, inverse_top);
        if (!LITE && i % kWiden == kWiden - 1) widen(s);
      }
      if (!LITE) widen(s);
      // columns that wait, or count for nothing, were added as +0
      t.n_padded -= int64_t(lane_sum(skip)) * length;
    }
    if (!flush<COVERS, LITE>(s, top, t))
      for (int k = 0; k < kStrip; k++) {
        const vi keep = exponent[k] <= top & exponent[k] >= top - kSpread & exponent[k] != kNone;
        for (int i = 0; i < length; i++) add_exactly(load<D>(p + i * stride + k * vector), keep, amax[k], exponent[k], t);
      }
    top = next;
  }
}

template <DType D, bool COVERS, bool LITE>
void row_tile(const Tile& t, Totals& totals) {
  constexpr int bytes = element_bytes<D>, segment = kGroups * LANES;
  for (int64_t r = t.row_begin; r < t.row_end; r++) {
    const char* row = t.x + r * t.stride_bytes;
    const int64_t whole = t.column_begin + (t.column_end - t.column_begin) / kBlock * kBlock;
    for (int64_t c = t.column_begin; c < whole; c += segment * kBlock) {
      const int n = int(std::min<int64_t>(segment, (whole - c) / kBlock));
      row_segment<D, COVERS, LITE>(row + c * bytes, n, kBlock, t.bias, totals);
    }
    if (whole < t.column_end) {
      char padded[kBlock * bytes] = {};
      std::memcpy(padded, row + whole * bytes, (t.column_end - whole) * bytes);
      row_segment<D, COVERS, LITE>(padded, 1, int(t.column_end - whole), t.bias, totals);
    }
  }
}

template <DType D, bool COVERS, bool LITE>
void column_tile(const Tile& t, Totals& totals) {
  constexpr int bytes = element_bytes<D>, width = kStrip * LANES;
  for (int64_t r = t.row_begin; r < t.row_end; r += kBlock) {
    const int length = int(std::min<int64_t>(kBlock, t.row_end - r));
    for (int64_t c = t.column_begin; c < t.column_end; c += width) {
      const char* p = t.x + r * t.stride_bytes + c * bytes;
      const int columns = int(std::min<int64_t>(width, t.column_end - c));
      if (columns == width) {
        column_strip<D, COVERS, LITE>(p, t.stride_bytes, length, columns, t.bias, totals);
      } else {
        char padded[kBlock * width * bytes] = {};
        for (int i = 0; i < length; i++) std::memcpy(padded + i * width * bytes, p + i * t.stride_bytes, columns * bytes);
        column_strip<D, COVERS, LITE>(padded, width * bytes, length, columns, t.bias, totals);
      }
    }
  }
}

template <DType D, bool COVERS, bool LITE>
void run(const Tile& t, double* v) {
  Totals totals{};
  if (t.columns) column_tile<D, COVERS, LITE>(t, totals);
  else row_tile<D, COVERS, LITE>(t, totals);
  finish<COVERS, LITE>(totals, v);
}

template <DType D>
void run(const Tile& t, double* v) {
  if (t.lite) t.covers ? run<D, true, true>(t, v) : run<D, false, true>(t, v);
  else t.covers ? run<D, true, false>(t, v) : run<D, false, false>(t, v);
}

}  // namespace

void statistics(const Tile& t, double* v) {
  if (t.dtype == DType::kFloat32) run<DType::kFloat32>(t, v);
  else if (t.dtype == DType::kBFloat16) run<DType::kBFloat16>(t, v);
  else run<DType::kFloat16>(t, v);
}

}  // namespace ISA
}  // namespace mxprobe
