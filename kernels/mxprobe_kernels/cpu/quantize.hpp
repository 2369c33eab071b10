// Shared by quantize.cpp (one per instruction set) and by dispatch.cpp.
#pragma once
#include <cstdint>

namespace mxprobe {

// A format with mini-float elements, and the rule of its scales.
struct Quantize {
  int block;  // at most 1024 elements
  int mantissa_bits, min_exponent;
  double qmax;
  int32_t bias;      // of the rule, and
  int max_exponent;  // floor(log2(qmax)), for power-of-two scales
  double unit;       // of E4M3 scales; 0: power-of-two scales
};

using Quantizer = void (*)(const Quantize&, const float*, int64_t, void*, bool, int32_t*);

}  // namespace mxprobe
