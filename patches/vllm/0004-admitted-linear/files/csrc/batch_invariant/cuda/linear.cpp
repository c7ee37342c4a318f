// torch.ops.batch_invariant on CUDA: the linear, by cuBLASLt where it was admitted and by a plan elsewhere; cuBLASLt alone;
// and the reference that anything faster is compared with.

#include "cublaslt.h"
#include "driver.h"

namespace batch_invariant {
namespace {

using stable::Optional;
using stable::require;
using stable::Tensor;

alignas(64) const unsigned char kImage[] = {
#embed "reference.ptx"
};
cuda::Module module(kImage, "compute capability 8.0 or later");

Tensor reference_gemm(const Tensor& x, const Tensor& weight, const Optional& bias, const bool& fp32) {
  const char* op = "reference_gemm";
  const cuda::Product p(op, x, weight, bias.tensor);
  require(!fp32 || !p.bias, "%s: a bias with fp32 output is not in the contract; add it yourself", op);
  const cuda::Place place(x);
  Tensor out = p.result(x, fp32, place.index);
  if (p.m && p.n) {
    const uint32_t grid[3] = {uint32_t((p.n + 63) / 64), uint32_t((p.m + 15) / 16), 1};
    const void *xs = x.data<void>(), *weights = weight.data<void>();
    void* outs = out.data<void>();
    const int32_t depth = int32_t(p.k), wide = fp32;
    cuda::launch(module.kernel(op), op, place.stream, grid, 256, 0, false, xs, weights, p.bias, outs, p.m, p.n, depth,
                 p.x_stride, p.weight_stride, wide);
  }
  return out;
}

Tensor cublaslt_gemm(const Tensor& x, const Tensor& weight) {
  const char* op = "cublaslt_gemm";
  const cuda::Product p(op, x, weight, Tensor());
  const cuda::Place place(x);
  Tensor out = p.result(x, false, place.index);
  require(!p.m || !p.n || (p.k && cublaslt::multiply(p, x.data<void>(), weight.data<void>(), out.data<void>(), place)),
          "%s: cuBLASLt has no kernel for (M, N, K) = (%lld, %lld, %lld) that splits no K; use another implementation", op,
          (long long)p.m, (long long)p.n, (long long)p.k);
  return out;
}

// The rows for which cuBLASLt serves a weight of [n, k]: bit M - 1 of `single` up to kSingle rows, and above one bit of
// `ranges` for each power of two that M does not exceed.
constexpr int64_t kSingle = 64, kSingleBits = 7;
struct Served {
  int64_t n, k;
  uint64_t single, ranges;
};
constexpr int kMostServed = 256;
Served served[kMostServed];
int served_count = 0;

void let_cublaslt(const int64_t& n, const int64_t& k, const int64_t& single, const int64_t& ranges) {
  int at = 0;
  while (at < served_count && !(served[at].n == n && served[at].k == k)) ++at;
  require(at < kMostServed, "let_cublaslt: more than %d shapes of weights", kMostServed);
  served[at] = {n, k, uint64_t(single), uint64_t(ranges)};
  if (at == served_count) __atomic_store_n(&served_count, at + 1, __ATOMIC_RELEASE);
}

bool served_by_cublaslt(int64_t m, int64_t n, int64_t k) {
  const int count = __atomic_load_n(&served_count, __ATOMIC_ACQUIRE);
  for (int i = 0; i < count; ++i) {
    if (served[i].n != n || served[i].k != k) continue;
    if (m <= kSingle) return served[i].single >> (m - 1) & 1;
    const int64_t range = 64 - __builtin_clzll(uint64_t(m - 1)) - kSingleBits;
    return range < 64 && (served[i].ranges >> range & 1);
  }
  return false;
}

// In C++ for what a long prefill calls most: its host time is the forward pass's.
Tensor linear(const Tensor& x, const Tensor& weight, const Optional& bias) {
  if (!bias.tensor && weight.dim() == 2 && weight.is_contiguous() && x.dim() >= 1 && (x.dim() == 2 || x.is_contiguous())) {
    const cuda::Product p("linear", x, weight, Tensor());
    if (p.m && served_by_cublaslt(p.m, p.n, p.k)) {
      const cuda::Place place(x);
      Tensor out = p.result(x, false, place.index);
      if (cublaslt::multiply(p, x.data<void>(), weight.data<void>(), out.data<void>(), place)) return out;
    }
  }
  uint64_t stack[3] = {reinterpret_cast<uint64_t>(Tensor(x).release()), reinterpret_cast<uint64_t>(Tensor(weight).release()), 0};
  if (bias.tensor) {
    uint64_t* inner = static_cast<uint64_t*>(malloc(sizeof(uint64_t)));
    *inner = reinterpret_cast<uint64_t>(Tensor(bias.tensor).release());
    stack[2] = reinterpret_cast<uint64_t>(inner);
  }
  stable::done(aoti_torch_call_dispatcher("batch_invariant::planned_linear", "", stack));
  return Tensor(reinterpret_cast<void*>(stack[0]));
}

struct Operator {
  const char* schema;
  const char* name;
  const char* key;
  void (*call)(uint64_t*, uint64_t, uint64_t);
};

const Operator kOperators[] = {
    {"linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", "linear", "CUDA", stable::Boxed<linear>::call},
    {"cublaslt_gemm(Tensor x, Tensor weight) -> Tensor", "cublaslt_gemm", "CUDA", stable::Boxed<cublaslt_gemm>::call},
    {"reference_gemm(Tensor x, Tensor weight, Tensor? bias=None, bool fp32=False) -> Tensor", "reference_gemm", "CUDA",
     stable::Boxed<reference_gemm>::call},
    {"let_cublaslt(int n, int k, int single, int ranges) -> ()", "let_cublaslt", "CompositeExplicitAutograd",
     stable::Boxed<let_cublaslt>::call},
};

__attribute__((constructor)) void enroll() {
  void* library = nullptr;
  stable::done(aoti_torch_library_init_fragment("batch_invariant", "linear.cpp", 0, &library));
  for (const Operator& o : kOperators) {
    void* implementations = nullptr;
    stable::done(aoti_torch_library_init_impl("batch_invariant", o.key, "linear.cpp", 0, &implementations));
    stable::done(aoti_torch_library_def(library, o.schema));
    stable::done(aoti_torch_library_impl(implementations, o.name, o.call));
  }
}

}  // namespace
}  // namespace batch_invariant
