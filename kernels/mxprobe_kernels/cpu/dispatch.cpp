// The C interface of the CPU kernels: cuts the matrix into tiles, shares them among threads, adds them in order.
#include "quantize.hpp"
#include "statistics.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace mxprobe {

#define DECLARE(ISA) \
  namespace ISA { \
  void statistics(const Tile&, double*); \
  void quantize(const Format&, const float*, int64_t, void*, bool, int32_t*); \
  void format_statistics(const Format&, const float*, const Grid&, double*); \
  }
#define X(name, feature) DECLARE(name)
#include "isas.inc"
#undef X

namespace {

constexpr int64_t kTileElements = 1 << 16;

// Subnormals count: a caller that flushes them must not change the statistics.
struct KeepSubnormals {
#if defined(__x86_64__)
  unsigned saved = _mm_getcsr();
  KeepSubnormals() { _mm_setcsr(0x1F80); }
  ~KeepSubnormals() { _mm_setcsr(saved); }
#endif
};

struct Choice {
  const char* name;
  Kernel kernel;
  Quantizer quantizer;
  FormatKernel format_kernel;
};

std::vector<Choice> available() {
  std::vector<Choice> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
#define X(name, feature) \
  if (feature) found.push_back({#name, name::statistics, name::quantize, name::format_statistics});
#else
#define X(name, feature) found.push_back({#name, name::statistics, name::quantize, name::format_statistics});
#endif
#include "isas.inc"
#undef X
  return found;
}

const std::vector<Choice>& choices() {
  static const std::vector<Choice> found = available();
  return found;
}

// The best of all for "", null for one that is not to be had.
const Choice* choose(const char* isa) {
  for (const Choice& c : choices())
    if (!*isa || !std::strcmp(isa, c.name)) return &c;
  return nullptr;
}

}  // namespace

DeltaTable::DeltaTable() {
  float last[32];  // the largest a with 6 / a >= 2^(k / 32)
  for (int k = 1; k < 32; k++) {
    const double edge_ratio = std::exp2(k / 32.0);
    last[k] = std::nextafter(float(6.0 / edge_ratio), 8.0f);
    while (6.0 / last[k] < edge_ratio) last[k] = std::nextafter(last[k], 0.0f);
  }
  for (int i = 0; i < kGranules - 1; i++) {
    const int32_t bits = (kFirst + i) << kShift;
    float low;
    std::memcpy(&low, &bits, sizeof low);
    bin[i] = 0;
    while (bin[i] < 31 && low <= last[bin[i] + 1]) bin[i]++;
    edge[i] = bin[i] && i ? last[bin[i]] : 16.0f;
  }
  bin[kGranules - 1] = kNoBin, edge[kGranules - 1] = 16.0f;
}

const DeltaTable delta_table;

}  // namespace mxprobe

using namespace mxprobe;

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// Instruction sets this machine runs, best first, comma-separated.
EXPORT const char* mxprobe_isas() {
  static const std::string names = [] {
    std::string all;
    for (const Choice& c : choices()) all += (all.empty() ? "" : ",") + std::string(c.name);
    return all;
  }();
  return names.c_str();
}

EXPORT int mxprobe_values() { return kValues; }

// Changes with the signatures below.
EXPORT int mxprobe_interface() { return 4; }

// x [n_rows, n_columns], unit stride along columns -> values[kValues], of which `lite` fills those of Tile::lite.
// 0, or -1 when `isa` is not to be had.
EXPORT int mxprobe_statistics(const void* x, int dtype, int64_t n_rows, int64_t n_columns, int64_t stride_bytes, int columns,
                              int32_t bias, int covers, int lite, int n_threads, const char* isa, double* values) {
  const Choice* choice = choose(isa);
  if (!choice) return -1;

  // Rows of whole blocks that lie end to end are one long row: a segment then fills up whatever their length.
  const int64_t element = static_cast<DType>(dtype) == DType::kFloat32 ? 4 : 2;
  if (!columns && n_columns % 32 == 0 && stride_bytes == n_columns * element) n_columns *= n_rows, n_rows = 1;

  // Tiles depend on the shape alone, so that the sums do not depend on the number of threads.
  const int64_t width = std::min(n_columns, columns ? int64_t(2048) : kTileElements);
  const int64_t rows = std::max<int64_t>(kTileElements / width, 1);
  const int64_t height = columns ? (rows + 31) / 32 * 32 : rows;
  const int64_t across = (n_columns + width - 1) / width, down = (n_rows + height - 1) / height;
  std::vector<double> parts(size_t(across * down) * kValues, 0.0);
  std::atomic<int64_t> next{0};
  auto work = [&] {
    KeepSubnormals guard;
    for (int64_t i; (i = next.fetch_add(1)) < across * down;) {
      const int64_t r = i / across * height, c = i % across * width;
      const Tile tile{static_cast<const char*>(x), r, std::min(r + height, n_rows), c, std::min(c + width, n_columns),
                      stride_bytes, bias, static_cast<DType>(dtype), columns != 0, covers != 0, lite != 0};
      choice->kernel(tile, parts.data() + i * kValues);
    }
  };
  std::vector<std::thread> threads;
  for (int64_t t = 1; t < std::min<int64_t>(n_threads, across * down); t++) threads.emplace_back(work);
  work();
  for (std::thread& t : threads) t.join();

  std::fill(values, values + kValues, 0.0);
  for (int64_t i = 0; i < across * down; i++)
    for (int k = 0; k < kValues; k++) {
      const double part = parts[i * kValues + k];
      values[k] = k == kAmax ? std::max(values[k], part) : values[k] + part;
    }
  return 0;
}

// x [n_blocks, block] -> q of the same shape, float or double, and the exponent of each block's scale, -127 where it is
// no power of two. 0, or -1 when `isa` is not to be had.
EXPORT int mxprobe_quantize(const Format* format, const float* x, int64_t n_blocks, int to_double, const char* isa, void* q,
                            int32_t* exponents) {
  const Choice* choice = choose(isa);
  if (!choice) return -1;
  KeepSubnormals guard;
  choice->quantizer(*format, x, n_blocks, q, to_double != 0, exponents);
  return 0;
}

// Blocks x [rows, across, block] of a matrix -> values[kValues], added to what is there (amax: the larger). 0, or -1.
EXPORT int mxprobe_format_statistics(const Format* format, const float* x, const Grid* grid, const char* isa, double* values) {
  const Choice* choice = choose(isa);
  if (!choice) return -1;
  KeepSubnormals guard;
  choice->format_kernel(*format, x, *grid, values);
  return 0;
}

}  // extern "C"
