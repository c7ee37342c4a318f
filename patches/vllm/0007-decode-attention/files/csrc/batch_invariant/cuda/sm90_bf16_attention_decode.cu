// Attention of one new token a request over a paged cache, bf16, heads of 128: FlashAttention 3's bits, made in parallel.
//
// FlashAttention 3 without splits takes the keys in blocks of 128, from the last block to the first, one after the other:
// at few requests most of the card waits. But only two things in it are chains. The maximum is exact in any order, so all
// scores are made at once, with the maximum of each block (`attention_scores`). The other chain, of the outputs, runs over
// keys and not over the head's 128 values, so 8 warps on 4 processors carry it, each for 16 values (`attention_values`).
// Every operation that rounds is the one that FlashAttention 3 makes, in its order:
//
//   score     = chain over the head of k16 steps of the tensor core
//   p         = ex2(fma(score, scale, -(m * scale)))          m: the maximum so far, scale: softmax scale * log2(e)
//   shrink    = ex2((m before - m) * scale)
//   sum[c]    = fma(sum[c], shrink, p0) + p1 + p2 ...         four sums a row: c holds keys 8 i + 2 c and 8 i + 2 c + 1
//   out       = out * shrink + chain of k16 steps of bf16(p) by value
//   out       = bf16(out * rcp((sum[0] + sum[2]) + (sum[1] + sum[3])))
//
// Subnormal fp32 results are zero throughout, as there. The new token's key and value come from their own tensors and are
// written into the cache on the way; all else is in the cache since an earlier step and is asked for before the kernel
// ahead has ended.
#include "sm90.h"

enum : int { kHead = 128, kKeys = 128, kMostGroup = 8, kSlice = 32, kStages = 8, kScorePitch = kKeys + 8 };
enum : int { kAdder = 2, kWeigher = 3, kLoader = 7, kWarps = 11 };  // the first warp of each kind in `attention_values`
static_assert(kStages % 2 == 0 && kStages >= 4, "blocks are taken in pairs, and asked for two pairs before");
enum : uint32_t { kTile = kKeys * kHead * 2, kHalfTile = kTile / 2, kValueTile = kKeys * kSlice * 2 };

struct Arguments {
  const unsigned short *query, *key, *value;  // [requests, heads * 128], rows apart by their strides
  unsigned short *key_cache, *value_cache;    // [pages, page, kv heads, 128] by strides, and as tensor maps
  const int *pages, *lengths;                 // [requests, table_stride], [requests]
  const long long* slots;                     // [requests]: where the new token goes, page * tokens of a page + token; or < 0
  float *scores, *peaks;                      // [requests, kv heads, most_blocks, group, 136]; [.., group, most_blocks]
  unsigned short* out;                        // [requests, heads * 128]
  long long query_stride, key_stride, value_stride, out_stride, page_stride, token_stride, head_stride, table_stride;
  int group, kv_heads, page_shift, most_blocks;  // pages of 2^page_shift tokens, 16 or more
  float scale;
};

__device__ __forceinline__ float flush_multiply(float a, float b) {
  float x;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}
__device__ __forceinline__ float flush_add(float a, float b) {
  float x;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}
__device__ __forceinline__ float flush_fma(float a, float b, float c) {
  float x;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(x) : "f"(a), "f"(b), "f"(c));
  return x;
}
__device__ __forceinline__ float power_of_two(float a) {
  float x;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(a));
  return x;
}
__device__ __forceinline__ float reciprocal(float a) {
  float x;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(a));
  return x;
}
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t two;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
}

// 16 tokens of a page, some of a head's values: a box of a tensor map of (values, tokens of a page, kv heads, pages).
__device__ __forceinline__ void load_tokens(uint32_t to, const TensorMap& map, int value, int token, int head, int page,
                                            uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(&map), "r"(value), "r"(token), "r"(head), "r"(page), "r"(shared_address(barrier)), "l"(uint64_t(kEvictFirst))
      : "memory");
}
__device__ __forceinline__ void load_bytes(uint32_t to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
// What was stored into shared memory comes before later copies into it.
__device__ __forceinline__ void stores_before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t (&a)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address));
}
__device__ __forceinline__ void load_transposed(uint32_t address, uint32_t (&a)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address));
}
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

struct alignas(16) Chunk {
  uint32_t words[4];
};

// Rows of 128 bytes of keys (two halves, one behind the other) and of 64 bytes of values, swizzled as the copies do it.
__device__ __forceinline__ uint32_t key_offset(int row, int part) {
  return part / 8 * kHalfTile + row * 128 + (part % 8 ^ (row & 7)) * 16;
}
__device__ __forceinline__ uint32_t value_offset(int row, int part) { return row * 64 + (part ^ (row >> 1 & 3)) * 16; }

__device__ __forceinline__ void read_pages(int* to, const int* table, int first, int last, int threads) {
  for (int i = first + threadIdx.x; i <= last; i += threads) to[i - first] = table[i];
}

// Scores of one query group against blocks of 128 keys, and each block's maximum. Grid (ranges of blocks, kv heads, requests).
extern "C" __global__ void __launch_bounds__(128) attention_scores(const __grid_constant__ TensorMap keys,
                                                                  const __grid_constant__ TensorMap,
                                                                  const __grid_constant__ Arguments a) {
  extern __shared__ unsigned char unaligned[];
  unsigned char* shared = unaligned + (-shared_address(unaligned) & 1023);  // swizzles are of 1024 bytes
  __shared__ float warp_peaks[2][4][kMostGroup];
  __shared__ uint64_t full[2];
  dependents_may_start();
  const int request = blockIdx.z, kv_head = blockIdx.y, warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int length = a.lengths[request], blocks = (length + kKeys - 1) / kKeys;
  const int each = (blocks + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * each;
  const int end = begin + each < blocks ? begin + each : blocks;
  if (begin >= end) {
    wait_for_dependencies();
    return;
  }
  const uint32_t base = shared_address(shared);
  int* pages = reinterpret_cast<int*>(shared + 2 * kTile);
  const int in_page = (1 << a.page_shift) - 1, first_page = begin * kKeys >> a.page_shift;
  const int last_key = (end * kKeys < length ? end * kKeys : length) - 1;
  read_pages(pages, a.pages + request * a.table_stride, first_page, last_key >> a.page_shift, 128);
  if (threadIdx.x == 0) {
    barrier_init(&full[0], 1), barrier_init(&full[1], 1);
    barrier_init_fence();
  }
  __syncthreads();

  // Each warp asks for a quarter of a block: 32 keys, two times 16 on one page.
  auto ask = [&](int block) {
    if (block >= end) return;
    const int left = length - block * kKeys, sixteens = left < kKeys ? (left + 15) / 16 : kKeys / 16;
    const int stage = (block - begin) % 2, mine = block * kKeys + (2 * warp + lane % 2) * 16;
    const int my_page = mine < length ? pages[(mine >> a.page_shift) - first_page] : 0;
    if (warp == 0 && elected()) barrier_expect(&full[stage], sixteens * 16 * kHead * 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int part = 2 * warp + i, token = block * kKeys + part * 16 & in_page, page = __shfl_sync(~0u, my_page, i);
      if (part < sixteens && elected()) {
        load_tokens(base + stage * kTile + part * 2048, keys, 0, token, kv_head, page, &full[stage]);
        load_tokens(base + stage * kTile + kHalfTile + part * 2048, keys, 64, token, kv_head, page, &full[stage]);
      }
    }
  };
  ask(begin);
  ask(begin + 1);
  wait_for_dependencies();

  const long long pair = request * a.kv_heads + kv_head;
  uint32_t q[8][2];
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const unsigned short* from =
        a.query + request * a.query_stride + (kv_head * a.group + lane / 4) * kHead + step * 16 + lane % 4 * 2;
    const bool there = lane / 4 < a.group;
    q[step][0] = there ? *reinterpret_cast<const uint32_t*>(from) : 0;
    q[step][1] = there ? *reinterpret_cast<const uint32_t*>(from + 8) : 0;
  }

  for (int block = begin; block < end; ++block) {
    const int stage = (block - begin) % 2;
    const uint32_t tile = stage * kTile;
    barrier_wait(&full[stage], (block - begin) / 2 % 2);
    if (block == blocks - 1) {  // the new token: into the cache, and its key into the block
      if (threadIdx.x < 16) {
        const int part = threadIdx.x;
        const long long slot = a.slots[request];
        const long long to =
            (slot >> a.page_shift) * a.page_stride + (slot & in_page) * a.token_stride + kv_head * a.head_stride + part * 8;
        const Chunk key = *reinterpret_cast<const Chunk*>(a.key + request * a.key_stride + kv_head * kHead + part * 8);
        const Chunk value = *reinterpret_cast<const Chunk*>(a.value + request * a.value_stride + kv_head * kHead + part * 8);
        if (slot >= 0) {
          *reinterpret_cast<Chunk*>(a.key_cache + to) = key;
          *reinterpret_cast<Chunk*>(a.value_cache + to) = value;
        }
        *reinterpret_cast<Chunk*>(shared + tile + key_offset((length - 1) % kKeys, part)) = key;
      }
      __syncthreads();
    }
    float d[2][4] = {};
#pragma unroll
    for (int step = 0; step < 8; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t k[4];
        load_matrices(base + tile + key_offset(warp * 32 + half * 16 + lane % 16, 2 * step + lane / 16), k);
        multiply(d[half], k, q[step][0], q[step][1]);
      }
    float peak[2] = {__int_as_float(0xFF800000), __int_as_float(0xFF800000)};
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = warp * 32 + half * 16 + i / 2 * 8 + lane / 4, head = lane % 4 * 2 + i % 2;
        const float score = block * kKeys + row < length ? d[half][i] : __int_as_float(0xFF800000);
        if (head < a.group) a.scores[((pair * a.most_blocks + block) * a.group + head) * kScorePitch + row] = score;
        peak[i % 2] = fmaxf(peak[i % 2], score);
      }
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
#pragma unroll
      for (int i = 0; i < 2; ++i) peak[i] = fmaxf(peak[i], __shfl_xor_sync(~0u, peak[i], distance));
    if (lane < 4) warp_peaks[stage][warp][2 * lane] = peak[0], warp_peaks[stage][warp][2 * lane + 1] = peak[1];
    __syncthreads();  // and the keys have been read
    ask(block + 2);
    if (threadIdx.x < a.group) {
      float most = warp_peaks[stage][0][threadIdx.x];
#pragma unroll
      for (int w = 1; w < 4; ++w) most = fmaxf(most, warp_peaks[stage][w][threadIdx.x]);
      a.peaks[(pair * a.group + threadIdx.x) * a.most_blocks + block] = most;
    }
  }
}

// Half a block for `attention_values`: 64 keys by 16 values, and p of 64 keys and 8 queries.
struct Half {
  uint32_t v[4][4];
  Chunk p[2];
  __device__ __forceinline__ void load(uint32_t values, const unsigned char* weights) {
#pragma unroll
    for (int step = 0; step < 4; ++step) load_transposed(values + step * 1024, v[step]);
#pragma unroll
    for (int r = 0; r < 2; ++r) p[r] = *reinterpret_cast<const Chunk*>(weights + r * 512);
  }
  __device__ __forceinline__ void add_to(float (&out)[4]) const {
#pragma unroll
    for (int step = 0; step < 4; ++step)
      multiply(out, v[step], p[step / 2].words[step % 2 * 2], p[step / 2].words[step % 2 * 2 + 1]);
  }
};

// 32 of the 128 values of a query group's outputs. Grid (4 slices, kv heads, requests). Warps at work on pairs of blocks of
// keys, in step: two carry the outputs of a pair, 16 values each; one adds the sums of the next pair and asks for scores; four make
// the p of the pair after that; four ask for values. Lane 4 q + c holds what belongs to query q and sum c.
extern "C" __global__ void __launch_bounds__(kWarps * 32, 2) attention_values(const __grid_constant__ TensorMap,
                                                                  const __grid_constant__ TensorMap values,
                                                                  const __grid_constant__ Arguments a) {
  extern __shared__ unsigned char unaligned[];
  unsigned char* shared = unaligned + (-shared_address(unaligned) & 1023);  // swizzles are of 1024 bytes
  __shared__ __align__(16) unsigned char packed[3][2][2048];  // p in bf16, of three pairs: 16 bytes for 4 x 32 lanes
  __shared__ __align__(16) unsigned char exact[2][2][4096];   // p in fp32, of two pairs: 16 bytes for 8 x 32 lanes
  __shared__ __align__(16) float shrinks[3][2][kMostGroup], inverses[kMostGroup];
  __shared__ uint64_t full_values[kStages], full_scores[kStages];
  dependents_may_start();
  const int request = blockIdx.z, kv_head = blockIdx.y, warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int length = a.lengths[request], blocks = (length + kKeys - 1) / kKeys, newest = (length - 1) % kKeys;
  const uint32_t base = shared_address(shared), score_bytes = a.group * kScorePitch * 4;
  unsigned char* score_tiles = shared + kStages * kValueTile;
  float* peaks = reinterpret_cast<float*>(score_tiles + kStages * score_bytes);  // [group, blocks], the largest score so far
  int* pages = reinterpret_cast<int*>(peaks + a.group * blocks);
  if (length) read_pages(pages, a.pages + request * a.table_stride, 0, (length - 1) >> a.page_shift, kWarps * 32);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(&full_values[i], 1), barrier_init(&full_scores[i], 1);
    barrier_init_fence();
  }
  __syncthreads();

  // Blocks in the order in which they are taken: number i is block blocks - 1 - i. A loader asks for a quarter of its values,
  // two times 16 keys.
  const long long pair = request * a.kv_heads + kv_head;
  const int loader = warp - kLoader, in_page = (1 << a.page_shift) - 1;
  auto ask_values = [&](int i) {
    if (i >= blocks) return;
    uint64_t* barrier = &full_values[i % kStages];
    const int sixteens = i ? kKeys / 16 : newest / 16 + 1, first = (blocks - 1 - i) * kKeys;
    const int mine = first + (2 * loader + lane % 2) * 16, my_page = mine < length ? pages[mine >> a.page_shift] : 0;
    if (loader == 0 && elected()) barrier_expect(barrier, sixteens * 16 * kSlice * 2);
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const int part = 2 * loader + g, page = __shfl_sync(~0u, my_page, g);
      if (part < sixteens && elected())
        load_tokens(base + i % kStages * kValueTile + part * 1024, values, blockIdx.x * kSlice, first + part * 16 & in_page,
                    kv_head, page, barrier);
    }
  };
  auto ask_scores = [&](int i) {
    if (i < blocks && elected()) {
      barrier_expect(&full_scores[i % kStages], score_bytes);
      load_bytes(shared_address(score_tiles) + i % kStages * score_bytes,
                 a.scores + (pair * a.most_blocks + blocks - 1 - i) * a.group * kScorePitch, score_bytes,
                 &full_scores[i % kStages]);
    }
  };
  if (loader >= 0)
    for (int i = 0; i < kStages; ++i) ask_values(i);
  wait_for_dependencies();
  if (warp == kAdder)
    for (int i = 0; i < kStages; ++i) ask_scores(i);
  if (loader >= 0) {
    if (blocks && loader == 0) {  // the new token's value comes from its own tensor, and there is nothing behind it
      barrier_wait(&full_values[0], 0);
      for (int row = newest + lane / 4; row < kKeys; row += 8) {
        Chunk chunk = {};
        if (row == newest)
          chunk = *reinterpret_cast<const Chunk*>(a.value + request * a.value_stride + kv_head * kHead + blockIdx.x * kSlice +
                                                  lane % 4 * 8);
        *reinterpret_cast<Chunk*>(shared + value_offset(row, lane % 4)) = chunk;
      }
      stores_before_copies();
    }
  } else {
    for (int q = warp; q < a.group; q += kLoader) {
      float so_far = __int_as_float(0xFF800000);
      for (int first = 0; first < blocks; first += 32) {
        const int i = first + lane;
        float peak = i < blocks ? a.peaks[(pair * a.group + q) * a.most_blocks + blocks - 1 - i] : so_far;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
          const float other = __shfl_up_sync(~0u, peak, distance);
          if (lane >= distance) peak = fmaxf(peak, other);
        }
        peak = fmaxf(peak, so_far);
        so_far = __shfl_sync(~0u, peak, 31);
        if (i < blocks) peaks[q * blocks + i] = peak;
      }
    }
  }
  __syncthreads();

  // Lanes without a query do a query's work; their p is 0.
  const int query = lane / 4 < a.group ? lane / 4 : 0, mine = lane % 4;
  const float* my_peaks = peaks + query * blocks;
  const float none = __int_as_float(0xFF800000), extinct = lane / 4 < a.group ? 0.0f : none;
  const unsigned char* my_scores = score_tiles + (query * kScorePitch + mine * 2) * 4;
  const int which = (warp - kWeigher) / 2, half = (warp - kWeigher) % 2;  // what a weigher does of a pair
  auto weigh = [&](int n) {
    const int i = 2 * n + which;
    if (i >= blocks) return;
    const float most = my_peaks[i];
    const float shrink = i ? power_of_two(flush_multiply(flush_add(my_peaks[i - 1], -most), a.scale)) : 1.0f;
    const float offset = extinct - (i == 0 && most == none ? 0.0f : flush_multiply(most, a.scale));
    const unsigned char* scores = my_scores + i % kStages * score_bytes + half * 256;
    unsigned char* to_packed = packed[n % 3][which] + (half * 64 + lane) * 16;
    unsigned char* to_exact = exact[n % 2][which] + (half * 128 + lane) * 16;
    if (mine == 0 && half == 0) shrinks[n % 3][which][lane / 4] = shrink;
    barrier_wait(&full_scores[i % kStages], i / kStages % 2);
    float p[16];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 two = *reinterpret_cast<const float2*>(scores + j * 32);
      p[2 * j] = two.x, p[2 * j + 1] = two.y;
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) p[j] = power_of_two(flush_fma(p[j], a.scale, offset));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* of = p + 8 * r;
      *reinterpret_cast<Chunk*>(to_packed + r * 512) = {pack(of[0], of[1]), pack(of[2], of[3]), pack(of[4], of[5]),
                                                        pack(of[6], of[7])};
      *reinterpret_cast<float4*>(to_exact + 2 * r * 512) = {of[0], of[1], of[2], of[3]};
      *reinterpret_cast<float4*>(to_exact + (2 * r + 1) * 512) = {of[4], of[5], of[6], of[7]};
    }
  };
  float sum = 0.0f;
  auto add = [&](int n) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      if (2 * n + b >= blocks) return;
      const float shrink = shrinks[n % 3][b][lane / 4];
      float4 p[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) p[r] = *reinterpret_cast<const float4*>(exact[n % 2][b] + (r * 32 + lane) * 16);
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        sum = r ? flush_add(sum, p[r].x) : flush_fma(sum, shrink, p[r].x);
        sum = flush_add(flush_add(flush_add(sum, p[r].y), p[r].z), p[r].w);
      }
    }
  };
  const bool weighs = warp >= kWeigher && warp < kLoader;
  if (weighs) weigh(0);
  __syncthreads();
  if (weighs) weigh(1);
  if (warp == kAdder) ask_scores(kStages), ask_scores(kStages + 1), add(0);
  __syncthreads();

  float out[4] = {};
  Half first, second;  // of the block at hand; halves are loaded while the one before them is taken
  const uint32_t my_values = base + value_offset(lane / 16 * 8 + lane % 8, warp % 2 * 2 + lane / 8 % 2);  // for `ldmatrix`
  auto load_half = [&](Half& to, int i, int h) {
    to.load(my_values + i % kStages * kValueTile + h * 4096, packed[i / 2 % 3][i % 2] + (h * 64 + lane) * 16);
  };
  if (warp < kAdder && blocks) {
    barrier_wait(&full_values[0], 0);
    load_half(first, 0, 0);
  }
  for (int i = 0; i < blocks; i += 2) {
    if (warp < kAdder) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if (i + b >= blocks) break;
        const float2 shrink = *reinterpret_cast<const float2*>(&shrinks[i / 2 % 3][b][2 * mine]);
        load_half(second, i + b, 1);
        out[0] = flush_multiply(out[0], shrink.x), out[1] = flush_multiply(out[1], shrink.y);
        out[2] = flush_multiply(out[2], shrink.x), out[3] = flush_multiply(out[3], shrink.y);
        first.add_to(out);
        const int next = i + b + 1;
        if (next < blocks) {
          barrier_wait(&full_values[next % kStages], next / kStages % 2);
          load_half(first, next, 0);
        }
        second.add_to(out);
      }
    } else if (weighs) {
      weigh(i / 2 + 2);
    } else if (warp == kAdder) {
      ask_scores(i + 2 + kStages);  // where two have been weighed
      ask_scores(i + 3 + kStages);
      add(i / 2 + 1);
    } else if (i) {
      ask_values(i - 2 + kStages);  // where two have been taken
      ask_values(i - 1 + kStages);
    }
    __syncthreads();
  }
  if (warp == kAdder) {
    sum = flush_add(sum, __shfl_xor_sync(~0u, sum, 2));
    sum = flush_add(sum, __shfl_xor_sync(~0u, sum, 1));
    if (mine == 0) inverses[lane / 4] = sum == 0.0f || sum != sum ? 0.0f : reciprocal(sum);
  }
  __syncthreads();
  if (warp < kAdder) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = mine * 2 + i % 2;
      if (head < a.group)
        a.out[request * a.out_stride + (kv_head * a.group + head) * kHead + blockIdx.x * kSlice + warp * 16 + i / 2 * 8 +
              lane / 4] = to_bf16(flush_multiply(out[i], inverses[head]));
    }
  }
}
