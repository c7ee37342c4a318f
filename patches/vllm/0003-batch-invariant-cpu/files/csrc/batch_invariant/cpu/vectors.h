// Vectors of 16 lanes, the unit of the contract, and what rounds: bf16, exp, log.
//
// Everything here is lanewise IEEE arithmetic with fused multiply-adds written out, compiled with -ffp-contract=off. A
// compiler may put the 16 lanes into one register or into two: the bits are the same.
#pragma once

#include <stdint.h>
#include <string.h>

// Each object file has these for itself: one of another instruction set must never be linked in their place.
#define INLINE [[gnu::always_inline]] static inline

namespace batch_invariant {

constexpr int kLanes = 16;

using f32x16 = float __attribute__((ext_vector_type(16)));
using i32x16 = int32_t __attribute__((ext_vector_type(16)));
using u32x16 = uint32_t __attribute__((ext_vector_type(16)));
using u16x16 = uint16_t __attribute__((ext_vector_type(16)));
using f32x8 = float __attribute__((ext_vector_type(8)));
using u32x8 = uint32_t __attribute__((ext_vector_type(8)));
using u16x8 = uint16_t __attribute__((ext_vector_type(8)));

// bf16 as it lies in memory: the upper half of an fp32.
struct bf16 {
  uint16_t bits;
};

template <class To, class From>
INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

template <class Vector, class T>
INLINE Vector load_bits(const T* from) {
  Vector v;
  memcpy(&v, from, sizeof v);
  return v;
}

INLINE float widen(float x) { return x; }
INLINE float widen(bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

INLINE void load(f32x16& v, const float* from) { v = load_bits<f32x16>(from); }
INLINE void load(f32x8& v, const float* from) { v = load_bits<f32x8>(from); }
INLINE void load(f32x16& v, const bf16* from) {
  v = bit_cast<f32x16>(__builtin_convertvector(load_bits<u16x16>(from), u32x16) << 16);
}
INLINE void load(f32x8& v, const bf16* from) {
  v = bit_cast<f32x8>(__builtin_convertvector(load_bits<u16x8>(from), u32x8) << 16);
}

// 16 lanes from `count` elements, the rest zero.
template <class T>
INLINE f32x16 load16(const T* from, int64_t count = kLanes) {
  f32x16 v;
  if (count >= kLanes) {
    load(v, from);
    return v;
  }
  T padded[kLanes] = {};
  memcpy(padded, from, count * sizeof(T));
  load(v, padded);
  return v;
}

// To nearest, ties to even; a NaN stays one.
INLINE u32x16 round_bits(f32x16 v) {
  u32x16 bits = bit_cast<u32x16>(v);
  u32x16 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  u32x16 quiet = (bits >> 16) | 0x40;
  return (bits & 0x7FFFFFFF) > 0x7F800000 ? quiet : rounded;
}

INLINE void store16(float* to, f32x16 v, int64_t count = kLanes) {
  memcpy(to, &v, (count < kLanes ? count : kLanes) * sizeof(float));
}
INLINE void store16(bf16* to, f32x16 v, int64_t count = kLanes) {
  u16x16 half = __builtin_convertvector(round_bits(v), u16x16);
  memcpy(to, &half, (count < kLanes ? count : kLanes) * sizeof(bf16));
}

INLINE void narrow(float* to, float x) { *to = x; }
INLINE void narrow(bf16* to, float x) {
  uint32_t bits = bit_cast<uint32_t>(x);
  bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  to->bits = uint16_t(nan ? (bits >> 16) | 0x40 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return __builtin_elementwise_fma(a, b, c); }
INLINE f32x8 fma(f32x8 a, f32x8 b, f32x8 c) { return __builtin_elementwise_fma(a, b, c); }
INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// The contract's tree over 16 lanes: halves are added until one lane is left.
INLINE float tree_sum(f32x16 v) {
  f32x8 a = v.lo + v.hi;
  auto b = a.lo + a.hi;
  auto c = b.lo + b.hi;
  return c.x + c.y;
}

INLINE float max_of(f32x16 v) {
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

// exp in fp32, within 2 ulp: 2^n times a polynomial in r, |r| <= ln(2)/2 (Taylor to degree 7). Lanewise.
INLINE f32x16 exp16(f32x16 x) {
  f32x16 clamped = x < -110.0f ? f32x16(-110.0f) : x;
  clamped = clamped > 100.0f ? f32x16(100.0f) : clamped;
  f32x16 n = __builtin_elementwise_roundeven(clamped * 1.44269504088896341f);
  f32x16 r = fma(n, f32x16(-0.693359375f), clamped);
  r = fma(n, f32x16(2.12194440e-4f), r);
  f32x16 p = f32x16(1.0f / 5040.0f);
  p = fma(p, r, f32x16(1.0f / 720.0f));
  p = fma(p, r, f32x16(1.0f / 120.0f));
  p = fma(p, r, f32x16(1.0f / 24.0f));
  p = fma(p, r, f32x16(1.0f / 6.0f));
  p = fma(p, r, f32x16(0.5f));
  p = fma(p, r, f32x16(1.0f));
  p = fma(p, r, f32x16(1.0f));
  // A NaN's n is no number: its lane takes x at the end. In two steps, so that subnormal results are rounded once.
  i32x16 e = __builtin_convertvector(x == x ? n : f32x16(0.0f), i32x16);
  i32x16 half = e >> 1;
  f32x16 low = bit_cast<f32x16>((half + 127) << 23), high = bit_cast<f32x16>((e - half + 127) << 23);
  f32x16 y = p * low * high;
  return x == x ? y : x;
}

INLINE float exp1(float x) { return exp16(f32x16(x))[0]; }

// Natural logarithm in fp32, rounded from a series in fp64: 2 atanh((m-1)/(m+1)) + e ln(2), m in [sqrt(1/2), sqrt(2)).
INLINE float log1(float x) {
  if (!(x > 0) || x > 3.4028234e38f) return x == 0 ? -__builtin_inff() : x > 0 ? x : __builtin_nanf("");
  uint64_t bits = bit_cast<uint64_t>(double(x));
  int64_t e = int64_t(bits >> 52) - 1023;
  double m = bit_cast<double>((bits & 0xFFFFFFFFFFFFFull) | 0x3FF0000000000000ull);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    e += 1;
  }
  double s = (m - 1) / (m + 1), s2 = s * s, sum = 0;
  for (int k = 23; k >= 3; k -= 2) sum = (sum + 1.0 / k) * s2;
  return float(2 * (s + s * sum) + double(e) * 0.69314718055994530942);
}

}  // namespace batch_invariant
