// What a vector of elements adds to the fp32 sums of its segment. Included once per instruction set.
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
#pragma once
#include "vectors.hpp"

namespace mxprobe {
namespace ISA {
namespace {

constexpr int kBlock = 32;
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

}  // namespace
}  // namespace ISA
}  // namespace mxprobe
