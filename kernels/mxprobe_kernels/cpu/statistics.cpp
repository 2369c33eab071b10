// MXFP4 statistics in one pass over a matrix, for CPUs. Compiled once per instruction set, with
//   -DISA=name -DLANES=n     n fp32 lanes of a vector register
// by build_hook.py; dispatch.cpp picks one at run time. GCC and clang vector extensions, no intrinsics.
//
// With s the block's power-of-two scale and m its amax, everything is computed in units of s:
//
//   u = |x| / s    a = m / s      exact
//   c = rne(u), at most 6         Q  = s c
//   c* = rne(6 u / a)             Q* = s c* a / 6
//   e = c - u                     Q - x
//   r = c* a - 6 u                Q* - x in sixths: d on D (c* = 0), g elsewhere
//   b = 6 c - c* a                Q - Q* in sixths
//
// The quotient 6 u / a is computed as u * (6 / a) and snapped to multiples of 2^-17, so that exact ties are exact;
// bf16 and fp16 have no other quotient so close to a tie. For fp32, the sign of 6 u - t a says on which side of t the
// quotient lies: u and a are split into 12-bit halves, whose products with a tie are exact. The same halves make r
// and b exact to their own size where they nearly cancel.
//
// A segment is 128 elements a lane. Its largest scale 2^E is known before anything is summed, so that its sums are fp32
// multiples of 2^E or 4^E, and every block carries the weight w = s / 2^E; segments and tiles are added in double, tiles
// in their order whatever the thread count.
#include "statistics.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace mxprobe {
namespace ISA {
namespace {

typedef float vf __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2), aligned(2)));

#define INLINE static inline __attribute__((always_inline))

constexpr int kBlock = 32;
constexpr int kVectors = kBlock / LANES;  // vectors of a row block
constexpr int kSegmentBlocks = 4 * LANES;
constexpr int kStrip = 4;  // vectors of columns taken together
constexpr int32_t kInfinity = 0x7F800000;
constexpr int kNone = -128;   // no exponent
constexpr int kSpread = 30;   // binades of scales that are summed together: w >= 2^-30

INLINE vf as_float(vi v) { return (vf)v; }
INLINE vi as_int(vf v) { return (vi)v; }
INLINE vf splat(float v) { return vf{} + v; }
INLINE vi splat(int32_t v) { return vi{} + v; }
INLINE vf max(vf a, vf b) { return a > b ? a : b; }
INLINE vf min(vf a, vf b) { return a < b ? a : b; }
INLINE vi max(vi a, vi b) { return a > b ? a : b; }
INLINE vi min(vi a, vi b) { return a < b ? a : b; }
INLINE float bits_to_float(int32_t b) {
  float f;
  std::memcpy(&f, &b, 4);
  return f;
}
INLINE float pow2(int e) { return bits_to_float(std::max(e + 127, 0) << 23); }
INLINE int32_t lane_max(vi v) {
  int32_t lanes[LANES];
  std::memcpy(lanes, &v, sizeof v);
  int32_t top = lanes[0];
  for (int j = 1; j < LANES; j++) top = std::max(top, lanes[j]);
  return top;
}
template <class V>
INLINE double lane_sum(V v) {
  double total = 0;
  for (int j = 0; j < LANES; j++) total += v[j];
  return total;
}

template <DType D>
constexpr int element_bytes = D == DType::kFloat32 ? 4 : 2;

// fp32 bits of LANES consecutive elements.
template <DType D>
INLINE vi load(const char* p) {
  if constexpr (D == DType::kFloat32) {
    vi v;
    std::memcpy(&v, p, sizeof v);
    return v;
  } else {
    vh half;
    std::memcpy(&half, p, sizeof half);
    vi v = __builtin_convertvector(half, vi);
    if constexpr (D == DType::kBFloat16) return v << 16;
    // fp16: exponent and mantissa shifted into place, then times 2^112; subnormals come out right.
    vi sign = (v & 0x8000) << 16, magnitude = (v & 0x7FFF) << 13;
    vi scaled = as_int(as_float(magnitude) * 5.192296858534828e+33f);
    vi special = magnitude >= (0x7C00 << 13);
    return (special ? (magnitude | kInfinity) : scaled) | sign;
  }
}

INLINE vf rne(vf u) {
  vf step = as_float(as_int(max(u, splat(1.0f))) & kInfinity) * 6291456.0f;
  return (u + step) - step;
}

// What a segment sums, per lane.
struct Sums {
  vf x2, xe, xr, e2, b2, g2, d2, bg, z2, e;
  vf bd, b2_saturated, e2_on_d, e2_saturated;
  vi deadzone, zeroed, saturated, by_scale;
  vi nibbles, minus_nibbles;  // eight 4-bit counters of codes
  vi even, odd, minus_even, minus_odd;  // the same in bytes: codes 0 2 4 6, codes 1 3 5 7
};

// 1 << 4 code, from c in {0, .5, 1, 1.5, 2, 3, 4, 6}.
INLINE vi nibble_of(vf c) {
#if defined(__AVX512F__) && !defined(__clang__)
  // the upper mantissa bits of c + 8 hold 2 c, which a register-wide table turns into the code
  const vi table = {1, 1 << 4, 1 << 8, 1 << 12, 1 << 16, 0, 1 << 20, 0, 1 << 24, 0, 0, 0, 1 << 28, 0, 0, 0};
  return __builtin_shuffle(table, as_int(c + 8.0f) >> 19);
#else
  vi top = as_int(c) >> 22;  // 0, FC, FE, FF, 100, 101, 102, 103
  vi code = max(top - 0xFC, min(top, splat(1)));
#ifdef __AVX2__
  return splat(1) << (code << 2);
#else
  return __builtin_convertvector(as_float((code << 25) + 0x3F800000), vi);
#endif
#endif
}

// Scale of a block (or of a column per lane) beside that of its segment, 2^E: w = s / 2^E.
struct Scale {
  vf inverse;    // 1 / s
  vf inverse_w;  // w / s: |x| in units of 2^E
  vf a, a_w;     // m / s, and w times that
  vf ratio;      // 6 / a
  vf w, w6;      // w, 6 w
};

template <DType D, bool COVERS>
INLINE void add(Sums& s, vi bits, const Scale& k) {
  const vf zero{};
  const vi magnitude = bits & 0x7FFFFFFF;
  const vf u = as_float(magnitude) * k.inverse, u_w = as_float(magnitude) * k.inverse_w;
  const vf c = min(rne(u), splat(6.0f));
  vf t = (u * k.ratio + 96.0f) - 96.0f;
  // from here on e, r and b carry the weight w
  const vf e = c * k.w - u_w;
  vf r, b, c_star;
  if constexpr (D == DType::kFloat32) {
    const vf a_high = as_float(as_int(k.a) & ~0xFFF), a_low = k.a - a_high;
    const vf u_high = as_float(as_int(u) & ~0xFFF), u_high6 = u_high * 6.0f, u_low6 = (u - u_high) * 6.0f;
    const vf side = (u_high6 - t * a_high) + (u_low6 - t * a_low);
    t += min(max(side * 1e30f, splat(-3.814697265625e-06f)), splat(3.814697265625e-06f));
    c_star = rne(t);
    const vf high = c_star * a_high, low = c_star * a_low;
    r = ((high - u_high6) + (low - u_low6)) * k.w;
    b = ((c * 6.0f - high) - low) * k.w;
  } else {
    c_star = rne(t);
    const vf ideal = c_star * k.a_w;
    r = ideal - u_w * 6.0f;
    b = c * k.w6 - ideal;
  }
  const vi on_d = c_star == zero, at_zero = c == zero, nonzero = magnitude != 0;
  s.x2 += u_w * u_w;
  s.xe += e * u_w;
  s.xr += r * u_w;
  s.e2 += e * e;
  s.b2 += b * b;
  s.d2 = on_d ? s.d2 + r * r : s.d2;
  s.g2 = on_d ? s.g2 : s.g2 + r * r;
  s.bg = on_d ? s.bg : s.bg + b * r;
  s.z2 = at_zero ? s.z2 + u_w * u_w : s.z2;
  s.e += as_float(as_int(e) ^ (bits & INT32_MIN));
  s.deadzone = on_d & nonzero ? s.deadzone + 1 : s.deadzone;
  s.zeroed = at_zero & nonzero ? s.zeroed + 1 : s.zeroed;
  if constexpr (!COVERS) {
    const vi over = u > 6.0f;
    s.bd = on_d ? s.bd + b * r : s.bd;
    s.e2_on_d = on_d ? s.e2_on_d + e * e : s.e2_on_d;
    s.b2_saturated = over ? s.b2_saturated + b * b : s.b2_saturated;
    s.e2_saturated = over ? s.e2_saturated + e * e : s.e2_saturated;
    s.saturated = over ? s.saturated + 1 : s.saturated;
    s.by_scale = at_zero & ~on_d ? s.by_scale + 1 : s.by_scale;
  }
  const vi one = nibble_of(c);
  s.nibbles += one;
  s.minus_nibbles += one & (bits >> 31);
}

// At most 15 vectors fit the 4-bit counters.
INLINE void widen(Sums& s) {
  s.even += s.nibbles & 0x0F0F0F0F;
  s.odd += (s.nibbles >> 4) & 0x0F0F0F0F;
  s.minus_even += s.minus_nibbles & 0x0F0F0F0F;
  s.minus_odd += (s.minus_nibbles >> 4) & 0x0F0F0F0F;
  s.nibbles = s.minus_nibbles = vi{};
}

// Four byte counters a lane -> codes first, first + 2, first + 4, first + 6.
INLINE void count_codes(vi bytes, double* codes, double sign) {
  vi low = bytes & 0x00FF00FF, high = (bytes >> 8) & 0x00FF00FF;
  int64_t low_sum = 0, high_sum = 0;
  for (int j = 0; j < LANES; j++) low_sum += low[j], high_sum += high[j];
  codes[0] += sign * (low_sum & 0xFFFF);
  codes[4] += sign * (low_sum >> 16);
  codes[2] += sign * (high_sum & 0xFFFF);
  codes[6] += sign * (high_sum >> 16);
}

template <bool COVERS>
INLINE void flush(const Sums& s, int exponent, double* v) {
  const double f1 = std::ldexp(1.0, exponent), f2 = f1 * f1;
  const double e2 = f2 * lane_sum(s.e2), b2 = f2 / 36 * lane_sum(s.b2), d2 = f2 / 36 * lane_sum(s.d2);
  const double x2 = f2 * lane_sum(s.x2), bd = COVERS ? 0.0 : f2 / 36 * lane_sum(s.bd);
  const double dead = lane_sum(s.deadzone), zeroed = lane_sum(s.zeroed);
  v[kX2] += x2;
  v[kE2] += e2;
  v[kScale2] += b2;
  v[kDz2] += d2;
  v[kGrid2] += f2 / 36 * lane_sum(s.g2);
  v[kScaleGrid] += f2 / 36 * lane_sum(s.bg);
  v[kScaleDz] += bd;
  v[kXQ] += x2 + f2 * lane_sum(s.xe);
  v[kXQStar] += x2 + f2 / 6 * lane_sum(s.xr);
  v[kE] += f1 * lane_sum(s.e);
  v[kE2Zeroed] += f2 * lane_sum(s.z2);
  v[kDeadzone] += dead;
  v[kZeroed] += zeroed;
  if (COVERS) {  // Q = 0 wherever Q* = 0, and nothing saturates
    v[kE2OnD] += d2;
    v[kZeroedByScale] += zeroed - dead;
  } else {
    v[kSat2] += f2 / 36 * lane_sum(s.b2_saturated);
    v[kE2OnD] += f2 * lane_sum(s.e2_on_d);
    v[kE2Saturated] += f2 * lane_sum(s.e2_saturated);
    v[kSaturated] += lane_sum(s.saturated);
    v[kZeroedByScale] += lane_sum(s.by_scale);
  }
  double* codes = v + kCodes;
  count_codes(s.even, codes, 1);
  count_codes(s.odd, codes + 1, 1);
  count_codes(s.minus_even, codes, -1);
  count_codes(s.minus_odd, codes + 1, -1);
  count_codes(s.minus_even, codes + 8, 1);
  count_codes(s.minus_odd, codes + 9, 1);
}

// Everything that belongs to a block: returns the exponent of its scale, kNone where the block is left out.
INLINE int account(int32_t amax, int32_t bias, int length, double* v) {
  v[kBlocks] += 1;
  if (amax >= kInfinity) {
    v[kBlocksExcluded] += 1;
    return kNone;
  }
  v[kN] += length;
  v[kCodes] -= kBlock - length;  // padding reads as +0
  if (amax == 0) return -127;
  const int raw = ((amax + bias) >> 23) - 129, exponent = std::max(raw, -127);
  v[kClamped] += raw != exponent;
  const float m = bits_to_float(amax);
  v[kAmax] = std::max(v[kAmax], double(m));
  v[kDelta + delta_bin(6.0 * std::ldexp(1.0, exponent) / m)] += 1;
  return exponent;
}

template <DType D>
INLINE int64_t count_nonfinite(const char* p) {
  int64_t n = 0;
  for (int k = 0; k < kVectors; k++) {
    vi bad = (load<D>(p + k * LANES * element_bytes<D>) & 0x7FFFFFFF) >= kInfinity;
    for (int j = 0; j < LANES; j++) n -= bad[j];
  }
  return n;
}

// n_blocks <= kSegmentBlocks whole blocks of a row, the last of which counts for `last_length` elements.
template <DType D, bool COVERS>
void row_segment(const char* p, int n_blocks, int last_length, int32_t bias, double* v) {
  constexpr int stride = kBlock * element_bytes<D>, vector = LANES * element_bytes<D>;
  int32_t amax[kSegmentBlocks];
  int exponent[kSegmentBlocks], top = kNone;
  for (int i = 0; i < n_blocks; i++) {
    vi m = load<D>(p + i * stride) & 0x7FFFFFFF;
    for (int k = 1; k < kVectors; k++) m = max(m, load<D>(p + i * stride + k * vector) & 0x7FFFFFFF);
    amax[i] = lane_max(m);
  }
  for (int i = 0; i < n_blocks; i++) {
    exponent[i] = account(amax[i], bias, i + 1 < n_blocks ? kBlock : last_length, v);
    if (amax[i] >= kInfinity) v[kNonfinite] += count_nonfinite<D>(p + i * stride);
    top = std::max(top, exponent[i]);
  }
  // Blocks far below the largest scale would vanish beside it: they wait for a pass of their own.
  while (top > kNone) {
    Sums s{};
    int vectors = 0, next = kNone;
    for (int i = 0; i < n_blocks; i++) {
      if (exponent[i] > top || exponent[i] == kNone) continue;
      if (exponent[i] < top - kSpread) {
        next = std::max(next, exponent[i]);
        continue;
      }
      const float inverse = pow2(-exponent[i]), w = pow2(exponent[i] - top), a = bits_to_float(amax[i]) * inverse;
      const Scale scale{splat(inverse), splat(inverse * w), splat(a),  splat(a * w), splat(amax[i] ? 6.0f / a : 0.0f),
                        splat(w),       splat(6.0f * w)};
      for (int k = 0; k < kVectors; k++) add<D, COVERS>(s, load<D>(p + i * stride + k * vector), scale);
      if ((vectors += kVectors) > 15 - kVectors) widen(s), vectors = 0;
    }
    widen(s);
    flush<COVERS>(s, top, v);
    top = next;
  }
}

// kStrip vectors of columns and `length` <= 32 rows of them.
template <DType D, bool COVERS>
void column_strip(const char* p, int64_t stride, int length, int columns, int32_t bias, double* v) {
  constexpr int vector = LANES * element_bytes<D>;
  vi m[kStrip] = {}, exponent[kStrip];
  for (int i = 0; i < length; i++)
    for (int k = 0; k < kStrip; k++) m[k] = max(m[k], load<D>(p + i * stride + k * vector) & 0x7FFFFFFF);
  int top = kNone;
  for (int k = 0; k < kStrip; k++)
    for (int j = 0; j < LANES; j++) {
      const bool real = k * LANES + j < columns;
      exponent[k][j] = real ? account(m[k][j], bias, length, v) : kNone;
      if (real && m[k][j] >= kInfinity)
        for (int i = 0; i < length; i++)
          v[kNonfinite] += (load<D>(p + i * stride + k * vector)[j] & 0x7FFFFFFF) >= kInfinity;
      top = std::max(top, exponent[k][j]);
    }
  while (top > kNone) {
    Sums s{};
    int next = kNone;
    for (int k = 0; k < kStrip; k++) {
      const vi far = exponent[k] < top - kSpread, past = exponent[k] > top, absent = exponent[k] == kNone;
      const vi skip = far | past | absent, amax = skip ? splat(0) : m[k];
      next = std::max(next, lane_max(far & ~absent ? exponent[k] : splat(kNone)));
      const vi own = skip ? splat(top) : exponent[k];
      Scale scale;
      scale.inverse = as_float((127 - own) << 23);
      scale.w = as_float((own - top + 127) << 23);
      scale.a = as_float(amax) * scale.inverse;
      scale.ratio = 6.0f / (amax > 0 ? scale.a : splat(1.0f));
      scale.inverse_w = scale.inverse * scale.w;
      scale.a_w = scale.a * scale.w;
      scale.w6 = 6.0f * scale.w;
      for (int i = 0; i < length; i++) {
        const vi bits = load<D>(p + i * stride + k * vector);
        add<D, COVERS>(s, skip ? splat(0) : bits, scale);
        if (i % 15 == 14) widen(s);
      }
      widen(s);
      for (int j = 0; j < LANES; j++) {
        // rows that are not there were never added; columns that wait, or count for nothing, were added as +0
        if (skip[j]) v[kCodes] -= length;
        else v[kCodes] += kBlock - length;
      }
    }
    flush<COVERS>(s, top, v);
    top = next;
  }
}

template <DType D, bool COVERS>
void row_tile(const Tile& t, double* v) {
  constexpr int bytes = element_bytes<D>;
  for (int64_t r = t.row_begin; r < t.row_end; r++) {
    const char* row = t.x + r * t.stride_bytes;
    const int64_t whole = t.column_begin + (t.column_end - t.column_begin) / kBlock * kBlock;
    for (int64_t c = t.column_begin; c < whole; c += kSegmentBlocks * kBlock) {
      const int n = int(std::min<int64_t>(kSegmentBlocks, (whole - c) / kBlock));
      row_segment<D, COVERS>(row + c * bytes, n, kBlock, t.bias, v);
    }
    if (whole < t.column_end) {
      char padded[kBlock * bytes] = {};
      std::memcpy(padded, row + whole * bytes, (t.column_end - whole) * bytes);
      row_segment<D, COVERS>(padded, 1, int(t.column_end - whole), t.bias, v);
    }
  }
}

template <DType D, bool COVERS>
void column_tile(const Tile& t, double* v) {
  constexpr int bytes = element_bytes<D>, width = kStrip * LANES;
  for (int64_t r = t.row_begin; r < t.row_end; r += kBlock) {
    const int length = int(std::min<int64_t>(kBlock, t.row_end - r));
    for (int64_t c = t.column_begin; c < t.column_end; c += width) {
      const char* p = t.x + r * t.stride_bytes + c * bytes;
      const int columns = int(std::min<int64_t>(width, t.column_end - c));
      if (columns == width) {
        column_strip<D, COVERS>(p, t.stride_bytes, length, columns, t.bias, v);
      } else {
        char padded[kBlock * width * bytes] = {};
        for (int i = 0; i < length; i++) std::memcpy(padded + i * width * bytes, p + i * t.stride_bytes, columns * bytes);
        column_strip<D, COVERS>(padded, width * bytes, length, columns, t.bias, v);
      }
    }
  }
}

template <DType D>
void tile_of(const Tile& t, double* v) {
  if (t.columns) t.covers ? column_tile<D, true>(t, v) : column_tile<D, false>(t, v);
  else t.covers ? row_tile<D, true>(t, v) : row_tile<D, false>(t, v);
}

}  // namespace

void statistics(const Tile& t, double* v) {
  if (t.dtype == DType::kFloat32) tile_of<DType::kFloat32>(t, v);
  else if (t.dtype == DType::kBFloat16) tile_of<DType::kBFloat16>(t, v);
  else tile_of<DType::kFloat16>(t, v);
}

}  // namespace ISA
}  // namespace mxprobe
