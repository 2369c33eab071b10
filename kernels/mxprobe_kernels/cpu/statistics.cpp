// MXFP4 statistics in one pass over a matrix, for CPUs. Compiled once per instruction set, with
//   -DISA=name -DLANES=n     n fp32 lanes of a vector register
// by build_cpu.py; dispatch.cpp picks one at run time. The arithmetic of an element is in sums.hpp.
//
// A segment is 128 elements a lane. Its largest scale 2^E is known before anything is summed, so that its sums are fp32
// multiples of 2^E or 4^E, and every block carries the weight w = s / 2^E; segments and tiles are added in double, tiles
// in their order whatever the thread count.
#include "statistics.hpp"

#include <algorithm>
#include <cstring>

#include "totals.hpp"

namespace mxprobe {
namespace ISA {
namespace {

constexpr int kVectors = kBlock / LANES;  // vectors of a row block
constexpr int kGroups = 4;                // of LANES blocks in a segment
constexpr int kStrip = 4;                 // vectors of columns taken together

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
