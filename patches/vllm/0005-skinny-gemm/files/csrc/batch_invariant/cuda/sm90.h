// The instructions of sm_90 that the kernels use, one function each, and bf16. No header of anybody's.
#pragma once

using uint32_t = unsigned int;
using uint64_t = unsigned long long;

struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// Constants are enumerators and functions have external linkage: the compiler names what is internal after its process,
// and an image must have the same bytes each time.
enum : int { kMostStages = 48 };
enum : uint64_t { kEvictFirst = 0x12F0000000000000ull, kEvictLast = 0x14F0000000000000ull };  // L2 policies of createpolicy

__device__ __forceinline__ float from_bf16(unsigned short bits) { return __uint_as_float(uint32_t(bits) << 16); }

// To nearest, ties to even; NaN becomes 0x7fff.
__device__ __forceinline__ unsigned short to_bf16(float value) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t phase) {
  asm volatile(
      "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }" ::"r"(
          shared_address(barrier)),
      "r"(phase)
      : "memory");
}

// TMA's instructions take uniform registers. Where one thread of a warp runs by itself the compiler walks through the warp's
// threads at each of them, some 45 cycles; so the whole warp walks through a loop of copies, by a number of the warp that is
// seen to be the same for all, and one thread is elected at the copy.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }
__device__ __forceinline__ bool elected() {
  uint32_t yes;
  asm volatile("{ .reg .pred me; elect.sync _|me, 0xffffffff; selp.u32 %0, 1, 0, me; }" : "=r"(yes));
  return yes;
}

// A tile of a two-dimensional tensor map at (column, row), zeros where the tensor ends.
__device__ __forceinline__ void tma_load(uint32_t to, const TensorMap& map, int column, int row, uint64_t* barrier,
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], "
      "[%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
// A tile for wgmma: rows of 128 bytes, swizzled by TMA, groups of 8 rows one after the other.
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address) {
  return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// Programmatic dependent launch: the next kernel may start; the kernels before this one have ended.
__device__ __forceinline__ void dependents_may_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
