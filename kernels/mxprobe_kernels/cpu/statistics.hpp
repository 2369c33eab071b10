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

// floor(32 log2(6 / a)), clipped to 0 .. 31: by granules of 1/128 binade of a in [2, 8), at most one edge in each. The
// first granule is all below, the last but one all above; the last, of bin kNoBin, serves for blocks that do not count.
struct DeltaTable {
  static constexpr int kShift = 16, kFirst = (0x40000000 >> kShift) - 1, kGranules = 259, kNoBin = 32;
  int bin[kGranules];     // at the granule's lower end
  float edge[kGranules];  // the largest a of that bin
  DeltaTable();
};

extern const DeltaTable delta_table;

using Kernel = void (*)(const Tile&, double*);

}  // namespace mxprobe
