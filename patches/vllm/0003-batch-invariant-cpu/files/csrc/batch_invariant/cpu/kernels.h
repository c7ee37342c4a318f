// The kernels behind the operators, on plain pointers: a table for each instruction set, the same bits in each.
#pragma once

#include <stdint.h>

#include "vectors.h"

namespace batch_invariant {

// Calls `body(context, begin, end)` over pieces of [0, count) on the threads at hand, and returns when all are done.
using Body = void (*)(const void* context, int64_t begin, int64_t end);
using Parallel = void (*)(int64_t count, int64_t grain, Body body, const void* context);

// Keys of one step of the attention, part of the contract.
constexpr int kKeyBlock = 64;

// A paged cache of [blocks, kv heads, block size, head size], by strides in elements.
struct Cache {
  const void* data;
  int64_t block, head, slot;
};

struct AttentionArguments {
  const void* query;        // [tokens, heads, head_size], contiguous
  Cache key, value;
  const int32_t* block_table;  // [requests, table_width]
  int64_t table_width;
  const int32_t* query_start;  // [requests + 1]
  const int32_t* seq_lens;     // [requests]
  int64_t requests, heads, kv_heads, head_size, block_size;
  float scale;
  void* out;   // [tokens, heads, head_size]
  float* lse;  // [tokens, heads]
};

template <class T>
struct Kernels {
  // out [m, n] = x [m, k] times weight [n, k] transposed, plus bias [n] where it is not null.
  void (*linear)(Parallel, const T* x, const T* weight, const T* bias, T* out, int64_t m, int64_t n, int64_t k);
  // sum [m, d] = x + residual where residual is not null; out = norm of it (or of x) times weight [d].
  void (*rms_norm)(Parallel, const T* x, const T* residual, const T* weight, T* out, T* sum, int64_t m, int64_t d,
                   float epsilon);
  void (*silu_and_mul)(Parallel, const T* x, T* out, int64_t m, int64_t d);
  // One of query and key: x, out [m, heads, head_size]; table [m, head_size], a token's cosines, then its sines.
  void (*rotary)(Parallel, const T* x, const float* table, T* out, int64_t m, int64_t heads, int64_t head_size);
  void (*attention)(Parallel, const AttentionArguments&);
  // out [m, v] where it is not null; selected [m] at index [m] and lse [m] where they are not null.
  void (*log_softmax)(Parallel, const T* logits, float* out, const int64_t* index, float* selected, float* lse,
                      int64_t m, int64_t v);
};

struct KernelTable {
  const char* instruction_set;
  Kernels<float> f32;
  Kernels<bf16> b16;
};

extern const KernelTable kernels_v3;  // AVX2 and FMA
extern const KernelTable kernels_v4;  // AVX-512 F, BW, CD, DQ, VL

}  // namespace batch_invariant
