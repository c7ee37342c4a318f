// Row-local operators in bf16: RMSNorm (with a residual, or with rotary embedding on queries and keys), SiLU-and-mul,
// log-softmax. A row's bits depend on that row alone.
//
// Sums run over kLanes lanes: lane (i / 8) % kLanes adds element i to its own fp32 sum, in the order of i. The lanes are
// then added in a tree: within groups of 32 at distances 16, 8, 4, 2, 1, then the groups at 8, 4, 2, 1. A lane without an
// element holds zero and changes nothing, so a row of 128 may be summed by 16 threads. Compiled without contraction: a
// fused multiply-add stands where the source writes one.
//
// At few rows the time is that of a launch: a kernel lets the next one start at once (programmatic dependent launch), asks
// for what does not depend on the one before it, and waits before it reads or writes what may.
#include "sm90.h"

enum : int { kLanes = 512, kVector = 8 };

#define INFINITY __int_as_float(0x7F800000)
#define NAN __int_as_float(0x7FC00000)

struct alignas(16) Vector {
  uint32_t words[4];
};

__device__ __forceinline__ void widen(const Vector& v, float (&x)[kVector]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(v.words[i] << 16);
    x[2 * i + 1] = __uint_as_float(v.words[i] & 0xFFFF0000u);
  }
}
__device__ __forceinline__ float widen(unsigned short bits) { return from_bf16(bits); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ Vector narrow(const float (&x)[kVector]) {
  Vector v;
#pragma unroll
  for (int i = 0; i < 4; ++i) v.words[i] = to_bf16(x[2 * i]) | uint32_t(to_bf16(x[2 * i + 1])) << 16;
  return v;
}
__device__ __forceinline__ void load(const unsigned short* p, float (&x)[kVector]) {
  widen(*reinterpret_cast<const Vector*>(p), x);
}
__device__ __forceinline__ void load(const float* p, float (&x)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) x[i] = p[i];
}

// exp in fp32 within 2 ulp: 2^n times a polynomial of degree 7; in two steps, so that a subnormal is rounded once.
__device__ __forceinline__ float exponential(float x) {
  const float clamped = x < -110.0f ? -110.0f : x > 100.0f ? 100.0f : x;
  const float n = rintf(clamped * 1.44269504088896341f);
  float r = fmaf(n, -0.693359375f, clamped);
  r = fmaf(n, 2.12194440e-4f, r);
  float p = 1.0f / 5040.0f;
  p = fmaf(p, r, 1.0f / 720.0f);
  p = fmaf(p, r, 1.0f / 120.0f);
  p = fmaf(p, r, 1.0f / 24.0f);
  p = fmaf(p, r, 1.0f / 6.0f);
  p = fmaf(p, r, 0.5f);
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  const int e = int(n), half = e >> 1;
  const float y = p * __int_as_float((half + 127) << 23) * __int_as_float((e - half + 127) << 23);
  return x == x ? y : x;
}

// The natural logarithm, rounded from a series in fp64.
__device__ __forceinline__ float logarithm(float x) {
  if (!(x > 0.0f) || x > 3.4028234e38f) return x == 0.0f ? -INFINITY : x > 0.0f ? x : NAN;
  const long long bits = __double_as_longlong(double(x));
  long long e = (bits >> 52) - 1023;
  double m = __longlong_as_double((bits & 0xFFFFFFFFFFFFFll) | 0x3FF0000000000000ll);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    e += 1;
  }
  const double s = (m - 1) / (m + 1), s2 = s * s;
  double sum = 0;
#pragma unroll
  for (int k = 23; k >= 3; k -= 2) sum = (sum + 1.0 / k) * s2;
  return float(2 * (s + s * sum) + double(e) * 0.69314718055994530942);
}

__device__ __forceinline__ float warp_sum(float x, int first) {
#pragma unroll
  for (int distance = first; distance; distance /= 2) x = x + __shfl_xor_sync(~0u, x, distance);
  return x;
}

// The tree over the block's kLanes threads; every thread gets the sum. `scratch`: a value a warp.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
  x = warp_sum(x, 16);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_sum(scratch[threadIdx.x % (kLanes / 32)], kLanes / 64);
}

__device__ __forceinline__ float reciprocal_root(float sum, int d, float epsilon) {
  return 1.0f / sqrtf(sum / float(d) + epsilon);
}

// out = x / rms(x) * weight, over rows of d = 8 n values; with kAdd, of x + residual rounded to bf16, which goes to `sum`.
template <bool kAdd, int kHeld>
__device__ __forceinline__ void norm(const unsigned short* x, const unsigned short* residual, const unsigned short* weight,
                                     unsigned short* out, unsigned short* sum, int d, long long x_stride,
                                     long long residual_stride, float epsilon) {
  __shared__ float scratch[kLanes / 32];
  dependents_may_start();
  const long long row = blockIdx.x;
  Vector gains[kHeld];
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int at = (threadIdx.x + j * kLanes) * kVector;
    if (at < d) gains[j] = *reinterpret_cast<const Vector*>(weight + at);
  }
  wait_for_dependencies();
  float held[kHeld][kVector], squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int at = (threadIdx.x + j * kLanes) * kVector;
    if (at >= d) continue;
    load(x + row * x_stride + at, held[j]);
    if (kAdd) {
      float other[kVector];
      load(residual + row * residual_stride + at, other);
#pragma unroll
      for (int i = 0; i < kVector; ++i) held[j][i] = held[j][i] + other[i];
      const Vector rounded = narrow(held[j]);
      *reinterpret_cast<Vector*>(sum + row * d + at) = rounded;
      widen(rounded, held[j]);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) squares = fmaf(held[j][i], held[j][i], squares);
  }
  const float scale = reciprocal_root(block_sum(squares, scratch), d, epsilon);
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int at = (threadIdx.x + j * kLanes) * kVector;
    if (at >= d) continue;
    float gain[kVector];
    widen(gains[j], gain);
#pragma unroll
    for (int i = 0; i < kVector; ++i) held[j][i] = held[j][i] * scale * gain[i];
    *reinterpret_cast<Vector*>(out + row * d + at) = narrow(held[j]);
  }
}

#define NORM(held)                                                                                                     \
  extern "C" __global__ void __launch_bounds__(kLanes) rms_norm_##held(                                                \
      const unsigned short* x, const unsigned short* residual, const unsigned short* weight, unsigned short* out,      \
      unsigned short* sum, int d, long long x_stride, long long residual_stride, float epsilon) {                      \
    norm<false, held>(x, residual, weight, out, sum, d, x_stride, residual_stride, epsilon);                           \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(kLanes) add_rms_norm_##held(                                            \
      const unsigned short* x, const unsigned short* residual, const unsigned short* weight, unsigned short* out,      \
      unsigned short* sum, int d, long long x_stride, long long residual_stride, float epsilon) {                      \
    norm<true, held>(x, residual, weight, out, sum, d, x_stride, residual_stride, epsilon);                            \
  }
NORM(1)
NORM(2)
NORM(4)

// The norm of one head of 128 values by 16 threads, 8 values each: the lanes 0 to 15 of the contract.
__device__ __forceinline__ void norm_head(float (&x)[kVector], const Vector& gains, float epsilon) {
  float squares = 0.0f, gain[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) squares = fmaf(x[i], x[i], squares);
  const float scale = reciprocal_root(warp_sum(squares, 8), 128, epsilon);
  widen(gains, gain);
#pragma unroll
  for (int i = 0; i < kVector; ++i) x[i] = x[i] * scale * gain[i];
  widen(narrow(x), x);
}

// Heads of one token, 16 threads each: queries, then keys, from rows of their own; each normed (if there are weights), then
// turned in halves: thread l turns with thread l ^ 8. Blocks of one token share its heads; with many tokens there is one.
template <class Table>
__device__ __forceinline__ void turn_heads(const unsigned short* query, const unsigned short* key,
                                           const unsigned short* query_weight, const unsigned short* key_weight,
                                           const long long* positions, const Table* cos_sin, unsigned short* query_out,
                                           unsigned short* key_out, int heads, int kv_heads, long long query_stride,
                                           long long key_stride, int rows, float epsilon) {
  dependents_may_start();
  const long long token = blockIdx.x;
  const int lane = threadIdx.x % 16, at = lane * kVector, side_by_side = blockDim.x / 16;
  Vector query_gains = {}, key_gains = {};
  if (query_weight) {
    query_gains = *reinterpret_cast<const Vector*>(query_weight + at);
    key_gains = *reinterpret_cast<const Vector*>(key_weight + at);
  }
  wait_for_dependencies();
  const long long position = positions[token];
  const Table* turns = cos_sin + (position < 0 || position >= rows ? 0 : position) * 128 + lane % 8 * kVector;
  float cosines[kVector], sines[kVector];
  load(turns, cosines);
  load(turns + 64, sines);
  const int all = heads + kv_heads, first = blockIdx.y * side_by_side + threadIdx.x / 16;
  for (int group = blockIdx.y * side_by_side; group < all; group += gridDim.y * side_by_side) {  // as often for each thread
    const int head = group - int(blockIdx.y) * side_by_side + first;
    const bool is_query = head < heads, there = head < all;
    float x[kVector] = {};
    if (there)
      load(is_query ? query + token * query_stride + head * 128 + at : key + token * key_stride + (head - heads) * 128 + at, x);
    if (query_weight) {
      Vector gains;
#pragma unroll
      for (int i = 0; i < 4; ++i) gains.words[i] = is_query ? query_gains.words[i] : key_gains.words[i];
      norm_head(x, gains, epsilon);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float product = __shfl_xor_sync(~0u, x[i], 8) * sines[i];
      x[i] = fmaf(x[i], cosines[i], lane < 8 ? -product : product);
    }
    if (there)
      *reinterpret_cast<Vector*>(is_query ? query_out + (token * heads + head) * 128 + at
                                          : key_out + (token * kv_heads + head - heads) * 128 + at) = narrow(x);
  }
}

#define TURN(name, Table)                                                                                              \
  extern "C" __global__ void __launch_bounds__(128) turn_heads_##name(                                                 \
      const unsigned short* query, const unsigned short* key, const unsigned short* query_weight,                      \
      const unsigned short* key_weight, const long long* positions, const Table* cos_sin, unsigned short* query_out,   \
      unsigned short* key_out, int heads, int kv_heads, long long query_stride, long long key_stride, int rows,        \
      float epsilon) {                                                                                                 \
    turn_heads(query, key, query_weight, key_weight, positions, cos_sin, query_out, key_out, heads, kv_heads,          \
               query_stride, key_stride, rows, epsilon);                                                               \
  }
TURN(bf16, unsigned short)
TURN(fp32, float)

// gate / (1 + exp(-gate)), by the card's own exp2 and reciprocal, each within 2 ulp in fp32.
__device__ __forceinline__ float silu(float gate) {
  float power, inverse;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(gate * -1.44269504088896341f));
  asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return gate * inverse;
}

// out = silu(gate) * up; a row of x is d gates, then d ups.
extern "C" __global__ void __launch_bounds__(128) silu_and_mul(const unsigned short* x, unsigned short* out, int d,
                                                               long long x_stride) {
  dependents_may_start();
  wait_for_dependencies();
  const int at = (blockIdx.y * 128 + threadIdx.x) * kVector;
  if (at >= d) return;
  const long long row = blockIdx.x;
  float gate[kVector], up[kVector];
  load(x + row * x_stride + at, gate);
  load(x + row * x_stride + d + at, up);
#pragma unroll
  for (int i = 0; i < kVector; ++i) gate[i] = silu(gate[i]) * up[i];
  *reinterpret_cast<Vector*>(out + row * d + at) = narrow(gate);
}

// log softmax of a row of v logits: all of it to `out` [rows, v], or that of one index to `selected` with the row's LSE.
template <class T>
__device__ __forceinline__ void log_softmax(const T* logits, float* out, const long long* index, float* selected, float* lse,
                                            int v, long long stride) {
  __shared__ float scratch[kLanes / 32];
  dependents_may_start();
  wait_for_dependencies();
  const long long row = blockIdx.x;
  const T* values = logits + row * stride;
  const int whole = v / kVector * kVector;
  float peak = -INFINITY;
  for (int at = threadIdx.x * kVector; at < whole; at += kLanes * kVector) {
    float x[kVector];
    load(values + at, x);
#pragma unroll
    for (int i = 0; i < kVector; ++i) peak = x[i] > peak ? x[i] : peak;
  }
  const bool mine = whole / kVector % kLanes == threadIdx.x;  // the lane of the last, shorter vector
  if (mine)
    for (int i = whole; i < v; ++i) peak = widen(values[i]) > peak ? widen(values[i]) : peak;
#pragma unroll
  for (int distance = 16; distance; distance /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, distance));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = peak;
  __syncthreads();
  peak = scratch[0];
#pragma unroll
  for (int w = 1; w < kLanes / 32; ++w) peak = fmaxf(peak, scratch[w]);
  __syncthreads();
  float sum = 0.0f;
  for (int at = threadIdx.x * kVector; at < whole; at += kLanes * kVector) {
    float x[kVector];
    load(values + at, x);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum = sum + exponential(x[i] - peak);
  }
  if (mine)
    for (int i = whole; i < v; ++i) sum = sum + exponential(widen(values[i]) - peak);
  const float log_sum = logarithm(block_sum(sum, scratch));
  if (selected) {
    if (threadIdx.x == 0) {
      const long long i = index[row];
      selected[row] = i >= 0 && i < v ? widen(values[i]) - peak - log_sum : NAN;
      lse[row] = peak + log_sum;
    }
    return;
  }
  for (int i = threadIdx.x; i < v; i += kLanes) out[row * v + i] = widen(values[i]) - peak - log_sum;
}

extern "C" __global__ void __launch_bounds__(kLanes) log_softmax_bf16(const unsigned short* logits, float* out,
                                                                     const long long* index, float* selected, float* lse,
                                                                     int v, long long stride) {
  log_softmax(logits, out, index, selected, lse, v, stride);
}
extern "C" __global__ void __launch_bounds__(kLanes) log_softmax_fp32(const float* logits, float* out, const long long* index,
                                                                     float* selected, float* lse, int v, long long stride) {
  log_softmax(logits, out, index, selected, lse, v, stride);
}
