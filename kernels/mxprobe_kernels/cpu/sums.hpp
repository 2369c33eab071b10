// What a vector of elements adds to the fp32 sums of its segment. Included once per instruction set.
//
// With s the block's power-of-two scale and m its amax, everything is computed in units of s:
//
//   u = x / s    a = m / s      exact
//   c = rne(u), at most 6         Q  = s c
//   c* = rne(6 u / a)             Q* = s c* a / 6
//   e = c - u                     Q - x
//   r = 6 u - c* a                x - Q* in sixths: -d on D (c* = 0), -g elsewhere
//   b = 6 c - c* a                Q - Q* in sixths
//
// The quotient 6 u / a is computed as u * (6 / a) and snapped to multiples of 2^-17, so that exact ties are exact;
// bf16 and fp16 have no other quotient so close to a tie. For fp32, the sign of 6 u - t a says on which side of t the
// quotient lies; r and b are exact to their own size where they nearly cancel. Both come from fused multiplications,
// whose rounding errors are exact numbers; without them, from u and a split into 12-bit halves.
//
// Everything comes multiplied by w = s / 2^E, the block's weight in its segment: x / 2^E serves for u w, so that u is
// never computed, nor x where 2^E is 1.
//
// rne adds and takes away 1.5 * 2^22 times the power of two at or below u, at least 1: the last place of that sum is the
// grid's. For c it is made of the bits of x, as an integer; for c*, in units in which it is 1.5 times a power of two.
#pragma once
#include "vectors.hpp"

namespace mxprobe {
namespace ISA {
namespace {

constexpr int kBlock = 32;
constexpr int kNone = -128;               // no exponent
constexpr int kSpread = 30;               // binades of scales that are summed together: w >= 2^-30
constexpr int kAsIs = 20;                 // binades beside 1 in which the largest scale needs no unit of its own
constexpr int kWiden = 15;                // vectors that 4-bit counters hold

constexpr float kUnit = 1.4901161193847656e-08f;  // 2^-26, of c*
constexpr float kPerUnit = 67108864.0f;

// c* in kUnit, from t in sixteenths: units in which the number that rounds is 1.5 times a power of two.
INLINE vf round_to_grid(vf t, vi least) {
  const vf step = as_float(max(one_and_a_half(as_int(t)), least));
  return (t * 2.384185791015625e-07f + step) - step;
}

// E of a segment whose largest scale is 2^top: 0 if possible, so that elements are taken as they are. What an element of
// 16 bits has below s is at least 2^-13 s: its square, times w^2, stays a normal fp32; that of 24 does not.
template <DType D>
INLINE int unit_of(int top) {
  return D != DType::kFloat32 && -kAsIs <= top && top <= kAsIs ? 0 : top;
}

// What a segment sums, per lane.
struct Sums {
  vf x2, xe, xr, e2, b2, g2, d2, bg, z2, e;
  vf bd, b2_saturated, e2_on_d, e2_saturated;
  vi off_d, saturated, by_scale;        // elements with c* other than 0 (c, for the lite statistics), and so on
  vi nibbles, minus_nibbles;            // eight 4-bit counters of codes
  vi even, odd, minus_even, minus_odd;  // the same in bytes: codes 0 2 4 6, codes 1 3 5 7
};

// 1 << 4 code, from the bits of c w: its exponent and first mantissa bit tell all codes but 0 apart.
INLINE vi nibble_of(vi c, vi place, Mask not_zero) {
#ifdef MXPROBE_LOOK_UP
  const vi table = {1, 1 << 4, 0, 1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28};
  return look_up(subtract_where(not_zero, c, place) >> 22, table);
#else
  const vi top = (c - place) >> 22;  // negative for 0
  const vi code = max(top, top >= 0 ? splat(1) : splat(0));
#ifdef __AVX2__
  return splat(1) << (code << 2);
#else
  return __builtin_convertvector(as_float((code << 25) + 0x3F800000), vi);
#endif
#endif
}

// Scale of a block (or of a column per lane) beside that of its segment, 2^E: w = s / 2^E, a_w = a w.
struct Scale {
  vi least;   // bits of 1.5 s
  vi place;   // what takes the bits of c w to those that nibble_of knows
  vf ratio;   // 6 / 16 a w
  vf w6;      // 6 w
  vf a_w;     // a_w per kUnit
  vf high, low, high16, low16;  // a_w in 12-bit halves, per kUnit and in sixteenths
};

INLINE Scale scale_of(vi amax, vi exponent, int top) {
  Scale k;
  const vf m = as_float(amax), a_w = m * pow2(-top);
  const vi below = (exponent - top) << 23;
  k.least = ((exponent + 127) << 23) | 0x400000;
  k.place = below + (kFirstPlace << 22);
  k.w6 = as_float(below + 0x3F800000) * 6.0f;
  k.ratio = 0.375f / (amax > 0 ? a_w : splat(1.0f));
  const vf high = as_float(as_int(a_w) & ~0xFFF), low = a_w - high;
  k.a_w = a_w * kPerUnit;
  k.high = high * kPerUnit, k.low = low * kPerUnit, k.high16 = high * 16.0f, k.low16 = low * 16.0f;
  return k;
}

INLINE Scale lane_of(const Scale& k, int j) {
  return {splat(k.least[j]), splat(k.place[j]), splat(k.ratio[j]),  splat(k.w6[j]),   splat(k.a_w[j]),
          splat(k.high[j]),  splat(k.low[j]),   splat(k.high16[j]), splat(k.low16[j])};
}

// Of both vectors of a pair, or each its own.
INLINE const Scale& at(const Scale& k, int) { return k; }
INLINE const Scale& at(const Scale (&k)[2], int i) { return k[i]; }

// The same for all of a segment.
struct Fixed {
  vf inverse;     // 2^-E
  vi raise;       // the bits of 2^22 / 2^E, less those of 1
  vi least, one;  // bits of 1.5 / 16; 1
  vf six;
};

INLINE Fixed fixed_of(int unit) {
  return {splat(pow2(-unit)), splat((22 - unit) * (1 << 23)), kept(splat(0x3DC00000)), kept(splat(1)), kept(splat(6.0f))};
}

// Two vectors step by step together, since what one waits for takes longer than a step.
#define EACH for (int i = 0; i < 2; i++)
template <DType D, bool COVERS, bool LITE, bool AS_IS, class Scales>
INLINE void add(Sums& s, const vi (&bits)[2], const Scales& k, const Fixed& fixed) {
  const vf six = fixed.six;
  vf x[2], x_w[2], step[2], c[2], e[2], t[2], c_star[2], ideal[2], r[2], b[2];
  Mask not_zero[2], at_zero[2], on_d[2], off_d[2];
  EACH x[i] = as_float(kSigned ? bits[i] : bits[i] & 0x7FFFFFFF);
  EACH x_w[i] = AS_IS ? x[i] : x[i] * fixed.inverse;
  EACH step[i] = as_float(max(one_and_a_half(bits[i]), at(k, i).least) + fixed.raise);
  EACH c[i] = x_w[i] + step[i];
  if constexpr (!LITE) EACH t[i] = x_w[i] * at(k, i).ratio + six;
  EACH c[i] = c[i] - step[i];
  if constexpr (!LITE) EACH t[i] = t[i] - six;
  if constexpr (!COVERS) EACH c[i] = at_most(c[i], at(k, i).w6);
  EACH e[i] = c[i] - x_w[i];
  EACH not_zero[i] = is_not_zero(c[i]), at_zero[i] = none_of(not_zero[i]);
  EACH s.x2 += x_w[i] * x_w[i];
  EACH s.e2 += e[i] * e[i];
  if constexpr (!COVERS) EACH add_where(is_above(magnitude(x_w[i]), at(k, i).w6), s.saturated, splat(1));
  if constexpr (LITE) {
    EACH add_where(not_zero[i], s.off_d, fixed.one);
    return;
  }
  EACH s.xe += e[i] * x_w[i];
  EACH add_where(at_zero[i], s.z2, x_w[i], x_w[i]);
  EACH s.e += kSigned ? e[i] : as_float(as_int(e[i]) ^ (bits[i] & INT32_MIN));
  vi one[2];
  EACH one[i] = nibble_of(as_int(c[i]), at(k, i).place, not_zero[i]);
  EACH s.nibbles += one[i];
  EACH add_where(is_negative(bits[i]), s.minus_nibbles, one[i]);
  if constexpr (D != DType::kFloat32) {
    EACH c_star[i] = round_to_grid(t[i], fixed.least);
    EACH ideal[i] = c_star[i] * at(k, i).a_w;
    EACH r[i] = fused(x_w[i], six, ideal[i]);
    EACH b[i] = fused(c[i], six, ideal[i]);
  } else if constexpr (kFused) {
    EACH {
      const vf a16 = at(k, i).a_w * (16.0f * kUnit);
      const vf near = t[i] * a16;
      const vf side = fused(x_w[i], six, near) - fused(t[i], a16, near);
      t[i] += clipped(side * 1e30f, splat(2.384185791015625e-07f));
    }
    EACH c_star[i] = round_to_grid(t[i], fixed.least);
    EACH ideal[i] = c_star[i] * at(k, i).a_w;
    EACH r[i] = fused(x_w[i], six, ideal[i]) - fused(c_star[i], at(k, i).a_w, ideal[i]);
    EACH b[i] = -fused(c_star[i], at(k, i).a_w, c[i] * six);
  } else {
    EACH {
      const vf high = as_float(as_int(x_w[i]) & ~0xFFF), high6 = high * six, low6 = (x_w[i] - high) * six;
      const vf side = (high6 - t[i] * at(k, i).high16) + (low6 - t[i] * at(k, i).low16);
      t[i] += clipped(side * 1e30f, splat(2.384185791015625e-07f));
      c_star[i] = round_to_grid(t[i], fixed.least);
      const vf ideal_high = c_star[i] * at(k, i).high, ideal_low = c_star[i] * at(k, i).low;
      r[i] = (high6 - ideal_high) + (low6 - ideal_low);
      b[i] = (c[i] * six - ideal_high) - ideal_low;
    }
  }
  EACH off_d[i] = is_not_zero(c_star[i]), on_d[i] = none_of(off_d[i]);
  EACH s.xr += r[i] * x_w[i];
  EACH s.b2 += b[i] * b[i];
  EACH add_where(on_d[i], s.d2, r[i], r[i]);
  EACH add_where(off_d[i], s.g2, r[i], r[i]);
  EACH add_where(off_d[i], s.bg, r[i], b[i]);
  EACH add_where(off_d[i], s.off_d, fixed.one);
  if constexpr (!COVERS) {
    EACH {
      const Mask over = is_above(magnitude(x_w[i]), at(k, i).w6);
      add_where(on_d[i], s.bd, b[i], r[i]);
      add_where(on_d[i], s.e2_on_d, e[i], e[i]);
      add_where(over, s.b2_saturated, b[i], b[i]);
      add_where(over, s.e2_saturated, e[i], e[i]);
      add_where(at_zero[i] & off_d[i], s.by_scale, splat(1));
    }
  }
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
