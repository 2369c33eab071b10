// Vectors of LANES fp32 numbers, and the few operations that instruction sets do differently. Included by the kernels
// inside namespace mxprobe::ISA; GCC and clang vector extensions, with intrinsics where one instruction does the work
// of several.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "statistics.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mxprobe {
namespace ISA {
namespace {

typedef float vf __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2), aligned(2)));
typedef uint16_t vw __attribute__((vector_size(LANES * 4), aligned(2)));
typedef float vf_half __attribute__((vector_size(LANES * 2), aligned(4)));
typedef double vd __attribute__((vector_size(LANES * 4), aligned(8)));

#define INLINE static inline __attribute__((always_inline))

constexpr int32_t kInfinity = 0x7F800000;

INLINE vf as_float(vi v) { return (vf)v; }
INLINE vi as_int(vf v) { return (vi)v; }
INLINE vf splat(float v) { return vf{} + v; }
INLINE vi splat(int32_t v) { return vi{} + v; }
INLINE vf max(vf a, vf b) { return a > b ? a : b; }
INLINE vf min(vf a, vf b) { return a < b ? a : b; }
INLINE vi max(vi a, vi b) { return a > b ? a : b; }
INLINE vi min(vi a, vi b) { return a < b ? a : b; }
INLINE vh max(vh a, vh b) { return a > b ? a : b; }
INLINE vw max(vw a, vw b) { return a > b ? a : b; }
INLINE vi at_most_one(vi v) { return v < 1 ? v : splat(1); }
INLINE vh at_most_one(vh v) { return v < 1 ? v : vh{} + uint16_t(1); }
INLINE vw at_most_one(vw v) { return v < 1 ? v : vw{} + uint16_t(1); }
INLINE vf magnitude(vf v) { return as_float(as_int(v) & 0x7FFFFFFF); }

INLINE float bits_to_float(int32_t b) {
  float f;
  std::memcpy(&f, &b, 4);
  return f;
}

// 2^e for e of -149 .. 127, 0 below.
INLINE float pow2(int e) {
  return e >= -126 ? bits_to_float((e + 127) << 23) : bits_to_float(e >= -149 ? 1 << (e + 149) : 0);
}

// Keeps the compiler from making a constant anew wherever it is used, which takes longer than loading it.
template <class V>
INLINE V kept(V v) {
#if defined(__x86_64__)
  __asm__("" : "+x"(v));
#endif
  return v;
}

// Keeps the compiler from taking an array out of a register again, lane by lane.
template <class A>
INLINE void in_memory(A& array) {
  __asm__("" : "+m"(array));
}

INLINE vi lane_numbers() {
  vi v{};
  for (int j = 0; j < LANES; j++) v[j] = j;
  return v;
}

INLINE int lane_max(vi v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int top = v[0];
  for (int j = 1; j < LANES; j++) top = v[j] > top ? v[j] : top;
  return top;
#endif
}

template <class V>
INLINE double lane_sum(V v, int n = LANES) {
  double total = 0;
  for (int j = 0; j < n; j++) total += v[j];
  return total;
}

// total += factor * v, in double.
INLINE void add_scaled(vd& total, vf v, double factor) {
  vf_half half[2];
  std::memcpy(half, &v, sizeof v);
  total += (__builtin_convertvector(half[0], vd) + __builtin_convertvector(half[1], vd)) * factor;
}

// Lane j of the result belongs to a where bit H of j is clear, else to b: the larger of its elements j and j ^ H.
template <int H, class V>
INLINE V merge_max(V a, V b) {
  V low, high;
#if defined(__clang__)
  for (int j = 0; j < LANES; j++) {
    low[j] = j & H ? b[j ^ H] : a[j];
    high[j] = j & H ? b[j] : a[j ^ H];
  }
#else
  typedef decltype(V{} == V{}) Index;
  Index take_low{}, take_high{};
  for (int j = 0; j < LANES; j++) {
    take_low[j] = j & H ? LANES + (j ^ H) : j;
    take_high[j] = j & H ? LANES + j : j ^ H;
  }
  low = __builtin_shuffle(a, b, take_low);
  high = __builtin_shuffle(a, b, take_high);
#endif
  return max(low, high);
}

// v[LANES] -> lane j is the largest lane of v[j]. v is used up.
template <int H = 1, class V>
INLINE V lane_maxima(V* v) {
  if constexpr (H == LANES) {
    return v[0];
  } else {
    for (int i = 0; i < LANES / (2 * H); i++) v[i] = merge_max<H>(v[2 * i], v[2 * i + 1]);
    return lane_maxima<2 * H>(v);
  }
}

#if defined(__AVX512F__) && defined(__AVX512DQ__)

// Here sums take signed numbers; elsewhere magnitudes, and what depends on the sign gets it back.
constexpr bool kSigned = true;
constexpr bool kFused = true;
typedef __mmask16 Mask;

INLINE Mask is_not_zero(vf v) { return _mm512_test_epi32_mask((__m512i)v, (__m512i)v); }  // but for -0
INLINE Mask is_above(vf v, vf limit) { return _mm512_cmp_ps_mask((__m512)v, (__m512)limit, _CMP_GT_OQ); }
INLINE Mask is_negative(vi v) { return _mm512_movepi32_mask((__m512i)v); }
INLINE Mask none_of(Mask m) { return ~m; }
INLINE bool any_of(Mask m) { return m; }
INLINE void add_where(Mask m, vf& sum, vf a, vf b) {
  sum = (vf)_mm512_mask3_fmadd_ps((__m512)a, (__m512)b, (__m512)sum, m);
}
INLINE void add_where(Mask m, vi& sum, vi v) {
  sum = (vi)_mm512_mask_add_epi32((__m512i)sum, m, (__m512i)sum, (__m512i)v);
}
// a b - c, rounded once
INLINE vf fused(vf a, vf b, vf c) { return (vf)_mm512_fmsub_ps((__m512)a, (__m512)b, (__m512)c); }
// the magnitude of v, but at most limit, with the sign of v
INLINE vf at_most(vf v, vf limit) { return (vf)_mm512_range_ps((__m512)v, (__m512)limit, 2); }
INLINE vi widen_words(vh v) { return (vi)_mm512_cvtepu16_epi32((__m256i)v); }
INLINE vf clipped(vf v, vf limit) { return at_most(v, limit); }
// the bits of 1.5 times the power of two at or below the magnitude of v
INLINE vi one_and_a_half(vi v) {
  return (vi)_mm512_ternarylogic_epi32((__m512i)v, _mm512_set1_epi32(kInfinity), _mm512_set1_epi32(0x400000), 0xEA);
}
INLINE vi subtract_where(Mask m, vi a, vi b) { return (vi)_mm512_maskz_sub_epi32(m, (__m512i)a, (__m512i)b); }
constexpr int kFirstPlace = -5;
#define MXPROBE_LOOK_UP 1
INLINE vi look_up(vi index, vi table) { return (vi)_mm512_permutexvar_epi32((__m512i)index, (__m512i)table); }

#else

constexpr bool kSigned = false;
typedef vi Mask;

INLINE Mask is_not_zero(vf v) { return v != 0.0f; }
INLINE Mask is_above(vf v, vf limit) { return v > limit; }
INLINE Mask is_negative(vi v) { return v >> 31; }
INLINE Mask none_of(Mask m) { return ~m; }
INLINE bool any_of(Mask m) { return lane_max(-m); }
INLINE void add_where(Mask m, vf& sum, vf a, vf b) { sum += as_float(as_int(a) & m) * b; }
INLINE void add_where(Mask m, vi& sum, vi v) { sum += v & m; }
INLINE vf at_most(vf v, vf limit) { return min(v, limit); }
INLINE vf clipped(vf v, vf limit) { return min(max(v, -limit), limit); }
INLINE vi one_and_a_half(vi v) { return (v & kInfinity) | 0x400000; }
constexpr int kFirstPlace = 252;

#if defined(__FMA__) && LANES == 8
constexpr bool kFused = true;
INLINE vi widen_words(vh v) { return (vi)_mm256_cvtepu16_epi32((__m128i)v); }
INLINE vf fused(vf a, vf b, vf c) { return (vf)_mm256_fmsub_ps((__m256)a, (__m256)b, (__m256)c); }
#else
constexpr bool kFused = false;
INLINE vi widen_words(vh v) { return __builtin_convertvector(v, vi); }
INLINE vf fused(vf a, vf b, vf c) { return a * b - c; }
#endif

#endif

template <DType D>
constexpr int element_bytes = D == DType::kFloat32 ? 4 : 2;

// LANES elements as they lie in memory.
template <DType D>
using Raw = std::conditional_t<D == DType::kFloat32, vi, vh>;

template <DType D>
INLINE Raw<D> load_raw(const char* p) {
  Raw<D> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// -> fp32 bits
template <DType D>
INLINE vi expand(Raw<D> raw) {
  if constexpr (D == DType::kFloat32) {
    return raw;
  } else {
    if constexpr (D == DType::kBFloat16) return widen_words(raw) << 16;
#if defined(__AVX512F__) && LANES == 16
    return (vi)_mm512_cvtph_ps((__m256i)raw);
#elif defined(__F16C__) && LANES == 8
    return (vi)_mm256_cvtph_ps((__m128i)raw);
#else
    vi v = widen_words(raw);
    // fp16: exponent and mantissa shifted into place, then times 2^112; subnormals come out right.
    vi sign = (v & 0x8000) << 16, bits = (v & 0x7FFF) << 13;
    vi scaled = as_int(as_float(bits) * 5.192296858534828e+33f);
    vi special = bits >= (0x7C00 << 13);
    return (special ? (bits | kInfinity) : scaled) | sign;
#endif
  }
}

template <DType D>
INLINE vi load(const char* p) {
  return expand<D>(load_raw<D>(p));
}

// 2 LANES elements -> fp32 bits; bf16's even ones, then its odd ones, which takes two instructions.
template <DType D>
INLINE void load_pair(const char* p, vi (&pair)[2]) {
  if constexpr (D == DType::kBFloat16) {
    vi both;
    std::memcpy(&both, p, sizeof both);
    pair[0] = both << 16, pair[1] = both & int32_t(0xFFFF0000);
  } else {
    pair[0] = load<D>(p), pair[1] = load<D>(p + sizeof(Raw<D>));
  }
}

// Counters of elements -> of lanes.
template <DType D>
INLINE vi widen(Raw<D> counters) {
  if constexpr (D == DType::kFloat32) return counters;
  else return widen_words(counters);
}

// A register of elements as they lie in memory.
template <DType D>
using Wide = std::conditional_t<D == DType::kFloat32, vi, vw>;

template <DType D>
constexpr std::conditional_t<D == DType::kFloat32, int32_t, uint16_t> magnitude_bits =
    D == DType::kFloat32 ? 0x7FFFFFFF : 0x7FFF;

// Its counters -> of lanes.
template <DType D>
INLINE vi widen_wide(Wide<D> counters) {
  if constexpr (D == DType::kFloat32) {
    return counters;
  } else {
    vi both;
    std::memcpy(&both, &counters, sizeof both);
    return (both & 0xFFFF) + ((both >> 16) & 0xFFFF);
  }
}

// Without the sign: larger bits are larger magnitudes, a NaN the largest.
template <DType D>
INLINE Raw<D> load_magnitude(const char* p) {
  if constexpr (D == DType::kFloat32) return load_raw<D>(p) & 0x7FFFFFFF;
  else return load_raw<D>(p) & uint16_t(0x7FFF);
}

}  // namespace
}  // namespace ISA
}  // namespace mxprobe
