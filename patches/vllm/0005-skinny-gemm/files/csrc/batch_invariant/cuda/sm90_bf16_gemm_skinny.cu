// out[M, N] = x[M, K] weight[N, K]^T (+ bias), bf16 in, for few rows: 1 <= M <= 64. Sequential K.
//
// The time is that of reading `weight` once, so everything serves the bytes in flight. A block owns kCols rows of
// `weight`. One warp streams them through a ring of stages in shared memory (TMA, 128-byte swizzle) as deep as the
// memory allows, four warps multiply. One wgmma of shape m64 x kCols x k16 takes all rows of `x` at once: with x as its
// left operand any multiple of 8 is a tile width, so that a tile exists that fills the card for every N. Rows above M
// are whatever lies there; they are never stored.
//
// Every output is one chain of k16 steps from zero, in order. Tile width and depth change who computes it and when,
// never the chain: they may be tuned freely.
//
// `weight` does not depend on the kernel before this one, so its first stages are asked for before that one has ended
// (programmatic dependent launch); `x` is asked for after.
#include "sm90.h"

enum : int {
  kStepBytes = 128,  // one row of a swizzled tile: 64 values of K
  kSteps = 2,        // such tiles a stage
  kLoader = 4,       // the warp that loads; those before it multiply
};

// d += A B^T for one k16 step; A: 64 rows of x, B: kCols rows of weight, both in shared memory, K along the rows.
template <int kCols>
__device__ __forceinline__ void multiply(float (&d)[kCols / 2], uint64_t a, uint64_t b);

#define R4(o) "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3])
#define R8(o) R4(o), R4(o + 4)
#define R16(o) R8(o), R8(o + 8)
#define R32(o) R16(o), R16(o + 16)
#define S4 "%0,%1,%2,%3"
#define S8 S4 ",%4,%5,%6,%7"
#define S12 S8 ",%8,%9,%10,%11"
#define S16 S12 ",%12,%13,%14,%15"
#define S20 S16 ",%16,%17,%18,%19"
#define S24 S20 ",%20,%21,%22,%23"
#define S28 S24 ",%24,%25,%26,%27"
#define S32 S28 ",%28,%29,%30,%31"
#define S36 S32 ",%32,%33,%34,%35"
#define S40 S36 ",%36,%37,%38,%39"
#define S44 S40 ",%40,%41,%42,%43"
#define S48 S44 ",%44,%45,%46,%47"
#define S52 S48 ",%48,%49,%50,%51"
#define S56 S52 ",%52,%53,%54,%55"
#define S60 S56 ",%56,%57,%58,%59"
#define S64 S60 ",%60,%61,%62,%63"
#define MULTIPLY(cols, names, a_name, b_name, ...)                                                                     \
  template <>                                                                                                          \
  __device__ __forceinline__ void multiply<cols>(float (&d)[cols / 2], uint64_t a, uint64_t b) {                       \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #cols "k16.f32.bf16.bf16 {" names "}, %" a_name ", %" b_name      \
                 ", 1, 1, 1, 0, 0;"                                                                                    \
                 : __VA_ARGS__                                                                                         \
                 : "l"(a), "l"(b));                                                                                    \
  }
MULTIPLY(16, S8, "8", "9", R8(0))
MULTIPLY(24, S12, "12", "13", R8(0), R4(8))
MULTIPLY(32, S16, "16", "17", R16(0))
MULTIPLY(40, S20, "20", "21", R16(0), R4(16))
MULTIPLY(48, S24, "24", "25", R16(0), R8(16))
MULTIPLY(64, S32, "32", "33", R32(0))
MULTIPLY(80, S40, "40", "41", R32(0), R8(32))
MULTIPLY(96, S48, "48", "49", R32(0), R16(32))
MULTIPLY(128, S64, "64", "65", R32(0), R32(32))

struct Arguments {
  void* out;         // [M, N], bf16 or fp32, rows `out_stride` values apart
  const void* bias;  // [N] bf16, or null
  long long out_stride;
  int m, n, steps;  // `steps`: stages in a tile, ceil(K / 128)
  int rows;         // of x in a stage: M rounded up to 8
  int stages, tiles;
  int fp32;
};

// A value as it is stored. The bias is added to the rounded product and the sum rounded again, as torch adds a tensor.
__device__ __forceinline__ void store(const Arguments& p, int row, int column, float value) {
  if (p.fp32) {
    static_cast<float*>(p.out)[row * p.out_stride + column] = value;
    return;
  }
  unsigned short bits = to_bf16(value);
  if (p.bias) bits = to_bf16(from_bf16(bits) + from_bf16(static_cast<const unsigned short*>(p.bias)[column]));
  static_cast<unsigned short*>(p.out)[row * p.out_stride + column] = bits;
}

template <int kCols>
__device__ __forceinline__ void gemm(const TensorMap& weight, const TensorMap& x, const Arguments& p) {
  // The barriers, then the ring of stages where 1024 divides the address.
  extern __shared__ uint64_t shared[];
  uint64_t *full = shared, *empty = shared + kMostStages;

  const uint32_t base = (shared_address(shared + 2 * kMostStages) + 1023) / 1024 * 1024;
  const uint32_t weight_bytes = kSteps * kCols * kStepBytes;
  const uint32_t stage_bytes = weight_bytes + kSteps * p.rows * kStepBytes;

  dependents_may_start();
  // The warp that loads readies the barriers, and asks for its first weights before anything else happens.
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int loads = (p.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x * p.steps;
  const int ahead = min(loads, p.stages);
  auto ask_weight = [&](int stage, int tile, int step) {
    barrier_expect(&full[stage], stage_bytes);
    const uint32_t at = base + stage * stage_bytes;
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      tma_load(at + i * kCols * kStepBytes, weight, (step * kSteps + i) * 64, tile * kCols, &full[stage], kEvictFirst);
  };
  auto ask_x = [&](int stage, int step) {
    const uint32_t at = base + stage * stage_bytes + weight_bytes;
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      tma_load(at + i * p.rows * kStepBytes, x, (step * kSteps + i) * 64, 0, &full[stage], kEvictLast);
  };
  if (warp == kLoader) {
    if (elected()) {
      for (int s = 0; s < p.stages; ++s) {
        barrier_init(&full[s], 1);
        barrier_init(&empty[s], kLoader);
      }
      barrier_init_fence();
    }
    __syncwarp();
    for (int i = 0, step = 0, tile = blockIdx.x; i < ahead; ++i) {
      if (elected()) ask_weight(i, tile, step);
      if (++step == p.steps) step = 0, tile += gridDim.x;
    }
  }
  __syncthreads();

  if (warp == kLoader) {
    wait_for_dependencies();
    int stage = 0, phase = 0, step = 0, tile = blockIdx.x;
    for (int i = 0; i < ahead; ++i) {
      if (elected()) ask_x(i, step);
      if (++step == p.steps) step = 0, tile += gridDim.x;
    }
    for (int i = ahead; i < loads; ++i) {
      barrier_wait(&empty[stage], phase);
      if (elected()) {
        ask_weight(stage, tile, step);
        ask_x(stage, step);
      }
      if (++stage == p.stages) stage = 0, phase ^= 1;
      if (++step == p.steps) step = 0, tile += gridDim.x;
    }
  } else {
    int stage = 0, phase = 0, held = -1;
    auto release = [&](int s) {
      if (lane == 0) barrier_arrive(&empty[s]);
    };
    wait_for_dependencies();  // `out` may be what the kernel before this one reads
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
      float d[kCols / 2];
#pragma unroll
      for (int i = 0; i < kCols / 2; ++i) d[i] = 0.0f;
      for (int step = 0; step < p.steps; ++step) {
        barrier_wait(&full[stage], phase);
        wgmma_fence();
        const uint64_t b = tile_descriptor(base + stage * stage_bytes);
        const uint64_t a = tile_descriptor(base + stage * stage_bytes + weight_bytes);
#pragma unroll
        for (int i = 0; i < kSteps; ++i)
#pragma unroll
          for (int k = 0; k < 4; ++k)  // 32 bytes a k16 step; addresses in units of 16 bytes
            multiply<kCols>(d, a + i * p.rows * (kStepBytes / 16) + 2 * k, b + i * kCols * (kStepBytes / 16) + 2 * k);
        wgmma_commit();
        wgmma_wait<1>();
        if (held >= 0) release(held);
        held = stage;
        if (++stage == p.stages) stage = 0, phase ^= 1;
      }
      wgmma_wait<0>();
      release(held);
      held = -1;
      const int row = warp * 16 + lane / 4, column = tile * kCols + lane % 4 * 2;
      const bool pairs = !p.fp32 && !p.bias && p.out_stride % 2 == 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (row + 8 * half >= p.m) continue;
#pragma unroll
        for (int j = 0; j < kCols / 8; ++j) {
          const int c = column + 8 * j;
          const float low = d[4 * j + 2 * half], high = d[4 * j + 2 * half + 1];
          if (pairs && c + 1 < p.n) {
            const uint32_t two = to_bf16(low) | uint32_t(to_bf16(high)) << 16;
            *reinterpret_cast<uint32_t*>(static_cast<unsigned short*>(p.out) + (row + 8 * half) * p.out_stride + c) = two;
          } else {
            if (c < p.n) store(p, row + 8 * half, c, low);
            if (c + 1 < p.n) store(p, row + 8 * half, c + 1, high);
          }
        }
      }
    }
  }
}

#define KERNEL(cols)                                                                                                   \
  extern "C" __global__ void __launch_bounds__(160, 1) gemm_bf16_skinny_##cols(                                        \
      const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,                                   \
      const __grid_constant__ Arguments arguments) {                                                                   \
    gemm<cols>(weight, x, arguments);                                                                                  \
  }
KERNEL(16)
KERNEL(24)
KERNEL(32)
KERNEL(40)
KERNEL(48)
KERNEL(64)
KERNEL(80)
KERNEL(96)
KERNEL(128)
