// Attention of one new token a request over a paged cache, bf16, heads of 128: FlashAttention 3's bits, made in parallel.
//
// FlashAttention 3 without splits takes the keys in blocks of 128, from the last block to the first, one after the other:
// at few requests most of the card waits. But only two things in it are chains. The maximum is exact in any order, so all
// scores are made at once, with the maximum of each block (`attention_scores`). The other chain, of the outputs, runs over
// keys and not over the head's 128 values, so 8 warps on 4 processors carry it, each for 16 values (`attention_values`). Every operation that rounds is the one that FlashAttention 3 makes, in its order:
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
enum : int { kWeigher = 2, kAdder = 4, kLoader = 5 };  // the first warp of each kind in `attention_values`

struct Arguments {
  const unsigned short *query, *key, *value;  // [requests, heads * 128], rows apart by their strides
  unsigned short *key_cache, *value_cache;    // [pages, page, kv heads, 128] by strides
  const int *pages, *lengths;                 // [requests, table_stride], [requests]
  const long long* slots;                     // [requests]: where the new token goes, page * tokens of a page + token; or < 0
  float *scores, *peaks;                      // [requests, kv heads, group, most_blocks * 128], and a value a block
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

// 16 bytes to shared memory; zeros if `there` is false.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

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

__device__ __forceinline__ uint32_t key_offset(int row, int chunk) { return row * kHead * 2 + (chunk ^ (row & 7)) * 16; }

// Page numbers are read once, before anything else: a load that comes after a copy waits for it.
__device__ __forceinline__ void read_pages(int* to, const int* table, int first, int last, int threads) {
  for (int i = first + threadIdx.x; i <= last; i += threads) to[i - first] = table[i];
}

// Scores of one query group against blocks of 128 keys, and each block's maximum. Grid (ranges of blocks, kv heads, requests).
extern "C" __global__ void __launch_bounds__(128) attention_scores(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ float warp_peaks[4][kMostGroup];
  dependents_may_start();
  const int request = blockIdx.z, kv_head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int length = a.lengths[request], blocks = (length + kKeys - 1) / kKeys;
  const int each = (blocks + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * each;
  const int end = begin + each < blocks ? begin + each : blocks;
  if (begin >= end) {
    wait_for_dependencies();
    return;
  }
  enum : uint32_t { kTile = kKeys * kHead * 2 };
  const uint32_t base = shared_address(shared);
  int* pages = reinterpret_cast<int*>(shared + 2 * kTile);
  const int chunk = threadIdx.x % 16, first_row = threadIdx.x / 16, in_page = (1 << a.page_shift) - 1;
  const int first_page = begin * kKeys >> a.page_shift;
  const int last_key = (end * kKeys < length ? end * kKeys : length) - 1;
  read_pages(pages, a.pages + request * a.table_stride, first_page, last_key >> a.page_shift, 128);
  __syncthreads();

  auto ask = [&](int block) {
    if (block < end) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // rows 16 i to 16 i + 15 lie on one page
        const int start = block * kKeys + 16 * i;
        const bool any = start < length;
        const long long page = any ? pages[(start >> a.page_shift) - first_page] : 0;
        const unsigned short* rows = a.key_cache + page * a.page_stride + kv_head * a.head_stride + chunk * 8;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int row = 16 * i + 8 * j + first_row, key = block * kKeys + row;
          if (key == length - 1) continue;
          copy_async(base + (block - begin) % 2 * kTile + key_offset(row, chunk),
                     rows + (any ? key & in_page : 0) * a.token_stride, key < length);
        }
      }
    }
    copy_commit();
  };
  ask(begin);
  ask(begin + 1);
  wait_for_dependencies();

  const long long row_of_scores = (long long)(request * a.kv_heads + kv_head) * a.group;
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
    const uint32_t tile = (block - begin) % 2 * kTile;
    if (block == blocks - 1 && threadIdx.x < 16) {  // the new token: into the cache, and its key into the block
      const long long slot = a.slots[request];
      const long long to = (slot >> a.page_shift) * a.page_stride + (slot & in_page) * a.token_stride + kv_head * a.head_stride;
      const Chunk key = *reinterpret_cast<const Chunk*>(a.key + request * a.key_stride + kv_head * kHead + chunk * 8);
      const Chunk value = *reinterpret_cast<const Chunk*>(a.value + request * a.value_stride + kv_head * kHead + chunk * 8);
      if (slot >= 0) {
        *reinterpret_cast<Chunk*>(a.key_cache + to + chunk * 8) = key;
        *reinterpret_cast<Chunk*>(a.value_cache + to + chunk * 8) = value;
      }
      *reinterpret_cast<Chunk*>(shared + tile + key_offset((length - 1) % kKeys, chunk)) = key;
    }
    copy_wait<1>();
    __syncthreads();
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
        if (head < a.group) a.scores[((row_of_scores + head) * a.most_blocks + block) * kKeys + row] = score;
        peak[i % 2] = fmaxf(peak[i % 2], score);
      }
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
#pragma unroll
      for (int i = 0; i < 2; ++i) peak[i] = fmaxf(peak[i], __shfl_xor_sync(~0u, peak[i], distance));
    if (lane < 4) warp_peaks[warp][2 * lane] = peak[0], warp_peaks[warp][2 * lane + 1] = peak[1];
    __syncthreads();  // and the keys have been read
    ask(block + 2);
    if (threadIdx.x < a.group) {
      float most = warp_peaks[0][threadIdx.x];
#pragma unroll
      for (int w = 1; w < 4; ++w) most = fmaxf(most, warp_peaks[w][threadIdx.x]);
      a.peaks[(row_of_scores + threadIdx.x) * a.most_blocks + block] = most;
    }
  }
}

// 32 of the 128 values of a query group's outputs. Grid (4 slices, kv heads, requests). Warps at work on one block of keys
// each, in step: two carry the outputs, 16 values each; two make the next block's p, half its keys each; one adds the sums;
// one asks for what comes. Lane 4 q + c holds what belongs to query q and sum c.
extern "C" __global__ void __launch_bounds__(192) attention_values(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ __align__(16) unsigned char packed[2][2048];  // p in bf16 of two blocks: 16 bytes for each of 4 x 32 lanes
  __shared__ __align__(16) unsigned char exact[2][4096];   // p in fp32: 16 bytes for each of 8 x 32 lanes
  __shared__ __align__(16) float shrinks[2][kMostGroup], inverses[kMostGroup];
  dependents_may_start();
  const int request = blockIdx.z, kv_head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int length = a.lengths[request], blocks = (length + kKeys - 1) / kKeys, newest = (length - 1) % kKeys;
  enum : uint32_t { kValueBytes = kKeys * kSlice * 2 };
  const uint32_t stage_bytes = kValueBytes + a.group * kScorePitch * 4, base = shared_address(shared);
  float* peaks = reinterpret_cast<float*>(shared + kStages * stage_bytes);  // [group, blocks], the largest score so far
  int* pages = reinterpret_cast<int*>(peaks + a.group * blocks);
  if (length) read_pages(pages, a.pages + request * a.table_stride, 0, (length - 1) >> a.page_shift, 192);
  __syncthreads();

  // Blocks in the order in which they are taken: number i is block blocks - 1 - i.
  const long long row_of_scores = (long long)(request * a.kv_heads + kv_head) * a.group;
  const unsigned short* values =
      a.value_cache + kv_head * a.head_stride + blockIdx.x * kSlice + lane % 4 * 8;
  const unsigned short* my_values = values + lane / 4 * a.token_stride;
  // Rows of 64 bytes, their four parts swizzled.
  auto swizzled = [](int row, int part) -> uint32_t { return row * 64 + (part ^ (row >> 1 & 3)) * 16; };
  const uint32_t asked = swizzled(lane / 4, lane % 4);
  auto ask_values = [&](int i) {
    if (i >= blocks) return;
    const int start = (blocks - 1 - i) * kKeys + 16 * (lane % 8);  // lane l: of the 16 rows from row 16 (l % 8)
    const long long rows =
        start < length ? pages[start >> a.page_shift] * a.page_stride + (start & ((1 << a.page_shift) - 1)) * a.token_stride : 0;
    const uint32_t stage = base + i % kStages * stage_bytes + asked;
#pragma unroll
    for (int g = 0; g < 8; ++g) {
      const long long from = __shfl_sync(~0u, rows, g);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = 16 * g + 8 * j + lane / 4;
        const bool there = i > 0 || row < newest;
        if (i == 0 && row == newest) continue;
        copy_async(stage + (16 * g + 8 * j) * 64, there ? my_values + from + 8 * j * a.token_stride : values, there);
      }
    }
  };
  auto ask_scores = [&](int i) {
    if (i >= blocks) return;
    const uint32_t stage = base + i % kStages * stage_bytes + kValueBytes + lane * 16;
    const float* from = a.scores + (row_of_scores * a.most_blocks + blocks - 1 - i) * kKeys + lane * 4;
#pragma unroll 1
    for (int q = 0; q < a.group; ++q)
      copy_async(stage + q * kScorePitch * 4, from + (long long)q * a.most_blocks * kKeys, true);
  };
  if (warp == kLoader)
    for (int i = 0; i < kStages - 1; ++i) {
      ask_values(i);
      copy_commit();
    }
  wait_for_dependencies();
  if (warp == kLoader) {
    for (int i = 0; i < kStages - 1; ++i) {
      ask_scores(i);
      copy_commit();
    }
    if (blocks && lane < 4)
      *reinterpret_cast<Chunk*>(shared + swizzled(newest, lane)) =
          *reinterpret_cast<const Chunk*>(a.value + request * a.value_stride + kv_head * kHead + blockIdx.x * kSlice + lane * 8);
    copy_wait<kStages - 3>();  // scores of blocks 0 and 1
  } else {
    for (int q = warp; q < a.group; q += kLoader) {
      float so_far = __int_as_float(0xFF800000);
      for (int first = 0; first < blocks; first += 32) {
        const int i = first + lane;
        float peak = i < blocks ? a.peaks[(row_of_scores + q) * a.most_blocks + blocks - 1 - i] : so_far;
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
  const int query = lane / 4 < a.group ? lane / 4 : 0, mine = lane % 4, half = warp - kWeigher;
  const float* my_peaks = peaks + query * blocks;
  const float none = __int_as_float(0xFF800000), extinct = lane / 4 < a.group ? 0.0f : none;
  auto weigh = [&](int i) {
    const float most = my_peaks[i];
    const float shrink = i ? power_of_two(flush_multiply(flush_add(my_peaks[i - 1], -most), a.scale)) : 1.0f;
    const float offset = extinct - (i == 0 && most == none ? 0.0f : flush_multiply(most, a.scale));
    const unsigned char* scores =
        shared + i % kStages * stage_bytes + kValueBytes + (query * kScorePitch + half * 64 + mine * 2) * 4;
    uint32_t words[8];
    float p[16];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 two = *reinterpret_cast<const float2*>(scores + j * 32);
      p[2 * j] = power_of_two(flush_fma(two.x, a.scale, offset));
      p[2 * j + 1] = power_of_two(flush_fma(two.y, a.scale, offset));
      words[j] = pack(p[2 * j], p[2 * j + 1]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
      *reinterpret_cast<Chunk*>(packed[i % 2] + ((half * 2 + r) * 32 + lane) * 16) = {words[4 * r], words[4 * r + 1],
                                                                                    words[4 * r + 2], words[4 * r + 3]};
#pragma unroll
    for (int r = 0; r < 4; ++r)
      *reinterpret_cast<float4*>(exact[i % 2] + ((half * 4 + r) * 32 + lane) * 16) = {p[4 * r], p[4 * r + 1], p[4 * r + 2],
                                                                                   p[4 * r + 3]};
    if (half == 0 && mine == 0) shrinks[i % 2][lane / 4] = shrink;
  };

  const bool weighs = warp >= kWeigher && warp < kAdder;
  if (weighs && blocks) weigh(0);
  __syncthreads();
  float out[4] = {}, sum = 0.0f;
  const uint32_t read = swizzled(lane / 16 * 8 + lane % 8, warp % 2 * 2 + lane / 8 % 2);  // for `ldmatrix`
  for (int i = 0; i < blocks; ++i) {
    if (warp < kWeigher) {
      const uint32_t stage = base + i % kStages * stage_bytes + read;
      const float2 shrink = *reinterpret_cast<const float2*>(&shrinks[i % 2][2 * mine]);
      out[0] = flush_multiply(out[0], shrink.x), out[1] = flush_multiply(out[1], shrink.y);
      out[2] = flush_multiply(out[2], shrink.x), out[3] = flush_multiply(out[3], shrink.y);
      uint32_t v[8][4];
      Chunk p[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) p[r] = *reinterpret_cast<const Chunk*>(packed[i % 2] + (r * 32 + lane) * 16);
#pragma unroll
      for (int step = 0; step < 8; ++step) load_transposed(stage + step * 1024, v[step]);
#pragma unroll
      for (int step = 0; step < 8; ++step)
        multiply(out, v[step], p[step / 2].words[step % 2 * 2], p[step / 2].words[step % 2 * 2 + 1]);
    } else if (weighs) {
      if (i + 1 < blocks) weigh(i + 1);
    } else if (warp == kAdder) {
      const float shrink = shrinks[i % 2][lane / 4];
      float4 p[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) p[r] = *reinterpret_cast<const float4*>(exact[i % 2] + (r * 32 + lane) * 16);
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        sum = r ? flush_add(sum, p[r].x) : flush_fma(sum, shrink, p[r].x);
        sum = flush_add(flush_add(flush_add(sum, p[r].y), p[r].z), p[r].w);
      }
    } else {
      ask_values(i + kStages - 1);
      ask_scores(i + kStages - 1);
      copy_commit();
      copy_wait<kStages - 3>();  // values of block i + 1, scores of block i + 2
    }
    __syncthreads();
  }
  if (warp == kAdder) {
    sum = flush_add(sum, __shfl_xor_sync(~0u, sum, 2));
    sum = flush_add(sum, __shfl_xor_sync(~0u, sum, 1));
    if (mine == 0) inverses[lane / 4] = sum == 0.0f || sum != sum ? 0.0f : reciprocal(sum);
  }
  __syncthreads();
  if (warp < kWeigher) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = mine * 2 + i % 2;
      if (head < a.group)
        a.out[request * a.out_stride + (kv_head * a.group + head) * kHead + blockIdx.x * kSlice + warp * 16 + i / 2 * 8 + lane / 4] =
            to_bf16(flush_multiply(out[i], inverses[head]));
    }
  }
}
