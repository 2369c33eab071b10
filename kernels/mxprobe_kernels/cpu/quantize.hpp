// Shared by formats.hpp (one per instruction set) and by dispatch.cpp.
#pragma once
#include <cstdint>

namespace mxprobe {

enum class ScaleType : int32_t { kE8M0 = 0, kE4M3 = 1, kFP32 = 2, kE6M2 = 3 };

// A block format and the rule of its scales: cpu_quantizer.FormatRecord is the same in Python.
struct Format {
  int32_t block;  // elements that share a scale, as they lie in memory: of a square all of them
  int32_t mantissa_bits, min_exponent;
  int32_t bias, floor_bias;  // of the rule, and of `floor`
  int32_t max_exponent;      // floor(log2(qmax))
  ScaleType scale;
  int32_t four_over_six;
  double qmax;
  double unit;  // of E4M3 scales
};

// Blocks [rows, across] of a matrix, padded with zeros: how much of the last ones is there.
struct Grid {
  int64_t rows, across;
  int64_t height, width;  // of a block
  int64_t last_height, last_width;
};

using Quantizer = void (*)(const Format&, const float*, int64_t, void*, bool, int32_t*);
using FormatKernel = void (*)(const Format&, const float*, const Grid&, double*);

}  // namespace mxprobe
