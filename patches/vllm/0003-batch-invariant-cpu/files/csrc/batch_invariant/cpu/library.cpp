// The torch operators `batch_invariant::*` on the CPU: arguments checked, memory made, the kernels called.

#include <cpuid.h>

#include "kernels.h"
#include "reference.h"
#include "stable.h"

namespace batch_invariant {
namespace {

using stable::Optional;
using stable::Pair;
using stable::require;
using stable::Shape;
using stable::Tensor;

using Long = long long;  // what %lld prints

// Whether processor and system run AVX-512 F, DQ, CD, BW and VL: leaf 7 of cpuid, and the register state in XCR0.
bool has_v4() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
  unsigned low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  const unsigned wanted = bit_AVX512F | bit_AVX512DQ | bit_AVX512CD | bit_AVX512BW | bit_AVX512VL;
  return (low & 0xE6) == 0xE6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & wanted) == wanted;
}

const KernelTable& kernels() {
  static const KernelTable& chosen = has_v4() ? kernels_v4 : kernels_v3;
  return chosen;
}

void parallel_for(int64_t count, int64_t grain, Body body, const void* context) {
  struct Call {
    Body body;
    const void* context;
  } call = {body, context};
  stable::done(torch_parallel_for(
      0, count, grain,
      [](int64_t begin, int64_t end, void* c) { static_cast<Call*>(c)->body(static_cast<Call*>(c)->context, begin, end); },
      &call));
}

bool is_bf16(const Tensor& t) { return t.dtype() == aoti_torch_dtype_bfloat16(); }

void on_cpu(const char* op, const char* name, const Tensor& t) {
  require(t.is_cpu(), "%s: %s is not on the CPU; move it there", op, name);
}

void check_type(const char* op, const char* name, const Tensor& t, const Tensor* like) {
  on_cpu(op, name, t);
  require(is_bf16(t) || t.dtype() == aoti_torch_dtype_float32(),
          "%s: %s is neither bfloat16 nor float32; convert it", op, name);
  require(!like || like->dtype() == t.dtype(), "%s: %s has another dtype than the first argument; convert one of them",
          op, name);
}

// A tensor that the kernels read: on the CPU, bf16 or fp32 (as `like`, if given), contiguous (copied if need be).
Tensor readable(const char* op, const char* name, const Tensor& t, const Tensor* like = nullptr) {
  check_type(op, name, t, like);
  return t.contiguous();
}

// An index tensor: on the CPU, of one integer type, contiguous.
const void* index_data(const char* op, const char* name, const Tensor& t, int64_t dim, int32_t dtype) {
  on_cpu(op, name, t);
  require(t.dim() == dim && t.dtype() == dtype && t.is_contiguous(), "%s: %s is %s; convert it to a contiguous %s of %lld dimensions",
          op, name, Shape(t).text, dtype == aoti_torch_dtype_int64() ? "int64" : "int32", Long(dim));
  return t.data<void>();
}

// Calls `f` with the kernels of the tensor's dtype.
template <class F>
void by_dtype(const Tensor& t, const F& f) {
  if (is_bf16(t))
    f(kernels().b16, bf16{});
  else
    f(kernels().f32, float{});
}

int64_t rows_of(const Tensor& t) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < t.dim(); ++i) rows *= t.size(i);
  return rows;
}

// A new tensor of the sizes of `like` with another last one.
Tensor resized(const Tensor& like, int64_t last) {
  int64_t sizes[16];
  require(like.dim() <= 16, "batch_invariant: a tensor is %s; 16 dimensions are the most", Shape(like).text);
  memcpy(sizes, like.sizes(), like.dim() * sizeof(int64_t));
  sizes[like.dim() - 1] = last;
  return stable::empty(like.dim(), sizes, like.dtype());
}

Tensor alike(const Tensor& like, int32_t dtype) { return stable::empty(like.dim(), like.sizes(), dtype); }

template <bool kReference>
Tensor linear(const Tensor& x, const Tensor& weight, const Optional& bias) {
  const char* op = kReference ? "reference_linear" : "linear";
  require(x.dim() >= 1, "%s: x has no dimension; give it [..., K]", op);
  require(weight.dim() == 2 && weight.is_contiguous(),
          "%s: weight is %s; it must be [N, K] and contiguous, its rows one after the other", op, Shape(weight).text);
  require(weight.size(1) == x.last(), "%s: x is %s and weight %s; their last sizes must be equal", op, Shape(x).text,
          Shape(weight).text);
  const int64_t n = weight.size(0), k = weight.size(1);
  const Tensor in = readable(op, "x", x);
  check_type(op, "weight", weight, &x);
  if (bias.tensor) {
    check_type(op, "bias", bias.tensor, &x);
    require(bias.tensor.dim() == 1 && bias.tensor.size(0) == n && bias.tensor.is_contiguous(),
            "%s: bias is %s; it must be [N], contiguous", op, Shape(bias.tensor).text);
  }
  Tensor out = resized(x, n);
  by_dtype(in, [&](const auto& table, auto zero) {
    using T = decltype(zero);
    const T* b = bias.tensor ? bias.tensor.data<T>() : nullptr;
    if constexpr (kReference)
      reference::linear<T>(in.data<T>(), weight.data<T>(), b, out.data<T>(), rows_of(x), n, k);
    else
      table.linear(parallel_for, in.data<T>(), weight.data<T>(), b, out.data<T>(), rows_of(x), n, k);
  });
  return out;
}

void check_norm(const char* op, const Tensor& x, const Tensor& weight) {
  check_type(op, "x", x, nullptr);
  check_type(op, "weight", weight, &x);
  require(x.dim() >= 1 && weight.dim() == 1 && weight.size(0) == x.last() && weight.is_contiguous(),
          "%s: x is %s and weight %s; weight must be [D], contiguous, D the last size of x", op, Shape(x).text,
          Shape(weight).text);
}

template <bool kReference>
Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon) {
  const char* op = kReference ? "reference_rms_norm" : "rms_norm";
  check_norm(op, x, weight);
  const Tensor in = x.contiguous();
  Tensor out = alike(x, x.dtype());
  by_dtype(in, [&](const auto& table, auto zero) {
    using T = decltype(zero);
    if constexpr (kReference)
      reference::rms_norm<T>(in.data<T>(), weight.data<T>(), out.data<T>(), rows_of(x), x.last(), float(epsilon));
    else
      table.rms_norm(parallel_for, in.data<T>(), nullptr, weight.data<T>(), out.data<T>(), nullptr, rows_of(x), x.last(),
                     float(epsilon));
  });
  return out;
}

Pair add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double epsilon) {
  const char* op = "add_rms_norm";
  check_norm(op, x, weight);
  require(x.same_sizes(residual), "%s: x is %s and residual %s; they must have one shape", op, Shape(x).text,
          Shape(residual).text);
  const Tensor in = x.contiguous(), r = readable(op, "residual", residual, &x);
  Pair result = {alike(x, x.dtype()), alike(x, x.dtype())};
  by_dtype(in, [&](const auto& table, auto zero) {
    using T = decltype(zero);
    table.rms_norm(parallel_for, in.data<T>(), r.data<T>(), weight.data<T>(), result.first.data<T>(),
                   result.second.data<T>(), rows_of(x), x.last(), float(epsilon));
  });
  return result;
}

template <bool kReference>
Tensor silu_and_mul(const Tensor& x) {
  const char* op = kReference ? "reference_silu_and_mul" : "silu_and_mul";
  const Tensor in = readable(op, "x", x);
  require(x.dim() >= 1 && x.last() % 2 == 0, "%s: x is %s; its last size must be even, gate and up side by side", op,
          Shape(x).text);
  Tensor out = resized(x, x.last() / 2);
  by_dtype(in, [&](const auto& table, auto zero) {
    using T = decltype(zero);
    if constexpr (kReference)
      reference::silu_and_mul<T>(in.data<T>(), out.data<T>(), rows_of(x), out.last());
    else
      table.silu_and_mul(parallel_for, in.data<T>(), out.data<T>(), rows_of(x), out.last());
  });
  return out;
}

Pair rotary_embedding(const Tensor& positions, const Tensor& query, const Tensor& key, int64_t head_size,
                      const Tensor& cos_sin_cache) {
  const char* op = "rotary_embedding";
  const auto* at = static_cast<const int64_t*>(index_data(op, "positions", positions, 1, aoti_torch_dtype_int64()));
  const Tensor cache = readable(op, "cos_sin_cache", cos_sin_cache);
  require(head_size > 0 && head_size % 2 == 0 && cache.dim() == 2 && cache.size(1) == head_size,
          "%s: cos_sin_cache is %s and head_size %lld; every dimension of a head turns, so it must be [positions, head_size]",
          op, Shape(cache).text, Long(head_size));
  const int64_t tokens = positions.size(0), limit = cache.size(0);
  for (int64_t t = 0; t < tokens; ++t)
    require(at[t] >= 0 && at[t] < limit, "%s: position %lld is outside of the %lld rows of cos_sin_cache; give it more rows",
            op, Long(at[t]), Long(limit));
  // The rows that the tokens need, in fp32.
  float* table = static_cast<float*>(malloc((tokens * head_size + 1) * sizeof(float)));
  by_dtype(cache, [&](const auto&, auto zero) {
    const auto* rows = cache.data<const decltype(zero)>();
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t i = 0; i < head_size; ++i) table[t * head_size + i] = widen(rows[at[t] * head_size + i]);
  });
  auto turned = [&](const char* name, const Tensor& t) {
    const Tensor in = readable(op, name, t, &query);
    require(t.dim() >= 2 && t.size(0) == tokens && (tokens == 0 || t.numel() / tokens % head_size == 0),
            "%s: %s is %s; it must be [tokens, heads * head_size], for %lld tokens", op, name, Shape(t).text, Long(tokens));
    Tensor out = alike(t, t.dtype());
    if (tokens)
      by_dtype(in, [&](const auto& kernel, auto zero) {
        using T = decltype(zero);
        kernel.rotary(parallel_for, in.data<T>(), table, out.data<T>(), tokens, t.numel() / tokens / head_size, head_size);
      });
    return out;
  };
  Pair result = {turned("query", query), turned("key", key)};
  free(table);
  return result;
}

Cache cache_of(const Tensor& t) { return {t.data<void>(), t.stride(0), t.stride(1), t.stride(2)}; }

template <bool kReference>
Pair attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
               const Tensor& query_start_loc, const Tensor& seq_lens, double scale) {
  const char* op = kReference ? "reference_attention" : "attention";
  require(query.dim() == 3, "%s: query is %s; it must be [tokens, heads, head_size]", op, Shape(query).text);
  const Tensor q = readable(op, "query", query);
  const int64_t tokens = query.size(0), heads = query.size(1), head_size = query.size(2);
  const Tensor* const caches[] = {&key_cache, &value_cache};
  for (const Tensor* cache : caches) {
    check_type(op, "a cache", *cache, &query);
    require(cache->dim() == 4 && cache->size(3) == head_size && cache->stride(3) == 1 && cache->same_sizes(key_cache),
            "%s: a cache is %s; both must be [blocks, kv_heads, block_size, head_size], last stride 1", op,
            Shape(*cache).text);
  }
  const int64_t kv_heads = key_cache.size(1), block_size = key_cache.size(2);
  require(kv_heads > 0 && heads % kv_heads == 0, "%s: %lld heads are no multiple of %lld heads of keys; repeat or drop heads",
          op, Long(heads), Long(kv_heads));
  const Tensor table = block_table.contiguous();
  const int32_t int32 = aoti_torch_dtype_int32();
  const auto* pages = static_cast<const int32_t*>(index_data(op, "block_table", table, 2, int32));
  const auto* starts = static_cast<const int32_t*>(index_data(op, "query_start_loc", query_start_loc, 1, int32));
  const auto* lengths = static_cast<const int32_t*>(index_data(op, "seq_lens", seq_lens, 1, int32));
  const int64_t requests = seq_lens.size(0), width = table.size(1), blocks = key_cache.size(0);
  require(table.size(0) >= requests && query_start_loc.size(0) == requests + 1,
          "%s: block_table is %s, query_start_loc %s, seq_lens %s; they must be [R, blocks], [R + 1] and [R]", op,
          Shape(table).text, Shape(query_start_loc).text, Shape(seq_lens).text);
  require(starts[0] == 0, "%s: query_start_loc begins with %lld; it must begin with 0", op, Long(starts[0]));
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t length = lengths[r], count = starts[r + 1] - starts[r];
    require(count >= 0 && count <= length && starts[r + 1] <= tokens && length <= width * block_size,
            "%s: request %lld has %lld queries of %lld keys in %lld blocks; queries must be among the keys, keys in the blocks",
            op, Long(r), Long(count), Long(length), Long(width));
    for (int64_t b = 0; b * block_size < (count ? length : 0); ++b)
      require(pages[r * width + b] >= 0 && pages[r * width + b] < blocks,
              "%s: block_table names block %lld of %lld; correct the table", op, Long(pages[r * width + b]), Long(blocks));
  }
  Pair result = {alike(query, query.dtype()), stable::empty(2, query.sizes(), aoti_torch_dtype_float32())};
  const int64_t used = requests ? starts[requests] : 0;
  by_dtype(q, [&](const auto& kernel, auto zero) {
    using T = decltype(zero);
    T* out = result.first.data<T>();
    float* lse = result.second.data<float>();
    memset(out + used * heads * head_size, 0, (tokens - used) * heads * head_size * sizeof(T));
    memset(lse + used * heads, 0, (tokens - used) * heads * sizeof(float));
    const AttentionArguments arguments = {
        q.data<void>(), cache_of(key_cache), cache_of(value_cache), pages, width, starts, lengths, requests, heads,
        kv_heads, head_size, block_size, float(scale), out, lse};
    if constexpr (kReference)
      reference::attention<T>(arguments);
    else
      kernel.attention(parallel_for, arguments);
  });
  return result;
}

void reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& slot_mapping) {
  const char* op = "reshape_and_cache";
  const auto* slots = static_cast<const int64_t*>(index_data(op, "slot_mapping", slot_mapping, 1, aoti_torch_dtype_int64()));
  const int64_t tokens = slot_mapping.size(0);
  auto copy = [&](const char* name, const Tensor& from, const Tensor& to) {
    const Tensor rows = readable(op, name, from, &key);
    check_type(op, "a cache", to, &key);
    require(from.dim() == 3 && to.dim() == 4 && from.size(0) >= tokens && from.size(1) == to.size(1) &&
                from.size(2) == to.size(3) && to.stride(3) == 1,
            "%s: %s is %s and its cache %s; they must be [tokens, kv_heads, head_size] and [blocks, kv_heads, block_size, "
            "head_size]",
            op, name, Shape(from).text, Shape(to).text);
    const int64_t heads = from.size(1), block_size = to.size(2), element = is_bf16(to) ? 2 : 4;
    const int64_t row = from.size(2) * element, slot_count = to.size(0) * block_size;
    const Cache cache = cache_of(to);
    const char* source = rows.data<char>();
    char* target = to.data<char>();
    for (int64_t t = 0; t < tokens; ++t) {
      require(slots[t] < slot_count, "%s: slot %lld is outside of the cache; correct slot_mapping", op,
              Long(slots[t]));
      for (int64_t h = 0; h < heads && slots[t] >= 0; ++h) {
        const int64_t at = slots[t] / block_size * cache.block + h * cache.head + slots[t] % block_size * cache.slot;
        memcpy(target + at * element, source + (t * heads + h) * row, row);
      }
    }
  };
  copy("key", key, key_cache);
  copy("value", value, value_cache);
}

Tensor readable_logits(const char* op, const Tensor& logits) {
  require(logits.dim() == 2 && logits.size(1) > 0, "%s: logits is %s; it must be [rows, vocabulary]", op,
          Shape(logits).text);
  return readable(op, "logits", logits);
}

template <bool kReference>
Tensor log_softmax(const Tensor& logits) {
  const Tensor in = readable_logits(kReference ? "reference_log_softmax" : "log_softmax", logits);
  Tensor out = alike(logits, aoti_torch_dtype_float32());
  by_dtype(in, [&](const auto& table, auto zero) {
    using T = decltype(zero);
    if constexpr (kReference)
      reference::log_softmax<T>(in.data<T>(), out.data<float>(), in.size(0), in.size(1));
    else
      table.log_softmax(parallel_for, in.data<T>(), out.data<float>(), nullptr, nullptr, nullptr, in.size(0), in.size(1));
  });
  return out;
}

Pair selected_log_softmax(const Tensor& logits, const Tensor& index) {
  const char* op = "selected_log_softmax";
  const Tensor in = readable_logits(op, logits);
  const auto* chosen = static_cast<const int64_t*>(index_data(op, "index", index, 1, aoti_torch_dtype_int64()));
  require(index.size(0) == logits.size(0), "%s: index is %s and logits %s; there must be one index a row", op,
          Shape(index).text, Shape(logits).text);
  for (int64_t i = 0; i < index.size(0); ++i)
    require(chosen[i] >= 0 && chosen[i] < logits.size(1), "%s: index %lld is outside of the vocabulary of %lld; correct it",
            op, Long(chosen[i]), Long(logits.size(1)));
  const int32_t fp32 = aoti_torch_dtype_float32();
  Pair result = {stable::empty(1, logits.sizes(), fp32), stable::empty(1, logits.sizes(), fp32)};
  by_dtype(in, [&](const auto& table, auto zero) {
    using T = decltype(zero);
    table.log_softmax(parallel_for, in.data<T>(), nullptr, chosen, result.first.data<float>(),
                      result.second.data<float>(), in.size(0), in.size(1));
  });
  return result;
}

// Two sides whose names differ must not be compared. The instruction set is the least one that has these bits.
const char* contract() { return "batch-invariant-cpu-1 lanes16 kv64 fma x86-64-v3"; }

// Which of the two builds of the kernels runs here.
const char* instruction_set() { return kernels().instruction_set; }

struct Operator {
  const char* name;
  const char* arguments;
  void (*call)(uint64_t*, uint64_t, uint64_t);
};

constexpr const char kAttention[] =
    "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor query_start_loc, Tensor seq_lens, "
    "float scale) -> (Tensor, Tensor)";

const Operator kOnCpu[] = {
    {"linear", "(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", stable::Boxed<linear<false>>::call},
    {"rms_norm", "(Tensor x, Tensor weight, float epsilon) -> Tensor", stable::Boxed<rms_norm<false>>::call},
    {"add_rms_norm", "(Tensor x, Tensor residual, Tensor weight, float epsilon) -> (Tensor, Tensor)",
     stable::Boxed<add_rms_norm>::call},
    {"silu_and_mul", "(Tensor x) -> Tensor", stable::Boxed<silu_and_mul<false>>::call},
    {"rotary_embedding",
     "(Tensor positions, Tensor query, Tensor key, int head_size, Tensor cos_sin_cache) -> (Tensor, Tensor)",
     stable::Boxed<rotary_embedding>::call},
    {"attention", kAttention, stable::Boxed<attention<false>>::call},
    {"reshape_and_cache",
     "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping) -> ()",
     stable::Boxed<reshape_and_cache>::call},
    {"log_softmax", "(Tensor logits) -> Tensor", stable::Boxed<log_softmax<false>>::call},
    {"selected_log_softmax", "(Tensor logits, Tensor index) -> (Tensor, Tensor)",
     stable::Boxed<selected_log_softmax>::call},
    {"reference_linear", "(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", stable::Boxed<linear<true>>::call},
    {"reference_rms_norm", "(Tensor x, Tensor weight, float epsilon) -> Tensor", stable::Boxed<rms_norm<true>>::call},
    {"reference_silu_and_mul", "(Tensor x) -> Tensor", stable::Boxed<silu_and_mul<true>>::call},
    {"reference_attention", kAttention, stable::Boxed<attention<true>>::call},
    {"reference_log_softmax", "(Tensor logits) -> Tensor", stable::Boxed<log_softmax<true>>::call},
};
const Operator kAnywhere[] = {
    {"contract", "() -> str", stable::Boxed<contract>::call},
    {"instruction_set", "() -> str", stable::Boxed<instruction_set>::call},
};

template <int N>
void define(void* definitions, const char* key, const Operator (&operators)[N]) {
  void* implementations = nullptr;
  stable::done(aoti_torch_library_init_impl("batch_invariant", key, "library.cpp", 0, &implementations));
  for (const Operator& o : operators) {
    char schema[512];
    snprintf(schema, sizeof schema, "%s%s", o.name, o.arguments);
    stable::done(aoti_torch_library_def(definitions, schema));
    stable::done(aoti_torch_library_impl(implementations, o.name, o.call));
  }
}

// Once, when the library is loaded. The handles stay: operators live as long as the process.
__attribute__((constructor)) void load_operators() {
  void* definitions = nullptr;
  stable::done(aoti_torch_library_init_fragment("batch_invariant", "library.cpp", 0, &definitions));
  define(definitions, "CPU", kOnCpu);
  define(definitions, "CompositeExplicitAutograd", kAnywhere);
}

}  // namespace
}  // namespace batch_invariant
