// Shared by the kernels (one per instruction set) and by dispatch.cpp.
#pragma once
#include <cstdint>
#include <cstring>

namespace mxprobe {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Indices into a decomposition's values: the order of mxprobe_kernels/columns.py, checked by a test.
enum : int {
  kX2, kE2, kScale2, kDz2, kGrid2, kScaleGrid, kScaleDz, kXQ, kXQStar, kE, kSat2, kE2OnD, kE2Zeroed, kE2Saturated,
  kN, kDeadzone, kZeroed, kZeroedByScale, kSaturated, kClamped, kNonfinite, kBlocks, kBlocksExcluded,
  kAmax,
  kDelta,
  kCodes = kDelta + 32,
  kValues = kCodes + 16,
};

// A piece of the matrix, cut between blocks.
struct Tile {
  const char* x;
  int64_t row_begin, row_end, column_begin, column_end;
  int64_t stride_bytes;
  int32_t bias;
  DType dtype;
  bool columns;  // blocks run along rows of the matrix's columns
  bool covers;   // s >= s* always
  bool lite;     // kX2, kE2, kN, kZeroed, kSaturated, kNonfinite, kBlocks, kBlocksExcluded and kAmax only
};

// floor(32 log2(6 / a)), clipped to 0 .. 31: by granules of 1/64 binade of a in [2, 8), at most one edge in each.
struct DeltaTable {
  static constexpr int kShift = 17, kFirst = 0x40000000 >> kShift, kGranules = 128;
  int bin[kGranules];     // at the granule's lower end
  float edge[kGranules];  // the largest a of that bin
  DeltaTable();
  int bin_of(float a) const {
    if (a < 2.0f) return 31;
    if (a >= 6.0f) return 0;
    int32_t bits;
    std::memcpy(&bits, &a, sizeof bits);
    const int i = (bits >> kShift) - kFirst;
    return bin[i] - (a > edge[i]);
  }
};

extern const DeltaTable delta_table;

using Kernel = void (*)(const Tile&, double*);

}  // namespace mxprobe
