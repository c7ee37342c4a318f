// torch.ops.batch_invariant.decode_attention on Hopper: arguments checked, the two kernels launched.

#include "driver.h"

namespace batch_invariant {
namespace {

using stable::require;
using stable::Shape;
using stable::Tensor;

alignas(64) const unsigned char kImage[] = {
#embed "sm90_bf16_attention_decode.cubin"
};
cuda::Module module(kImage, "compute capability 9.0");

// As in the kernels.
constexpr int64_t kHead = 128, kKeys = 128, kMostGroup = 8, kSlice = 32, kStages = 8, kScorePitch = kKeys + 8, kWarps = 11;
constexpr int64_t kSharedBytes = 196 * 1024;  // what a block may have besides what the kernels hold by name
constexpr int64_t kAlignment = 1024;           // lost where the rings begin
constexpr int64_t kBlocksAtOnce = 3 * 132;    // of attention_scores on a card

// As in the kernels.
struct Arguments {
  const void *query, *key, *value;
  void *key_cache, *value_cache;
  const void *pages, *lengths, *slots;
  void *scores, *peaks, *out;
  int64_t query_stride, key_stride, value_stride, out_stride, page_stride, token_stride, head_stride, table_stride;
  int32_t group, kv_heads, page_shift, most_blocks;
  float scale;
};

struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// The map of a cache (values, tokens of a page, kv heads, pages) in boxes of 16 tokens and `box` values, 2 * box bytes a row.
TensorMap tensor_map(const char* op, const Tensor& cache, int64_t box) {
  TensorMap map;
  const int64_t token = cache.stride(1), head = cache.size(2) > 1 ? cache.stride(2) : cache.stride(0), page = cache.stride(0);
  const uint64_t sizes[4] = {uint64_t(kHead), uint64_t(cache.size(1)), uint64_t(cache.size(2)), uint64_t(cache.size(0))},
                 strides[3] = {uint64_t(token) * 2, uint64_t(head) * 2, uint64_t(page) * 2};
  const uint32_t boxes[4] = {uint32_t(box), 16, 1, 1}, steps[4] = {1, 1, 1, 1};
  constexpr int32_t kBf16 = 9, kNoInterleave = 0, kSwizzle64 = 2, kSwizzle128 = 3, kPromotion256 = 3, kZeros = 0;
  const int32_t error =
      cuda::Driver::get().encode_tiled(&map, kBf16, 4, cache.data<void>(), sizes, strides, boxes, steps, kNoInterleave,
                                       box * 2 == 64 ? kSwizzle64 : kSwizzle128, kPromotion256, kZeros);
  require(!error, "%s: the cache cannot be read in tiles; its address and strides must be multiples of 16 bytes", op);
  return map;
}

// A [requests, heads, 128] tensor whose heads lie in a row; the stride between requests.
const void* heads(const char* op, const char* name, const Tensor& t, int64_t requests, int64_t& stride) {
  require(cuda::is_cuda(t) && cuda::is_bf16(t), "%s: %s is not bfloat16 on a CUDA device; convert it", op, name);
  require(t.dim() == 3 && t.size(2) == kHead && t.size(0) == requests && t.stride(2) == 1 &&
              (t.size(1) == 1 || t.stride(1) == kHead),
          "%s: %s is %s for %lld requests; it must be [requests, heads, 128], a request's heads side by side", op, name,
          Shape(t).text, (long long)requests);
  stride = t.stride(0);
  const void* data = t.data<void>();
  require(stride % 8 == 0 && reinterpret_cast<uint64_t>(data) % 16 == 0,
          "%s: %s begins or steps at no multiple of 16 bytes; align it", op, name);
  return data;
}

enum Kernel { kScores, kValues };

// A kernel, made ready once for a device.
void* prepared(Kernel which, int32_t index) {
  static void* kernels[2][16];
  const char* name = which == kScores ? "attention_scores" : "attention_values";
  require(index < 16, "%s: device %d; 16 devices are the most", name, index);
  void*& kept = kernels[which][index];
  if (!kept) {
    void* kernel = module.kernel(name);
    const cuda::Driver& driver = cuda::Driver::get();
    driver.check(driver.kernel_attribute(cuda::kMaxDynamicShared, kSharedBytes, kernel, index), "cuKernelSetAttribute", name);
    __atomic_store_n(&kept, kernel, __ATOMIC_RELEASE);
  }
  return kept;
}

void decode_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_cache,
                      const Tensor& value_cache, const Tensor& block_table, const Tensor& lengths, const Tensor& slots,
                      const double& scale, const Tensor& out) {
  const char* op = "decode_attention";
  const int64_t requests = query.dim() ? query.size(0) : 0;
  if (!requests) return;
  Arguments a = {};
  a.query = heads(op, "query", query, requests, a.query_stride);
  a.key = heads(op, "key", key, requests, a.key_stride);
  a.value = heads(op, "value", value, requests, a.value_stride);
  a.out = const_cast<void*>(heads(op, "out", out, requests, a.out_stride));
  const int64_t kv_heads = key.size(1), group = query.size(1) / kv_heads;
  require(value.size(1) == kv_heads && out.size(1) == query.size(1) && group * kv_heads == query.size(1) && group <= kMostGroup,
          "%s: query is %s and key %s; there may be 1 to 8 query heads a key head", op, Shape(query).text, Shape(key).text);
  const int64_t page = key_cache.dim() == 4 ? key_cache.size(1) : 0;
  require(key_cache.dim() == 4 && key_cache.same_sizes(value_cache) && key_cache.size(2) == kv_heads &&
              key_cache.size(3) == kHead && page >= 16 && !(page & (page - 1)) && key_cache.stride(3) == 1 &&
              value_cache.stride(3) == 1,
          "%s: the cache is %s; it must be [pages, page, kv heads, 128], a page of 16, 32, 64, ... tokens", op,
          Shape(key_cache).text);
  require(cuda::is_bf16(key_cache) && cuda::is_bf16(value_cache), "%s: the cache is not bfloat16", op);
  for (int64_t i = 0; i < 3; ++i)
    require(key_cache.stride(i) == value_cache.stride(i) && key_cache.stride(i) % 8 == 0,
            "%s: keys and values of the cache step differently, or at no multiple of 16 bytes", op);
  const int32_t int32 = aoti_torch_dtype_int32();
  require(block_table.dim() == 2 && block_table.size(0) >= requests && block_table.dtype() == int32 && block_table.stride(1) == 1 &&
              lengths.dim() == 1 && lengths.size(0) >= requests && lengths.dtype() == int32 && lengths.stride(0) == 1,
          "%s: block_table is %s and lengths %s for %lld requests; give it int32, a row and a value a request", op,
          Shape(block_table).text, Shape(lengths).text, (long long)requests);
  require(slots.dim() == 1 && slots.size(0) >= requests && slots.dtype() == aoti_torch_dtype_int64() && slots.stride(0) == 1,
          "%s: slots is %s for %lld requests; give it int64, a value a request", op, Shape(slots).text, (long long)requests);
  const cuda::Place place(query);
  a.key_cache = key_cache.data<void>(), a.value_cache = value_cache.data<void>();
  a.pages = block_table.data<void>(), a.lengths = lengths.data<void>(), a.slots = slots.data<void>();
  a.page_stride = key_cache.stride(0), a.token_stride = key_cache.stride(1), a.head_stride = key_cache.stride(2);
  a.table_stride = block_table.stride(0);
  a.group = int32_t(group), a.kv_heads = int32_t(kv_heads), a.page_shift = __builtin_ctzll(page);
  a.most_blocks = int32_t((block_table.size(1) * page + kKeys - 1) / kKeys);
  a.scale = float(scale) * 1.44269504088896340736f;
  const int64_t rows = requests * kv_heads * group, sizes[1] = {rows * a.most_blocks * (kScorePitch + 1)};
  const Tensor scratch = cuda::empty(1, sizes, aoti_torch_dtype_float32(), place.index);
  a.scores = scratch.data<float>(), a.peaks = scratch.data<float>() + rows * a.most_blocks * kScorePitch;

  const int64_t at_once = kBlocksAtOnce / (requests * kv_heads);
  const int64_t ranges = at_once < 1 ? 1 : at_once < a.most_blocks ? at_once : a.most_blocks;
  const int64_t most_pages = block_table.size(1), pages_each = ((a.most_blocks + ranges - 1) / ranges * kKeys / page) + 2;
  const int64_t for_scores = kAlignment + 2 * kKeys * kHead * 2 + pages_each * 4;
  const int64_t for_values =
      kAlignment + kStages * (kKeys * kSlice * 2 + group * kScorePitch * 4) + (group * a.most_blocks + most_pages) * 4;
  require(for_scores < kSharedBytes && for_values <= kSharedBytes, "%s: %lld pages of %lld tokens a request; fewer fit", op,
          (long long)most_pages, (long long)page);
  const TensorMap keys = tensor_map(op, key_cache, 64), values = tensor_map(op, value_cache, kSlice);
  const uint32_t scores[3] = {uint32_t(ranges), uint32_t(kv_heads), uint32_t(requests)};
  cuda::launch(prepared(kScores, place.index), op, place.stream, scores, 128, uint32_t(for_scores), true, keys, values, a);
  const uint32_t slices[3] = {uint32_t(kHead / kSlice), uint32_t(kv_heads), uint32_t(requests)};
  cuda::launch(prepared(kValues, place.index), op, place.stream, slices, kWarps * 32, uint32_t(for_values), true, keys, values,
               a);
}

__attribute__((constructor)) void enroll() {
  void *library = nullptr, *implementations = nullptr;
  stable::done(aoti_torch_library_init_fragment("batch_invariant", "attention.cpp", 0, &library));
  stable::done(aoti_torch_library_def(
      library,
      "decode_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor block_table, "
      "Tensor lengths, Tensor slots, float scale, Tensor(c!) out) -> ()"));
  stable::done(aoti_torch_library_init_impl("batch_invariant", "CUDA", "attention.cpp", 0, &implementations));
  stable::done(aoti_torch_library_impl(implementations, "decode_attention", stable::Boxed<decode_attention>::call));
}

}  // namespace
}  // namespace batch_invariant
