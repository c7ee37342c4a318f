// torch.ops.batch_invariant.skinny_gemm on Hopper: arguments checked, the tensor maps made, the kernel chosen and launched.

#include "driver.h"

namespace batch_invariant {
namespace {

using stable::Optional;
using stable::require;
using stable::Tensor;

alignas(64) const unsigned char kGemm[] = {
#embed "sm90_bf16_gemm_skinny.cubin"
};
cuda::Module gemm(kGemm, "compute capability 9.0");

constexpr int64_t kMostRows = 64, kMostStages = 48;
constexpr int64_t kStageK = 128;                            // values of K in a stage
constexpr int64_t kSharedBytes = 227 * 1024;                // what a block may have
constexpr int64_t kBarrierBytes = 2 * kMostStages * 8 + 1024;  // and what the ring loses by where it begins
constexpr int64_t kOverreadBytes = 8 * 1024;                // rows of x that are read and not there, after the last stage
constexpr int64_t kColumns[] = {16, 24, 32, 40, 48, 64, 80, 96, 128};
constexpr int kWidths = sizeof kColumns / sizeof *kColumns;

struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// As in the kernel.
struct Arguments {
  void* out;
  const void* bias;
  long long out_stride;
  int m, n, steps, rows, stages, tiles, fp32;
};

// The map of a [rows, K] tensor in tiles of `box` rows by 64 values, each row of a tile 128 bytes, swizzled.
TensorMap tensor_map(const char* op, const char* name, const void* data, int64_t rows, int64_t k, int64_t stride, int64_t box) {
  TensorMap map;
  const uint64_t sizes[2] = {uint64_t(k), uint64_t(rows)}, strides[1] = {uint64_t(stride) * 2};
  const uint32_t boxes[2] = {64, uint32_t(box)}, steps[2] = {1, 1};
  constexpr int32_t kBf16 = 9, kNoInterleave = 0, kSwizzle128 = 3, kPromotion256 = 3, kZeros = 0;
  const int32_t error =
      cuda::Driver::get().encode_tiled(&map, kBf16, 2, const_cast<void*>(data), sizes, strides, boxes, steps, kNoInterleave,
                                       kSwizzle128, kPromotion256, kZeros);
  require(!error, "%s: %s cannot be read in tiles; its address and row stride must be multiples of 16 bytes", op, name);
  return map;
}

// The kernel of a tile width, made ready once for a device.
void* prepared(const char* op, int width, int32_t index) {
  static void* kernels[16][kWidths];
  require(index < 16, "%s: device %d; 16 devices are the most", op, index);
  void*& kept = kernels[index][width];
  if (!kept) {
    char name[64];
    snprintf(name, sizeof name, "gemm_bf16_skinny_%d", int(kColumns[width]));
    void* kernel = gemm.kernel(name);
    const cuda::Driver& driver = cuda::Driver::get();
    driver.check(driver.kernel_attribute(cuda::kMaxDynamicShared, kSharedBytes, kernel, index), "cuKernelSetAttribute", name);
    __atomic_store_n(&kept, kernel, __ATOMIC_RELEASE);
  }
  return kept;
}

int32_t multiprocessors(int32_t index) {
  static int32_t known[16];
  if (!known[index % 16]) {
    int32_t count = 0;
    const cuda::Driver& driver = cuda::Driver::get();
    driver.check(driver.device_attribute(&count, cuda::kMultiprocessors, index), "cuDeviceGetAttribute", "the device");
    known[index % 16] = count;
  }
  return known[index % 16];
}

Tensor skinny_gemm(const Tensor& x, const Tensor& weight, const Optional& bias, const bool& fp32,
                   const int64_t& columns) {
  const char* op = "skinny_gemm";
  const cuda::Product p(op, x, weight, bias.tensor);
  require(p.m <= kMostRows, "%s: x has %lld rows; %lld are the most", op, (long long)p.m, (long long)kMostRows);
  require(!fp32 || !p.bias, "%s: a bias with fp32 output is not in the contract; add it yourself", op);
  int width = 0;
  while (width < kWidths && kColumns[width] != columns) ++width;
  require(width < kWidths, "%s: no kernel has tiles of %lld columns", op, (long long)columns);
  const cuda::Place place(x);
  Tensor out = p.result(x, fp32, place.index);
  if (!p.m || !p.n) return out;
  require(p.k > 0, "%s: K is 0", op);

  Arguments a = {};
  a.rows = int((p.m + 7) / 8 * 8);
  const int64_t stage_bytes = (columns + a.rows) * kStageK * 2;
  const int64_t most = (kSharedBytes - kBarrierBytes - kOverreadBytes) / stage_bytes;
  a.stages = int(most < kMostStages ? most : kMostStages);
  a.out = out.data<void>();
  a.bias = p.bias;
  a.out_stride = p.n;
  a.m = int(p.m), a.n = int(p.n), a.fp32 = fp32;
  a.steps = int((p.k + kStageK - 1) / kStageK);
  a.tiles = int((p.n + columns - 1) / columns);
  const TensorMap weights = tensor_map(op, "weight", weight.data<void>(), p.n, p.k, p.weight_stride, columns);
  const TensorMap xs = tensor_map(op, "x", x.data<void>(), p.m, p.k, p.m > 1 ? p.x_stride : p.k, a.rows);
  const int32_t card = multiprocessors(place.index);
  const uint32_t grid[3] = {uint32_t(a.tiles < card ? a.tiles : card), 1, 1};
  const uint32_t shared = uint32_t(kBarrierBytes + a.stages * stage_bytes + kOverreadBytes);
  cuda::launch(prepared(op, width, place.index), op, place.stream, grid, 160, shared, true, weights, xs, a);
  return out;
}

__attribute__((constructor)) void enroll() {
  void* library = nullptr;
  stable::done(aoti_torch_library_init_fragment("batch_invariant", "sm90.cpp", 0, &library));
  stable::done(aoti_torch_library_def(library,
                                      "skinny_gemm(Tensor x, Tensor weight, Tensor? bias=None, bool fp32=False, int columns=32) "
                                      "-> Tensor"));
  void* implementations = nullptr;
  stable::done(aoti_torch_library_init_impl("batch_invariant", "CUDA", "sm90.cpp", 0, &implementations));
  stable::done(aoti_torch_library_impl(implementations, "skinny_gemm", stable::Boxed<skinny_gemm>::call));
}

}  // namespace
}  // namespace batch_invariant
