// torch.ops.batch_invariant.* of rows.cu on CUDA: arguments checked, memory made, the kernels launched.

#include "driver.h"

namespace batch_invariant {
namespace {

using stable::Optional;
using stable::Pair;
using stable::require;
using stable::Shape;
using stable::Tensor;

alignas(64) const unsigned char kImage[] = {
#embed "rows.cubin"
};
cuda::Module module(kImage, "compute capability 9.0");

constexpr int64_t kLanes = 512, kVector = 8, kMostHeld = 4;  // as in the kernels

int64_t rows_of(const Tensor& t) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < t.dim(); ++i) rows *= t.size(i);
  return rows;
}

void check(const char* op, const char* name, const Tensor& t) {
  require(cuda::is_cuda(t), "%s: %s is not on a CUDA device; move it there", op, name);
  require(cuda::is_bf16(t), "%s: %s is not bfloat16; convert it", op, name);
}

// Rows that a kernel reads where they lie, `stride` values apart: vectors of 16 bytes.
const void* rows(const char* op, const char* name, const Tensor& t, int64_t& stride) {
  check(op, name, t);
  require(t.dim() >= 1 && (t.last() <= 1 || t.stride(t.dim() - 1) == 1), "%s: %s is %s, its last dimension strided; make it contiguous",
          op, name, Shape(t).text);
  require(t.dim() <= 2 || t.is_contiguous(), "%s: %s of %lld dimensions is not contiguous; make it so", op, name, (long long)t.dim());
  stride = t.dim() == 2 && t.size(0) > 1 ? t.stride(0) : t.last();
  const void* data = t.data<void>();
  require(t.last() % kVector == 0 && stride % kVector == 0 && reinterpret_cast<uint64_t>(data) % 16 == 0,
          "%s: %s is %s with rows %lld apart; address and rows must be multiples of 16 bytes", op, name, Shape(t).text,
          (long long)stride);
  return data;
}

const void* gain(const char* op, const Tensor& weight, int64_t d) {
  check(op, "weight", weight);
  require(weight.dim() == 1 && weight.size(0) == d && weight.is_contiguous(), "%s: weight is %s; it must be [%lld], contiguous", op,
          Shape(weight).text, (long long)d);
  return weight.data<void>();
}

Tensor like(const Tensor& t, int64_t last, int32_t dtype, int32_t index) {
  int64_t sizes[16];
  require(t.dim() <= 16, "batch_invariant: a tensor is %s; 16 dimensions are the most", Shape(t).text);
  memcpy(sizes, t.sizes(), t.dim() * sizeof(int64_t));
  sizes[t.dim() - 1] = last;
  return cuda::empty(t.dim(), sizes, dtype, index);
}

Pair norm(const char* op, const Tensor& x, const Tensor* residual, const Tensor& weight, double epsilon) {
  int64_t x_stride = 0, residual_stride = 0;
  const void *in = rows(op, "x", x, x_stride), *added = nullptr, *gains = gain(op, weight, x.last());
  if (residual) {
    require(residual->same_sizes(x), "%s: x is %s and residual %s; they must have one shape", op, Shape(x).text,
            Shape(*residual).text);
    added = rows(op, "residual", *residual, residual_stride);
  }
  const int64_t d = x.last(), m = rows_of(x), held = (d + kLanes * kVector - 1) / (kLanes * kVector);
  require(held <= kMostHeld, "%s: rows of %lld values; %lld are the most", op, (long long)d, (long long)(kMostHeld * kLanes * kVector));
  const cuda::Place place(x);
  Pair result = {like(x, d, x.dtype(), place.index), residual ? like(x, d, x.dtype(), place.index) : Tensor()};
  if (m && d) {
    char name[32];
    snprintf(name, sizeof name, "%srms_norm_%d", residual ? "add_" : "", held <= 2 ? int(held) : 4);
    void *out = result.first.data<void>(), *sum = residual ? result.second.data<void>() : nullptr;
    const int32_t width = int32_t(d);
    const float eps = float(epsilon);
    const uint32_t grid[3] = {uint32_t(m), 1, 1};
    cuda::launch(module.kernel(name), op, place.stream, grid, kLanes, 0, true, in, added, gains, out, sum, width, x_stride,
                 residual_stride, eps);
  }
  return result;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, const double& epsilon) {
  return static_cast<Tensor&&>(norm("rms_norm", x, nullptr, weight, epsilon).first);
}

Pair add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, const double& epsilon) {
  return norm("add_rms_norm", x, &residual, weight, epsilon);
}

Pair turn_heads(const char* op, const Tensor& positions, const Tensor& query, const Tensor& key, const Tensor* query_weight,
                const Tensor* key_weight, const Tensor& cos_sin, double epsilon) {
  int64_t query_stride = 0, key_stride = 0;
  const void *queries = rows(op, "query", query, query_stride), *keys = rows(op, "key", key, key_stride);
  const int64_t tokens = positions.numel();
  require(query.dim() == 2 && key.dim() == 2 && query.size(0) == tokens && key.size(0) == tokens && query.last() % 128 == 0 &&
              key.last() % 128 == 0,
          "%s: query is %s and key %s for %lld tokens; they must be [tokens, heads * 128]", op, Shape(query).text,
          Shape(key).text, (long long)tokens);
  require(cuda::is_cuda(positions) && positions.dtype() == aoti_torch_dtype_int64() && positions.is_contiguous(),
          "%s: positions is %s; convert it to contiguous int64 on the device", op, Shape(positions).text);
  require(cuda::is_cuda(cos_sin) && cos_sin.dim() == 2 && cos_sin.size(1) == 128 && cos_sin.is_contiguous() &&
              (cuda::is_bf16(cos_sin) || cos_sin.dtype() == aoti_torch_dtype_float32()),
          "%s: cos_sin_cache is %s; it must be [positions, 128], contiguous, bfloat16 or float32, on the device", op,
          Shape(cos_sin).text);
  const void *query_gain = query_weight ? gain(op, *query_weight, 128) : nullptr,
             *key_gain = key_weight ? gain(op, *key_weight, 128) : nullptr;
  const cuda::Place place(query);
  Pair result = {like(query, query.last(), query.dtype(), place.index), like(key, key.last(), key.dtype(), place.index)};
  const int32_t heads = int32_t(query.last() / 128), kv_heads = int32_t(key.last() / 128), known = int32_t(cos_sin.size(0));
  if (tokens && heads + kv_heads) {
    const void *at = positions.data<void>(), *table = cos_sin.data<void>();
    void *query_out = result.first.data<void>(), *key_out = result.second.data<void>();
    const float eps = float(epsilon);
    const uint32_t grid[3] = {uint32_t(tokens), tokens >= 512 ? 1 : uint32_t((heads + kv_heads + 7) / 8), 1};
    const char* name = cuda::is_bf16(cos_sin) ? "turn_heads_bf16" : "turn_heads_fp32";
    cuda::launch(module.kernel(name), op, place.stream, grid, 128, 0, true, queries, keys, query_gain, key_gain, at, table,
                 query_out, key_out, heads, kv_heads, query_stride, key_stride, known, eps);
  }
  return result;
}

Pair rotary_embedding(const Tensor& positions, const Tensor& query, const Tensor& key, const int64_t& head_size,
                      const Tensor& cos_sin) {
  require(head_size == 128, "rotary_embedding: head_size is %lld; on CUDA it is 128 in the contract", (long long)head_size);
  return turn_heads("rotary_embedding", positions, query, key, nullptr, nullptr, cos_sin, 0);
}

Pair norm_rotary_embedding(const Tensor& positions, const Tensor& query, const Tensor& key, const Tensor& query_weight,
                           const Tensor& key_weight, const Tensor& cos_sin, const double& epsilon) {
  return turn_heads("norm_rotary_embedding", positions, query, key, &query_weight, &key_weight, cos_sin, epsilon);
}

Tensor silu_and_mul(const Tensor& x) {
  const char* op = "silu_and_mul";
  int64_t stride = 0;
  const void* in = rows(op, "x", x, stride);
  require(x.last() % (2 * kVector) == 0, "%s: x is %s; its last size must be a multiple of 16, gate and up side by side", op,
          Shape(x).text);
  const int64_t d = x.last() / 2, m = rows_of(x);
  const cuda::Place place(x);
  Tensor out = like(x, d, x.dtype(), place.index);
  if (m && d) {
    void* to = out.data<void>();
    const int32_t width = int32_t(d);
    const uint32_t grid[3] = {uint32_t(m), uint32_t((d + 128 * kVector - 1) / (128 * kVector)), 1};
    cuda::launch(module.kernel(op), op, place.stream, grid, 128, 0, true, in, to, width, stride);
  }
  return out;
}

// Either `out`, or index with `selected` and `lse`.
void launch_log_softmax(const char* op, const Tensor& logits, void* out, const void* index, void* selected, void* lse, void* stream) {
  const bool wide = logits.dtype() == aoti_torch_dtype_float32();
  const int32_t v = int32_t(logits.size(1));
  const int64_t stride = logits.size(0) > 1 ? logits.stride(0) : 0;
  const void* in = logits.data<void>();
  require(reinterpret_cast<uint64_t>(in) % 16 == 0 && stride % (wide ? 4 : 8) == 0,
          "%s: rows of logits %lld apart; address and rows must be multiples of 16 bytes", op, (long long)stride);
  const uint32_t grid[3] = {uint32_t(logits.size(0)), 1, 1};
  if (logits.size(0))
    cuda::launch(module.kernel(wide ? "log_softmax_fp32" : "log_softmax_bf16"), op, stream, grid, kLanes, 0, true, in, out, index,
                 selected, lse, v, stride);
}

void check_logits(const char* op, const Tensor& logits) {
  require(cuda::is_cuda(logits) && logits.dim() == 2 && logits.size(1) > 0 && logits.stride(1) == 1 &&
              (cuda::is_bf16(logits) || logits.dtype() == aoti_torch_dtype_float32()),
          "%s: logits is %s; it must be [rows, vocabulary], bfloat16 or float32 on the device, a row's values side by side", op,
          Shape(logits).text);
}

Tensor log_softmax(const Tensor& logits) {
  const char* op = "log_softmax";
  check_logits(op, logits);
  const cuda::Place place(logits);
  Tensor out = like(logits, logits.last(), aoti_torch_dtype_float32(), place.index);
  launch_log_softmax(op, logits, out.data<void>(), nullptr, nullptr, nullptr, place.stream);
  return out;
}

Pair selected_log_softmax(const Tensor& logits, const Tensor& index) {
  const char* op = "selected_log_softmax";
  check_logits(op, logits);
  require(cuda::is_cuda(index) && index.dim() == 1 && index.size(0) == logits.size(0) &&
              index.dtype() == aoti_torch_dtype_int64() && index.is_contiguous(),
          "%s: index is %s and logits %s; there must be one int64 index a row", op, Shape(index).text, Shape(logits).text);
  const cuda::Place place(logits);
  const int32_t fp32 = aoti_torch_dtype_float32();
  Pair result = {cuda::empty(1, logits.sizes(), fp32, place.index), cuda::empty(1, logits.sizes(), fp32, place.index)};
  launch_log_softmax(op, logits, nullptr, index.data<void>(), result.first.data<void>(), result.second.data<void>(), place.stream);
  return result;
}

// Two sides whose names differ must not be compared. It is that of all operators of a wheel: products are one chain of k16
// steps, attention has FlashAttention 3's bits for heads of 128, rows are summed in 512 lanes.
const char* contract() { return "batch-invariant-cuda-1 sm_90 k16-chain fa3-kv128 lanes512"; }

struct Operator {
  const char* name;
  const char* arguments;
  void (*call)(uint64_t*, uint64_t, uint64_t);
};

const Operator kOperators[] = {
    {"rms_norm", "(Tensor x, Tensor weight, float epsilon) -> Tensor", stable::Boxed<rms_norm>::call},
    {"add_rms_norm", "(Tensor x, Tensor residual, Tensor weight, float epsilon) -> (Tensor, Tensor)",
     stable::Boxed<add_rms_norm>::call},
    {"silu_and_mul", "(Tensor x) -> Tensor", stable::Boxed<silu_and_mul>::call},
    {"rotary_embedding", "(Tensor positions, Tensor query, Tensor key, int head_size, Tensor cos_sin_cache) -> (Tensor, Tensor)",
     stable::Boxed<rotary_embedding>::call},
    {"norm_rotary_embedding",
     "(Tensor positions, Tensor query, Tensor key, Tensor query_weight, Tensor key_weight, Tensor cos_sin_cache, float epsilon) "
     "-> (Tensor, Tensor)",
     stable::Boxed<norm_rotary_embedding>::call},
    {"log_softmax", "(Tensor logits) -> Tensor", stable::Boxed<log_softmax>::call},
    {"selected_log_softmax", "(Tensor logits, Tensor index) -> (Tensor, Tensor)", stable::Boxed<selected_log_softmax>::call},
};

__attribute__((constructor)) void enroll() {
  void *library = nullptr, *implementations = nullptr;
  stable::done(aoti_torch_library_init_fragment("batch_invariant", "rows.cpp", 0, &library));
  stable::done(aoti_torch_library_init_impl("batch_invariant", "CUDA", "rows.cpp", 0, &implementations));
  for (const Operator& o : kOperators) {
    char schema[512];
    snprintf(schema, sizeof schema, "%s%s", o.name, o.arguments);
    stable::done(aoti_torch_library_def(library, schema));
    stable::done(aoti_torch_library_impl(implementations, o.name, o.call));
  }
  stable::done(aoti_torch_library_def(library, "contract() -> str"));
  stable::done(aoti_torch_library_init_impl("batch_invariant", "CompositeExplicitAutograd", "rows.cpp", 0, &implementations));
  stable::done(aoti_torch_library_impl(implementations, "contract", stable::Boxed<contract>::call));
}

}  // namespace
}  // namespace batch_invariant
