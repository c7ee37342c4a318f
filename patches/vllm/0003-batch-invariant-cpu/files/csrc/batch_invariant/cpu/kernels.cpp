// The kernels, compiled once for each instruction set (TABLE names the result, WIDTH is a register's lanes).
//
// A sum over K has 16 partial sums, lane l taking k = l, l + 16, ... in order by fused multiply-adds, and one tree over
// the lanes; K is filled up with zeros. A row's bits depend on the row alone: not on its neighbours, the threads, or the
// tile that it fell into.

#include "kernels.h"

#include <stdlib.h>

namespace batch_invariant {
namespace {

#if WIDTH == 16
using Wide = f32x16;
constexpr int kTileRows = 6, kTileColumns = 4;
#else
using Wide = f32x8;
constexpr int kTileRows = 4, kTileColumns = 3;
#endif
constexpr int kStreams = 4;  // weight rows read side by side where rows are few

template <class F>
void run(Parallel parallel, int64_t count, int64_t grain, const F& f) {
  if (count <= 0) return;
  parallel(count, grain, [](const void* c, int64_t b, int64_t e) { (*static_cast<const F*>(c))(b, e); }, &f);
}

// Scratch of one call or one thread.
struct Scratch {
  float* data;
  explicit Scratch(int64_t floats)
      : data(static_cast<float*>(aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64 + 64))) {}
  ~Scratch() { free(data); }
  Scratch(const Scratch&) = delete;
};

constexpr int64_t padded(int64_t k) { return (k + kLanes - 1) / kLanes * kLanes; }

template <class T>
void widen_row(const T* from, float* to, int64_t k) {
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) store16(to + i, load16(from + i));
  if (i < k) store16(to + i, load16(from + i, k - i));
}

// The 16 lanes of a sum that was made in one register or in two.
INLINE f32x16 join(const Wide* parts) {
#if WIDTH == 16
  return parts[0];
#else
  f32x16 v;
  v.lo = parts[0];
  v.hi = parts[1];
  return v;
#endif
}

// sums[r][c] = row r of x times row c of w, both in fp32 and filled up to kp.
template <int R, int C>
INLINE void tile(const float* x, const float* w, int64_t kp, float sums[R][C]) {
  constexpr int kHalves = kLanes / WIDTH;
  Wide parts[R][C][kHalves];
  for (int h = 0; h < kHalves; ++h) {
    Wide acc[R][C] = {};
    for (int64_t k = h * WIDTH; k < kp; k += kLanes) {
      Wide b[C];
#pragma unroll
      for (int c = 0; c < C; ++c) load(b[c], w + c * kp + k);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        Wide a;
        load(a, x + r * kp + k);
#pragma unroll
        for (int c = 0; c < C; ++c) acc[r][c] = fma(a, b[c], acc[r][c]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) parts[r][c][h] = acc[r][c];
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sums[r][c] = tree_sum(join(parts[r][c]));
}

// The same for C rows of weights as they lie in memory, and one row of x.
template <class T, int C>
INLINE void stream(const float* x, const T* w, int64_t k, float sums[C]) {
  f32x16 acc[C] = {};
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    f32x16 a = load16(x + i);
#pragma unroll
    for (int c = 0; c < C; ++c) acc[c] = fma(a, load16(w + c * k + i), acc[c]);
  }
  if (i < k) {
    f32x16 a = load16(x + i);
    for (int c = 0; c < C; ++c) acc[c] = fma(a, load16(w + c * k + i, k - i), acc[c]);
  }
  for (int c = 0; c < C; ++c) sums[c] = tree_sum(acc[c]);
}

template <class T>
void linear(Parallel parallel, const T* x, const T* weight, const T* bias, T* out, int64_t m, int64_t n, int64_t k) {
  const int64_t kp = padded(k);
  auto put = [&](int64_t row, int64_t column, float sum) {
    narrow(out + row * n + column, bias ? sum + widen(bias[column]) : sum);
  };
  // As many rows of x at a time as stay in a second-level cache.
  int64_t block = (384 * 1024 / 4) / (kp ? kp : 1) / kTileRows * kTileRows;
  block = block < kTileRows ? kTileRows : block > 128 ? 128 / kTileRows * kTileRows : block;
  if (block > m) block = m;
  Scratch rows(block * kp);
  for (int64_t first = 0; first < m; first += block) {
    const int64_t count = m - first < block ? m - first : block;
    run(parallel, count, 16, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) widen_row(x + (first + r) * k, rows.data + r * kp, k);
    });
    if (count < kTileRows - 1) {
      run(parallel, (n + kStreams - 1) / kStreams, 16, [&](int64_t begin, int64_t end) {
        for (int64_t s = begin; s < end; ++s) {
          const int64_t column = s * kStreams, columns = n - column < kStreams ? n - column : kStreams;
          for (int64_t r = 0; r < count; ++r) {
            float sums[kStreams];
            if (columns == kStreams) {
              stream<T, kStreams>(rows.data + r * kp, weight + column * k, k, sums);
            } else {
              for (int64_t c = 0; c < columns; ++c)
                stream<T, 1>(rows.data + r * kp, weight + (column + c) * k, k, sums + c);
            }
            for (int64_t c = 0; c < columns; ++c) put(first + r, column + c, sums[c]);
          }
        }
      });
      continue;
    }
    run(parallel, (n + kTileColumns - 1) / kTileColumns, 8, [&](int64_t begin, int64_t end) {
      Scratch columns(kTileColumns * kp);
      for (int64_t t = begin; t < end; ++t) {
        const int64_t column = t * kTileColumns, width = n - column < kTileColumns ? n - column : kTileColumns;
        for (int64_t c = 0; c < kTileColumns; ++c)  // past the last one, once more the last
          widen_row(weight + (c < width ? column + c : n - 1) * k, columns.data + c * kp, k);
        int64_t r = 0;
        for (; r + kTileRows <= count; r += kTileRows) {
          float sums[kTileRows][kTileColumns];
          tile<kTileRows, kTileColumns>(rows.data + r * kp, columns.data, kp, sums);
          for (int64_t i = 0; i < kTileRows; ++i)
            for (int64_t c = 0; c < width; ++c) put(first + r + i, column + c, sums[i][c]);
        }
        for (; r < count; ++r) {
          float sums[1][kTileColumns];
          tile<1, kTileColumns>(rows.data + r * kp, columns.data, kp, sums);
          for (int64_t c = 0; c < width; ++c) put(first + r, column + c, sums[0][c]);
        }
      }
    });
  }
}

template <class T>
void rms_norm(Parallel parallel, const T* x, const T* residual, const T* weight, T* out, T* sum, int64_t m, int64_t d,
              float epsilon) {
  run(parallel, m, 1 + 8192 / (d + 1), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* row = x + r * d;
      if (residual) {
        for (int64_t i = 0; i < d; i += kLanes)
          store16(sum + r * d + i, load16(row + i, d - i) + load16(residual + r * d + i, d - i), d - i);
        row = sum + r * d;
      }
      f32x16 squares = 0;
      for (int64_t i = 0; i < d; i += kLanes) {
        f32x16 v = load16(row + i, d - i);
        squares = fma(v, v, squares);
      }
      const float scale = 1.0f / __builtin_sqrtf(tree_sum(squares) / float(d) + epsilon);
      for (int64_t i = 0; i < d; i += kLanes)
        store16(out + r * d + i, load16(row + i, d - i) * scale * load16(weight + i, d - i), d - i);
    }
  });
}

template <class T>
void silu_and_mul(Parallel parallel, const T* x, T* out, int64_t m, int64_t d) {
  run(parallel, m, 1 + 4096 / (d + 1), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t i = 0; i < d; i += kLanes) {
        f32x16 gate = load16(x + 2 * r * d + i, d - i), up = load16(x + (2 * r + 1) * d + i, d - i);
        store16(out + r * d + i, gate / (1.0f + exp16(-gate)) * up, d - i);
      }
  });
}

template <class T>
void rotary(Parallel parallel, const T* x, const float* table, T* out, int64_t m, int64_t heads, int64_t head_size) {
  const int64_t half = head_size / 2;
  run(parallel, m, 1 + 4096 / (heads * head_size + 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* cosines = table + t * head_size;
      for (int64_t h = 0; h < heads; ++h) {
        const T* from = x + (t * heads + h) * head_size;
        T* to = out + (t * heads + h) * head_size;
        for (int64_t i = 0; i < half; i += kLanes) {
          const int64_t left = half - i;
          f32x16 a = load16(from + i, left), b = load16(from + half + i, left);
          f32x16 c = load16(cosines + i, left), s = load16(cosines + half + i, left);
          store16(to + i, fma(a, c, -(b * s)), left);
          store16(to + half + i, fma(b, c, a * s), left);
        }
      }
    }
  });
}

// A tile of queries against a request's keys. Scores: one fma after another over the head's dimensions. Then, block
// after block of 64 keys: the maximum, exp, the sum (16 lanes, a tree), and out = out * alpha + p V, key after key.
constexpr int64_t kQueryTile = 16;

template <class T>
void attend(const AttentionArguments& a, int64_t request, int64_t kv_head, int64_t first, int64_t last, float* scratch) {
  const int64_t d = a.head_size, dp = padded(d), group = a.heads / a.kv_heads;
  const int64_t new_tokens = a.query_start[request + 1] - a.query_start[request];
  const int64_t before = a.seq_lens[request] - new_tokens;  // keys that came with earlier calls
  const int32_t* table = a.block_table + request * a.table_width;
  const int64_t rows = (last - first) * group;
  float* keys = scratch;                   // [d][64]
  float* values = keys + dp * kKeyBlock;   // [64][dp]
  float* outs = values + dp * kKeyBlock;   // [rows][dp]
  float* peaks = outs + rows * dp;         // [rows]
  float* sums = peaks + rows;              // [rows]
  for (int64_t i = 0; i < rows * dp; ++i) outs[i] = 0;
  for (int64_t i = 0; i < rows; ++i) {
    peaks[i] = -__builtin_inff();
    sums[i] = 0;
  }
  const T* query = static_cast<const T*>(a.query);
  const int64_t limit = before + last;  // keys that the tile's last query sees
  for (int64_t base = 0; base < limit; base += kKeyBlock) {
    const int64_t count = limit - base < kKeyBlock ? limit - base : kKeyBlock;
    for (int64_t j = 0; j < kKeyBlock; ++j) {
      if (j >= count) {
        for (int64_t i = 0; i < d; ++i) keys[i * kKeyBlock + j] = 0;
        continue;
      }
      const int64_t page = table[(base + j) / a.block_size], slot = (base + j) % a.block_size;
      const T* k = static_cast<const T*>(a.key.data) + page * a.key.block + kv_head * a.key.head + slot * a.key.slot;
      const T* v =
          static_cast<const T*>(a.value.data) + page * a.value.block + kv_head * a.value.head + slot * a.value.slot;
      for (int64_t i = 0; i < d; ++i) keys[i * kKeyBlock + j] = widen(k[i]);
      widen_row(v, values + j * dp, d);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t token = first + r / group;
      const int64_t seen = before + token + 1 - base;  // keys of this block that the row sees
      if (seen <= 0) continue;
      const int64_t used = seen < kKeyBlock ? seen : kKeyBlock;
      const T* q = query + ((a.query_start[request] + token) * a.heads + kv_head * group + r % group) * d;
      f32x16 scores[4] = {};
      for (int64_t i = 0; i < d; ++i) {
        const f32x16 x = widen(q[i]);
#pragma unroll
        for (int s = 0; s < 4; ++s) scores[s] = fma(x, load16(keys + i * kKeyBlock + s * kLanes), scores[s]);
      }
      float p[kKeyBlock];
      float peak = peaks[r];
      for (int s = 0; s < 4; ++s) store16(p + s * kLanes, scores[s] * a.scale);
      for (int64_t j = 0; j < kKeyBlock; ++j) p[j] = j < used ? p[j] : -__builtin_inff();
      for (int64_t j = 0; j < used; ++j) peak = p[j] > peak || p[j] != p[j] ? p[j] : peak;
      f32x16 total = 0;
      for (int s = 0; s < 4; ++s) {
        f32x16 e = exp16(load16(p + s * kLanes) - peak);
        total += e;
        store16(p + s * kLanes, e);
      }
      const float alpha = exp1(peaks[r] - peak);
      sums[r] = fma(sums[r], alpha, tree_sum(total));
      peaks[r] = peak;
      float* o = outs + r * dp;
      for (int64_t i = 0; i < dp; i += 4 * kLanes) {
        const int64_t left = (dp - i) / kLanes;
        if (left >= 4) {
          f32x16 acc[4];
          for (int s = 0; s < 4; ++s) acc[s] = load16(o + i + s * kLanes) * alpha;
          for (int64_t j = 0; j < used; ++j) {
            const f32x16 x = p[j];
#pragma unroll
            for (int s = 0; s < 4; ++s) acc[s] = fma(x, load16(values + j * dp + i + s * kLanes), acc[s]);
          }
          for (int s = 0; s < 4; ++s) store16(o + i + s * kLanes, acc[s]);
        } else {
          for (int64_t s = 0; s < left; ++s) {
            f32x16 acc = load16(o + i + s * kLanes) * alpha;
            for (int64_t j = 0; j < used; ++j)
              acc = fma(f32x16(p[j]), load16(values + j * dp + i + s * kLanes), acc);
            store16(o + i + s * kLanes, acc);
          }
        }
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = (a.query_start[request] + first + r / group) * a.heads + kv_head * group + r % group;
    for (int64_t i = 0; i < d; i += kLanes)
      store16(static_cast<T*>(a.out) + at * d + i, load16(outs + r * dp + i) / sums[r], d - i);
    a.lse[at] = peaks[r] + log1(sums[r]);
  }
}

template <class T>
void attention(Parallel parallel, const AttentionArguments& a) {
  // Tasks: a tile of queries of one request and one head of keys; `starts` counts the tiles of the requests before.
  int64_t* starts = static_cast<int64_t*>(malloc((a.requests + 1) * sizeof(int64_t)));
  starts[0] = 0;
  for (int64_t r = 0; r < a.requests; ++r)
    starts[r + 1] = starts[r] + (a.query_start[r + 1] - a.query_start[r] + kQueryTile - 1) / kQueryTile;
  const int64_t rows = kQueryTile * (a.heads / a.kv_heads), dp = padded(a.head_size);
  run(parallel, starts[a.requests] * a.kv_heads, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch(2 * dp * kKeyBlock + rows * (dp + 2));
    for (int64_t task = begin; task < end; ++task) {
      const int64_t tile_index = task / a.kv_heads;
      int64_t low = 0, high = a.requests;  // starts[low] <= tile_index < starts[high]
      while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (starts[middle] <= tile_index ? low : high) = middle;
      }
      const int64_t first = (tile_index - starts[low]) * kQueryTile;
      const int64_t tokens = a.query_start[low + 1] - a.query_start[low];
      attend<T>(a, low, task % a.kv_heads, first, first + kQueryTile < tokens ? first + kQueryTile : tokens,
                scratch.data);
    }
  });
  free(starts);
}

template <class T>
void log_softmax(Parallel parallel, const T* logits, float* out, const int64_t* index, float* selected, float* lse,
                 int64_t m, int64_t v) {
  run(parallel, m, 1 + 8192 / (v + 1), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* row = logits + r * v;
      const f32x16 low = -__builtin_inff();
      auto part = [&](int64_t i) {
        if (v - i >= kLanes) return load16(row + i);
        f32x16 x = load16(row + i, v - i);
        for (int64_t l = v - i; l < kLanes; ++l) x[l] = -__builtin_inff();
        return x;
      };
      f32x16 peaks = low;
      for (int64_t i = 0; i < v; i += kLanes) {
        f32x16 x = part(i);
        peaks = x > peaks ? x : peaks;
      }
      const float peak = max_of(peaks);
      f32x16 sums = 0;
      for (int64_t i = 0; i < v; i += kLanes) sums += exp16(part(i) - peak);
      const float logarithm = log1(tree_sum(sums));
      if (out)
        for (int64_t i = 0; i < v; i += kLanes)
          store16(out + r * v + i, load16(row + i, v - i) - peak - logarithm, v - i);
      if (selected) selected[r] = widen(row[index[r]]) - peak - logarithm;
      if (lse) lse[r] = peak + logarithm;
    }
  });
}

template <class T>
constexpr Kernels<T> all() {
  return {linear<T>, rms_norm<T>, silu_and_mul<T>, rotary<T>, attention<T>, log_softmax<T>};
}

}  // namespace

extern const KernelTable TABLE;
const KernelTable TABLE = {WIDTH == 16 ? "x86-64-v4" : "x86-64-v3", all<float>(), all<bf16>()};

}  // namespace batch_invariant
