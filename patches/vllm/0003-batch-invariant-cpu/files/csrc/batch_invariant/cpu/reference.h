// The contract once more, plain and slow: what a kernel must compute, bit for bit. Scalars and loops, no vector type.
#pragma once

#include <stdlib.h>

#include "kernels.h"

namespace batch_invariant::reference {

inline float tree(const float* lanes) {
  float sums[kLanes];
  memcpy(sums, lanes, sizeof sums);
  for (int width = kLanes / 2; width; width /= 2)
    for (int l = 0; l < width; ++l) sums[l] = sums[l] + sums[l + width];
  return sums[0];
}

// 2^power for -126 <= power <= 127, exactly.
inline float power_of_two(int power) { return bit_cast<float>((power + 127) << 23); }

inline float exponential(float x) {
  if (x != x) return x;
  const float clamped = x < -110 ? -110 : x > 100 ? 100 : x;
  const float n = __builtin_roundevenf(clamped * 1.44269504088896341f);
  const float r = __builtin_fmaf(n, 2.12194440e-4f, __builtin_fmaf(n, -0.693359375f, clamped));
  float p = 0;
  const float factorials[] = {5040, 720, 120, 24, 6, 2, 1, 1};
  for (int i = 0; i < 8; ++i) p = i ? __builtin_fmaf(p, r, 1 / factorials[i]) : 1 / factorials[i];
  const int e = int(n), half = e >= 0 ? e / 2 : -((1 - e) / 2);
  return p * power_of_two(half) * power_of_two(e - half);
}

template <class T>
void linear(const T* x, const T* weight, const T* bias, T* out, int64_t m, int64_t n, int64_t k) {
  for (int64_t r = 0; r < m; ++r)
    for (int64_t c = 0; c < n; ++c) {
      float lanes[kLanes] = {};
      const int64_t filled = (k + kLanes - 1) / kLanes * kLanes;
      for (int64_t i = 0; i < filled; ++i) {
        const float a = i < k ? widen(x[r * k + i]) : 0, b = i < k ? widen(weight[c * k + i]) : 0;
        lanes[i % kLanes] = __builtin_fmaf(a, b, lanes[i % kLanes]);
      }
      narrow(out + r * n + c, bias ? tree(lanes) + widen(bias[c]) : tree(lanes));
    }
}

template <class T>
void rms_norm(const T* x, const T* weight, T* out, int64_t m, int64_t d, float epsilon) {
  for (int64_t r = 0; r < m; ++r) {
    float lanes[kLanes] = {};
    for (int64_t i = 0; i < d; ++i) {
      const float v = widen(x[r * d + i]);
      lanes[i % kLanes] = __builtin_fmaf(v, v, lanes[i % kLanes]);
    }
    const float scale = 1 / __builtin_sqrtf(tree(lanes) / float(d) + epsilon);
    for (int64_t i = 0; i < d; ++i) narrow(out + r * d + i, widen(x[r * d + i]) * scale * widen(weight[i]));
  }
}

template <class T>
void silu_and_mul(const T* x, T* out, int64_t m, int64_t d) {
  for (int64_t r = 0; r < m; ++r)
    for (int64_t i = 0; i < d; ++i) {
      const float gate = widen(x[2 * r * d + i]), up = widen(x[(2 * r + 1) * d + i]);
      narrow(out + r * d + i, gate / (1 + exponential(-gate)) * up);
    }
}

// One query row of one head at a time.
template <class T>
void attention(const AttentionArguments& a) {
  float* out = static_cast<float*>(malloc(a.head_size * sizeof(float)));
  for (int64_t request = 0; request < a.requests; ++request) {
    const int64_t start = a.query_start[request], tokens = a.query_start[request + 1] - start;
    for (int64_t token = 0; token < tokens; ++token)
      for (int64_t head = 0; head < a.heads; ++head) {
        const int64_t at = (start + token) * a.heads + head, kv_head = head / (a.heads / a.kv_heads);
        const int64_t seen = a.seq_lens[request] - tokens + token + 1;
        auto element = [&](const Cache& cache, int64_t j, int64_t i) {
          const int64_t page = a.block_table[request * a.table_width + j / a.block_size];
          return widen(static_cast<const T*>(
              cache.data)[page * cache.block + kv_head * cache.head + j % a.block_size * cache.slot + i]);
        };
        float peak = -__builtin_inff(), sum = 0;
        for (int64_t i = 0; i < a.head_size; ++i) out[i] = 0;
        for (int64_t base = 0; base < seen; base += kKeyBlock) {
          const int64_t used = seen - base < kKeyBlock ? seen - base : kKeyBlock;
          float p[kKeyBlock], lanes[kLanes] = {}, before = peak;
          for (int64_t j = 0; j < used; ++j) {
            float score = 0;
            for (int64_t i = 0; i < a.head_size; ++i)
              score = __builtin_fmaf(widen(static_cast<const T*>(a.query)[at * a.head_size + i]),
                                     element(a.key, base + j, i), score);
            p[j] = score * a.scale;
            if (p[j] > peak || p[j] != p[j]) peak = p[j];
          }
          for (int64_t j = 0; j < used; ++j) p[j] = exponential(p[j] - peak);
          for (int64_t j = 0; j < used; ++j) lanes[j % kLanes] = lanes[j % kLanes] + p[j];
          const float alpha = exponential(before - peak);
          sum = __builtin_fmaf(sum, alpha, tree(lanes));
          for (int64_t i = 0; i < a.head_size; ++i) {
            out[i] = out[i] * alpha;
            for (int64_t j = 0; j < used; ++j) out[i] = __builtin_fmaf(p[j], element(a.value, base + j, i), out[i]);
          }
        }
        for (int64_t i = 0; i < a.head_size; ++i)
          narrow(static_cast<T*>(a.out) + at * a.head_size + i, out[i] / sum);
        a.lse[at] = peak + log1(sum);
      }
  }
  free(out);
}

template <class T>
void log_softmax(const T* logits, float* out, int64_t m, int64_t v) {
  for (int64_t r = 0; r < m; ++r) {
    float peak = -__builtin_inff(), lanes[kLanes] = {};
    for (int64_t i = 0; i < v; ++i) peak = widen(logits[r * v + i]) > peak ? widen(logits[r * v + i]) : peak;
    for (int64_t i = 0; i < v; ++i)
      lanes[i % kLanes] = lanes[i % kLanes] + exponential(widen(logits[r * v + i]) - peak);
    const float logarithm = log1(tree(lanes));
    for (int64_t i = 0; i < v; ++i) out[r * v + i] = widen(logits[r * v + i]) - peak - logarithm;
  }
}

}  // namespace batch_invariant::reference
