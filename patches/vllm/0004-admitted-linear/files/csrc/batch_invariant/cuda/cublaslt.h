// The product by cuBLASLt without split-K. Its choice of a kernel, a fifth of a millisecond's work,
// is kept by shape: a forward pass asks for the same few shapes again and again.
#pragma once

#include "driver.h"

namespace cublaslt {

using cuda::Product;
using stable::require;

// The structures and numbers of the library's interface, cuBLAS 13.
struct Algorithm {
  uint64_t words[8];
};
struct Choice {
  Algorithm algorithm;
  size_t workspace;
  int32_t state;
  float waves;
  int32_t reserved[4];
};
static_assert(sizeof(Choice) == 96);
constexpr int32_t kCompute32F = 68, kFloat = 0, kBf16 = 14, kTransposed = 1;
constexpr int32_t kTransA = 3;                                             // cublasLtMatmulDescAttributes_t
constexpr int32_t kMaxWorkspace = 1, kReductionSchemes = 3, kAlignmentA = 5;  // cublasLtMatmulPreferenceAttributes_t
constexpr int64_t kWorkspace = 1024;                                       // bytes
constexpr int32_t kSplitK = 2;                                             // cublasLtMatmulAlgoConfigAttributes_t

struct Library {
  void* handle;
  void *product, *preference;  // the descriptions that all products share
  int32_t (*layout_create)(void**, int32_t, uint64_t, uint64_t, int64_t);
  int32_t (*layout_destroy)(void*);
  int32_t (*preference_set)(void*, int32_t, const void*, size_t);
  int32_t (*choose)(void*, void*, void*, void*, void*, void*, void*, int32_t, Choice*, int32_t*);
  int32_t (*config)(const Algorithm*, int32_t, void*, size_t, size_t*);
  int32_t (*multiply)(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*,
                      void*, const Algorithm*, void*, size_t, void*);

  // One a device: a handle belongs to the context in which it was made.
  static const Library& get(int32_t index) {
    static Library* libraries[16];
    require(index < 16, "batch_invariant: device %d; 16 devices are the most", index);
    if (!libraries[index]) {
      void* so = dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_GLOBAL);
      require(so, "batch_invariant: libcublasLt.so.13 does not load; install the cuBLAS that torch asks for");
      Library* l = static_cast<Library*>(calloc(1, sizeof(Library)));
      int32_t (*create)(void**) = nullptr;
      int32_t (*product_create)(void**, int32_t, int32_t) = nullptr;
      int32_t (*product_set)(void*, int32_t, const void*, size_t) = nullptr;
      int32_t (*preference_create)(void**) = nullptr;
      find(so, "cublasLtCreate", create);
      find(so, "cublasLtMatmulDescCreate", product_create);
      find(so, "cublasLtMatmulDescSetAttribute", product_set);
      find(so, "cublasLtMatmulPreferenceCreate", preference_create);
      find(so, "cublasLtMatmulPreferenceSetAttribute", l->preference_set);
      find(so, "cublasLtMatrixLayoutCreate", l->layout_create);
      find(so, "cublasLtMatrixLayoutDestroy", l->layout_destroy);
      find(so, "cublasLtMatmulAlgoGetHeuristic", l->choose);
      find(so, "cublasLtMatmulAlgoConfigGetAttribute", l->config);
      find(so, "cublasLtMatmul", l->multiply);
      check(create(&l->handle), "cublasLtCreate");
      check(product_create(&l->product, kCompute32F, kFloat), "cublasLtMatmulDescCreate");
      check(product_set(l->product, kTransA, &kTransposed, sizeof kTransposed), "cublasLtMatmulDescSetAttribute");
      check(preference_create(&l->preference), "cublasLtMatmulPreferenceCreate");
      // Asked with room for splitting K, the library ranks its kernels as if they split it, and then strips that: a slow one
      // comes first. Some kernels want a little for other ends.
      const size_t little = kWorkspace;
      const uint32_t no_scheme = 0;  // of splitting K
      check(l->preference_set(l->preference, kMaxWorkspace, &little, sizeof little), "cublasLtMatmulPreferenceSetAttribute");
      check(l->preference_set(l->preference, kReductionSchemes, &no_scheme, sizeof no_scheme),
            "cublasLtMatmulPreferenceSetAttribute");
      __atomic_store_n(&libraries[index], l, __ATOMIC_RELEASE);
    }
    return *libraries[index];
  }

  static void check(int32_t error, const char* call) {
    require(!error, "batch_invariant: %s returned %d", call, error);
  }

 private:
  template <class F>
  static void find(void* library, const char* name, F*& function) {
    function = reinterpret_cast<F*>(dlsym(library, name));
    require(function, "batch_invariant: cuBLAS has no %s; install the one that torch asks for", name);
  }
};

// What a choice was made for. Addresses count by their alignment alone.
struct Key {
  int64_t m, n, k, x_stride, weight_stride;
  int32_t alignment, index;
};

struct Entry {
  Key key;
  Algorithm algorithm;
  bool known, usable;
};

// Column-major, as the library sees them: weight [K, N] transposed, times x [K, M], is out [N, M].
struct Layouts {
  const Library& library;
  void *weight = nullptr, *x = nullptr, *out = nullptr;
  Layouts(const Library& l, const Key& key) : library(l) {
    l.layout_create(&weight, kBf16, key.k, key.n, key.weight_stride);
    l.layout_create(&x, kBf16, key.k, key.m, key.x_stride);
    l.layout_create(&out, kBf16, key.n, key.m, key.n);
  }
  Layouts(const Layouts&) = delete;
  ~Layouts() {
    if (weight) library.layout_destroy(weight);
    if (x) library.layout_destroy(x);
    if (out) library.layout_destroy(out);
  }
  bool made() const { return weight && x && out; }
};

inline uint32_t alignment_of(const void* p) {
  const uint64_t address = reinterpret_cast<uint64_t>(p), lowest = address & (~address + 1);
  return !address || lowest > 256 ? 256 : uint32_t(lowest);
}

// The library's first choice that splits no K; not usable if there is none.
inline void choose(const Library& l, const Layouts& layouts, Entry& e) {
  const uint32_t alignment = e.key.alignment;
  for (int32_t i = 0; i < 4; ++i) l.preference_set(l.preference, kAlignmentA + i, &alignment, sizeof alignment);
  Choice choices[8];
  int32_t count = 0;
  if (l.choose(l.handle, l.product, layouts.weight, layouts.x, layouts.out, layouts.out, l.preference, 8, choices, &count)) return;
  for (int32_t i = 0; i < count && !e.usable; ++i) {
    uint32_t split = 0;
    size_t written = 0;
    if (choices[i].state || choices[i].workspace > kWorkspace) continue;
    if (l.config(&choices[i].algorithm, kSplitK, &split, sizeof split, &written) || split > 1) continue;
    e.algorithm = choices[i].algorithm;
    e.usable = true;
  }
}

// The choice for a product, made at first use. All are forgotten when the table is full: made again they are the same.
inline Entry entry_of(const Library& l, const Layouts& layouts, const Key& key) {
  constexpr uint32_t kEntries = 16384;
  static Entry* entries = nullptr;
  static uint32_t used = 0;
  static int32_t busy = 0;
  uint64_t hash = 1469598103934665603ull;
  for (size_t i = 0; i < sizeof key / 8; ++i) {
    uint64_t word;
    memcpy(&word, reinterpret_cast<const char*>(&key) + 8 * i, 8);
    hash = (hash ^ word) * 1099511628211ull;
    hash ^= hash >> 29;
  }
  while (__atomic_exchange_n(&busy, 1, __ATOMIC_ACQUIRE)) {
  }
  if (!entries) entries = static_cast<Entry*>(calloc(kEntries, sizeof(Entry)));
  if (used > kEntries / 2) {
    memset(entries, 0, kEntries * sizeof(Entry));
    used = 0;
  }
  uint32_t at = hash % kEntries;
  while (entries[at].known && memcmp(&entries[at].key, &key, sizeof key)) at = (at + 1) % kEntries;
  Entry& e = entries[at];
  if (!e.known) {
    e.key = key;
    choose(l, layouts, e);
    e.known = true;
    ++used;
  }
  const Entry found = e;
  __atomic_store_n(&busy, 0, __ATOMIC_RELEASE);
  return found;
}

// out = x weight^T in bf16. False if the library has no way to do it without splitting K.
inline bool multiply(const Product& p, const void* x, const void* weight, void* out, const cuda::Place& place) {
  const uint32_t a = alignment_of(x), b = alignment_of(weight), c = alignment_of(out);
  const Library& l = Library::get(place.index);
  const Key key = {p.m, p.n, p.k, p.m > 1 ? p.x_stride : p.k, p.weight_stride, int32_t(a < b ? (a < c ? a : c) : (b < c ? b : c)),
                   place.index};
  const Layouts layouts(l, key);
  if (!layouts.made()) return false;
  const Entry e = entry_of(l, layouts, key);
  if (!e.usable) return false;
  const int64_t bytes = kWorkspace / 4;
  const stable::Tensor workspace = cuda::empty(1, &bytes, aoti_torch_dtype_float32(), place.index);
  const float one = 1, zero = 0;
  const int32_t error = l.multiply(l.handle, l.product, &one, weight, layouts.weight, x, layouts.x, &zero, out, layouts.out, out,
                                   layouts.out, &e.algorithm, workspace.data<void>(), kWorkspace, place.stream);
  return !error;
}

}  // namespace cublaslt
