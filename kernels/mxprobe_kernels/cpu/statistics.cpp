// MXFP4 statistics in one pass over a matrix, for CPUs. Compiled once per instruction set, with
//   -DISA=name -DLANES=n     n fp32 lanes of a vector register
// by build_cpu.py; dispatch.cpp picks one at run time. The arithmetic of an element is in sums.hpp.
//
// A segment is 128 elements a lane. Its largest scale is known before anything is summed, so that its sums are fp32
// multiples of a 2^E or 4^E that suits it, and every block carries the weight w = s / 2^E; segments and tiles are added in
// double, tiles in their order whatever the thread count.
#include "statistics.hpp"

#include <algorithm>
#include <cstring>

#include "totals.hpp"

namespace mxprobe {
namespace ISA {
namespace {

constexpr int kPairs = kBlock / (2 * LANES);  // of vectors, in a row block
constexpr int kGroups = 7;                    // of LANES blocks in a segment
constexpr int kStrip = 4;                     // vectors of columns taken together
constexpr int kWidenPairs = kWiden / 2;

template <DType D>
constexpr int pair_bytes = 2 * LANES * element_bytes<D>;

// What the next segment will read.
template <DType D>
INLINE void fetch_pair(const char* p) {
  for (int i = 0; i < pair_bytes<D>; i += 64) __builtin_prefetch(p + i);
}

// Elements of n pairs that are not finite, and those that are not 0.
struct Found {
  int64_t nonfinite, nonzero;
};

// All lanes of both vectors, or one lane of one of them.
template <DType D>
Found search(const char* p, int64_t stride, int n, int half = -1, int lane = 0) {
  vi nonfinite[2]{}, nonzero[2]{};
  for (int i = 0; i < n; i++) {
    vi pair[2];
    load_pair<D>(p + i * stride, pair);
    for (int h = 0; h < 2; h++) {
      nonfinite[h] -= (pair[h] & 0x7FFFFFFF) >= kInfinity;
      nonzero[h] -= (pair[h] & 0x7FFFFFFF) != 0;
    }
  }
  if (half >= 0) return {nonfinite[half][lane], nonzero[half][lane]};
  return {int64_t(lane_sum(nonfinite[0] + nonfinite[1])), int64_t(lane_sum(nonzero[0] + nonzero[1]))};
}

// Of so many columns, those that lie in vector k of a strip: in memory's order, but bf16's even and odd ones in turn.
template <DType D>
int columns_of(int columns, int k) {
  if (D != DType::kBFloat16) return std::min(LANES, std::max(columns - k * LANES, 0));
  const int in_pair = std::min(2 * LANES, std::max(columns - k / 2 * 2 * LANES, 0));
  return (in_pair + 1 - k % 2) / 2;
}

// n_blocks <= kGroups LANES whole blocks of a row, all of which count for `length` elements.
template <DType D, bool COVERS, bool LITE>
void row_segment(const char* p, int n_blocks, int length, int32_t bias, Totals& t) {
  constexpr int stride = kBlock * element_bytes<D>, vector = LANES * element_bytes<D>;
  const int n_groups = (n_blocks + LANES - 1) / LANES;
  vi amax[kGroups], exponent[kGroups];
  Raw<D> nonzero{};
  vi tops = splat(kNone), peaks{};
  for (int g = 0; g < n_groups; g++) {
    const int first = g * LANES, n = std::min(LANES, n_blocks - first);
    Raw<D> m[LANES];
    const auto look = [&](int i) {
      const char* block = p + int64_t(first + i) * stride;
      for (int k = 0; k < 2 * kPairs; k++) {
        const Raw<D> v = load_magnitude<D>(block + k * vector);
        nonzero += at_most_one(v);
        m[i] = k ? max(m[i], v) : v;
      }
    };
    if (n == LANES) {
      for (int i = 0; i < LANES; i++) look(i);
    } else {
      std::memset(m, 0, sizeof m);
      for (int i = 0; i < n; i++) look(i);
    }
    amax[g] = expand<D>(lane_maxima(m));
    exponent[g] = account<D, LITE>(amax[g], n, length, bias, t);
    tops = max(tops, exponent[g]), peaks = max(peaks, amax[g]);
  }
  t.n_padded += int64_t(n_blocks) * (kBlock - length);
  if (lane_max(peaks) >= kInfinity)
    for (int i = 0; i < n_blocks; i++)
      if (amax[i / LANES][i % LANES] >= kInfinity) {
        const Found found = search<D>(p + int64_t(i) * stride, pair_bytes<D>, kPairs);
        exclude(found.nonfinite, found.nonzero, length, t);
        t.n_padded -= kBlock - length;
      }
  int top = lane_max(tops);
  t.nonzero += widen<D>(nonzero);
  // Blocks far below the largest scale would vanish beside it: they wait for a pass of their own.
  while (top > kNone) {
    Sums s{};
    int next = kNone;
    const int unit = unit_of<D>(top);
    const auto pass = [&](auto as_is) {
      const Fixed fixed = fixed_of(unit);
      int pairs = 0;
      for (int g = 0; g < n_groups; g++) {
        const Scale scales = scale_of(amax[g], max(exponent[g], splat(top - kSpread)), unit);
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
          for (int k = 0; k < kPairs; k++) {
            vi bits[2];
            load_pair<D>(block + k * pair_bytes<D>, bits);
            fetch_pair<D>(block + k * pair_bytes<D> + kGroups * LANES * stride);
            add<D, COVERS, LITE, as_is.value>(s, bits, scale, fixed);
          }
          if (!LITE && (pairs += kPairs) > kWidenPairs - kPairs) widen(s), pairs = 0;
        }
      }
      if (!LITE) widen(s);
    };
    if (D != DType::kFloat32 && !unit) pass(std::true_type{});
    else pass(std::false_type{});
    const auto is_here = [&](int i) {
      const int own = exponent[i / LANES][i % LANES];
      return own <= top && own >= top - kSpread && own != kNone;
    };
    const auto count = [&](int64_t& n_nonzero, int64_t& n_added) {
      for (int i = 0; i < n_blocks; i++)
        if (is_here(i)) {
          n_nonzero += search<D>(p + int64_t(i) * stride, pair_bytes<D>, kPairs).nonzero;
          n_added += kBlock;
        }
    };
    if (!flush<COVERS, LITE>(s, unit, count, t))
      for (int i = 0; i < n_blocks; i++) {
        if (!is_here(i)) continue;
        const int g = i / LANES, j = i % LANES;
        for (int k = 0; k < 2 * kPairs; k++)
          add_exactly(load<D>(p + int64_t(i) * stride + k * vector), splat(-1), splat(amax[g][j]), splat(exponent[g][j]), t);
      }
    top = next;
  }
}

// kStrip vectors of columns and `length` <= 32 rows of them.
template <DType D, bool COVERS, bool LITE>
void column_strip(const char* p, int64_t stride, int length, int columns, int32_t bias, Totals& t) {
  constexpr int vector = LANES * element_bytes<D>, n_wide = kStrip * vector / sizeof(Wide<D>);
  Wide<D> m[n_wide] = {}, nonzero{};
  for (int i = 0; i < length; i++)
    for (int k = 0; k < n_wide; k++) {
      Wide<D> v;
      std::memcpy(&v, p + i * stride + k * sizeof v, sizeof v);
      v &= magnitude_bits<D>;
      nonzero += at_most_one(v);
      m[k] = max(m[k], v);
    }
  t.nonzero += widen_wide<D>(nonzero);
  vi amax[kStrip], exponent[kStrip], tops = splat(kNone), bottoms = splat(127), peaks{};
  for (int k = 0; k < kStrip; k++) {
    if (k % 2 == 0) {
      vi pair[2];
      load_pair<D>((const char*)m + k * vector, pair);
      amax[k] = pair[0], amax[k + 1] = pair[1];
    }
    const int n = columns_of<D>(columns, k);
    exponent[k] = account<D, LITE>(amax[k], n, length, bias, t);
    tops = max(tops, exponent[k]), bottoms = min(bottoms, exponent[k]), peaks = max(peaks, amax[k]);
  }
  if (lane_max(peaks) >= kInfinity)
    for (int i = 0; i < kStrip * LANES; i++)
      if (amax[i / LANES][i % LANES] >= kInfinity) {
        const int k = i / LANES;
        const Found found = search<D>(p + k / 2 * pair_bytes<D>, stride, length, k % 2, i % LANES);
        exclude(found.nonfinite, found.nonzero, length, t);
      }
  int top = lane_max(tops);
  const bool one_pass = lane_max(-bottoms) <= kSpread - top;
  while (top > kNone) {
    Sums s{};
    vi keep[kStrip];
    int next = kNone;
    const int unit = unit_of<D>(top);
    // `plain`: every column is added, as it is where it has 16 bits.
    const auto pass = [&](auto plain) {
      constexpr bool as_is = plain.value && D != DType::kFloat32;
      const Fixed fixed = fixed_of(unit);
      for (int k = 0; k < kStrip; k += 2) {
        Scale scales[2];
        for (int h = 0; h < 2; h++) {
          const vi own = exponent[k + h], far = own < top - kSpread, absent = own == kNone;
          const vi skip = far | own > top | absent;
          next = std::max(next, lane_max(far & ~absent ? own : splat(kNone)));
          scales[h] = scale_of(skip ? splat(0) : amax[k + h], skip ? splat(top) : own, unit);
          keep[k + h] = ~skip;
          // columns that wait, or count for nothing, were added as +0
          t.n_padded -= int64_t(lane_sum(skip)) * length;
        }
        for (int i = 0; i < length; i++) {
          vi pair[2];
          load_pair<D>(p + i * stride + k * vector, pair);
          if (!plain.value) pair[0] &= keep[k], pair[1] &= keep[k + 1];
          // All of it with the first pair, so that the last has arrived when it is read; `lite` is too fast for so many.
          if (LITE || k == 0) fetch_pair<D>(p + i * stride + (k + kStrip) * vector);
          if (!LITE && k == 0) fetch_pair<D>(p + i * stride + (kStrip + 2) * vector);
          add<D, COVERS, LITE, as_is>(s, pair, scales, fixed);
          if (!LITE && i % kWidenPairs == kWidenPairs - 1) widen(s);
        }
        if (!LITE) widen(s);
      }
    };
    if (one_pass && (D == DType::kFloat32 || !unit)) pass(std::true_type{});
    else pass(std::false_type{});
    const auto count = [&](int64_t& n_nonzero, int64_t& n_added) {
      for (int k = 0; k < kStrip; k++)
        for (int i = 0; i < length; i++) {
          vi pair[2];
          load_pair<D>(p + i * stride + k / 2 * pair_bytes<D>, pair);
          n_nonzero -= int64_t(lane_sum((pair[k % 2] & keep[k] & 0x7FFFFFFF) != 0));
        }
      n_added = int64_t(kStrip) * LANES * length;
    };
    if (!flush<COVERS, LITE>(s, unit, count, t))
      for (int k = 0; k < kStrip; k++)
        for (int i = 0; i < length; i++) {
          vi pair[2];
          load_pair<D>(p + i * stride + k / 2 * pair_bytes<D>, pair);
          add_exactly(pair[k % 2], keep[k], amax[k], exponent[k], t);
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
