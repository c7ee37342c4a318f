// What this library needs of torch, through the C functions of its stable ABI alone: no header and no C++ runtime of
// anybody's, so that the library is made from its own sources and a compiler.
//
// Functions here do not throw. An error is raised by torch itself (aoti_torch_check); its exception passes through our
// frames, which have no handlers, and what they held is lost with it: wrong arguments end a run anyway.
#pragma once

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern "C" {
int32_t aoti_torch_get_dim(void* tensor, int64_t* dim);
int32_t aoti_torch_get_numel(void* tensor, int64_t* numel);
int32_t aoti_torch_get_sizes(void* tensor, int64_t** sizes);
int32_t aoti_torch_get_strides(void* tensor, int64_t** strides);
int32_t aoti_torch_get_dtype(void* tensor, int32_t* dtype);
int32_t aoti_torch_get_device_type(void* tensor, int32_t* device);
int32_t aoti_torch_get_data_ptr(void* tensor, void** data);
int32_t aoti_torch_is_contiguous(void* tensor, bool* contiguous);
int32_t aoti_torch_new_tensor_handle(void* tensor, void** handle);
int32_t aoti_torch_delete_tensor_object(void* tensor);
int32_t aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device,
                                 int32_t index, void** tensor);
int32_t aoti_torch_call_dispatcher(const char* op, const char* overload, uint64_t* stack);
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_memory_format_contiguous_format();
void aoti_torch_check(bool holds, const char* function, const char* file, uint32_t line, const char* message);
int32_t aoti_torch_library_init_fragment(const char* space, const char* file, uint32_t line, void** library);
int32_t aoti_torch_library_init_impl(const char* space, const char* key, const char* file, uint32_t line, void** library);
int32_t aoti_torch_library_def(void* library, const char* schema);
int32_t aoti_torch_library_impl(void* library, const char* name, void (*function)(uint64_t*, uint64_t, uint64_t));
int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);
int32_t torch_new_string_handle(const char* text, size_t length, void** handle);
}

namespace stable {

// Raises RuntimeError with a message in the manner of printf, unless `holds`.
__attribute__((format(printf, 2, 3))) inline void require(bool holds, const char* format, ...) {
  if (holds) return;
  char message[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  aoti_torch_check(false, "batch_invariant", "library.cpp", 0, message);
}

inline void done(int32_t error) { require(error == 0, "batch_invariant: a call into torch failed"); }

// An owned reference to a tensor; or none, for an optional argument.
class Tensor {
  void* handle_ = nullptr;

 public:
  Tensor() = default;
  explicit Tensor(void* owned) : handle_(owned) {}
  Tensor(Tensor&& other) : handle_(other.release()) {}
  Tensor(const Tensor& other) {
    if (other.handle_) done(aoti_torch_new_tensor_handle(other.handle_, &handle_));
  }
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  explicit operator bool() const { return handle_; }
  void adopt(void* owned) {
    this->~Tensor();
    handle_ = owned;
  }
  void* release() {
    void* handle = handle_;
    handle_ = nullptr;
    return handle;
  }
  template <class Result>
  Result ask(int32_t (*question)(void*, Result*)) const {
    Result answer{};
    done(question(handle_, &answer));
    return answer;
  }
  int64_t dim() const { return ask(aoti_torch_get_dim); }
  int64_t numel() const { return ask(aoti_torch_get_numel); }
  const int64_t* sizes() const { return ask(aoti_torch_get_sizes); }
  int64_t size(int64_t i) const { return sizes()[i]; }
  int64_t stride(int64_t i) const { return ask(aoti_torch_get_strides)[i]; }
  int64_t last() const { return dim() ? size(dim() - 1) : 1; }
  int32_t dtype() const { return ask(aoti_torch_get_dtype); }
  bool is_contiguous() const { return ask(aoti_torch_is_contiguous); }
  bool is_cpu() const { return ask(aoti_torch_get_device_type) == aoti_torch_device_type_cpu(); }
  template <class T>
  T* data() const {
    return static_cast<T*>(ask(aoti_torch_get_data_ptr));
  }
  bool same_sizes(const Tensor& other) const {
    return dim() == other.dim() && !memcmp(sizes(), other.sizes(), dim() * sizeof(int64_t));
  }
  // Itself, or a copy with its elements in a row.
  Tensor contiguous() const {
    if (is_contiguous()) return *this;
    uint64_t stack[2] = {reinterpret_cast<uint64_t>(Tensor(*this).release()),
                         uint64_t(uint32_t(aoti_torch_memory_format_contiguous_format()))};
    done(aoti_torch_call_dispatcher("aten::contiguous", "", stack));
    return Tensor(reinterpret_cast<void*>(stack[0]));
  }
};

// A new contiguous tensor on the CPU, its memory not set.
inline Tensor empty(int64_t dim, const int64_t* sizes, int32_t dtype) {
  int64_t strides[16], step = 1;
  require(dim <= 16, "batch_invariant: a tensor of %lld dimensions; 16 are the most", (long long)dim);
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[i] = step;
    step *= sizes[i] > 1 ? sizes[i] : 1;
  }
  void* handle = nullptr;
  done(aoti_torch_empty_strided(dim, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

// The shape of a tensor as text, for a message.
struct Shape {
  char text[128];
  explicit Shape(const Tensor& t) {
    size_t used = snprintf(text, sizeof text, "[");
    for (int64_t i = 0; i < t.dim() && used < sizeof text; ++i)
      used += snprintf(text + used, sizeof text - used, i ? ", %lld" : "%lld", (long long)t.size(i));
    if (used < sizeof text) snprintf(text + used, sizeof text - used, "]");
  }
};

// From the 64-bit values of a call to typed arguments, which the callee owns, and back.
inline void take(uint64_t value, Tensor& out) { out.adopt(reinterpret_cast<void*>(value)); }
inline void take(uint64_t value, double& out) { memcpy(&out, &value, sizeof out); }
inline void take(uint64_t value, int64_t& out) { out = int64_t(value); }
inline void take(uint64_t value, bool& out) { out = value & 1; }

// An optional tensor comes as a pointer to its value, made with operator new, or as null.
struct Optional {
  Tensor tensor;
};
inline void take(uint64_t value, Optional& out) {
  uint64_t* inner = reinterpret_cast<uint64_t*>(value);
  if (!inner) return;
  take(*inner, out.tensor);
  free(inner);
}

struct Pair {
  Tensor first, second;
};
inline void give(uint64_t* stack, Tensor&& t) { stack[0] = reinterpret_cast<uint64_t>(t.release()); }
inline void give(uint64_t* stack, Pair&& p) {
  give(stack, static_cast<Tensor&&>(p.first));
  give(stack + 1, static_cast<Tensor&&>(p.second));
}
inline void give(uint64_t* stack, const char* text) {
  void* handle = nullptr;
  done(torch_new_string_handle(text, strlen(text), &handle));
  stack[0] = reinterpret_cast<uint64_t>(handle);
}

template <int... I>
struct Indices {};
template <int N, int... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <int... I>
struct Count<0, I...> {
  using type = Indices<I...>;
};
template <int I, class T>
struct Slot {
  T value{};
};
template <class, class...>
struct Slots;
template <int... I, class... T>
struct Slots<Indices<I...>, T...> : Slot<I, T>... {};
template <int I, class T>
T& slot(Slot<I, T>& s) {
  return s.value;
}
template <class T>
struct Bare {
  using type = T;
};
template <class T>
struct Bare<const T&> {
  using type = T;
};

// The function as torch calls it.
template <auto F>
struct Boxed;
template <class R, class... A, R (*F)(A...)>
struct Boxed<F> {
  template <int... I>
  static void spread(uint64_t* stack, Indices<I...>) {
    Slots<Indices<I...>, typename Bare<A>::type...> s;
    (take(stack[I], slot<I>(s)), ...);
    if constexpr (__is_same(R, void))
      F(slot<I>(s)...);
    else
      give(stack, F(slot<I>(s)...));
  }
  static void call(uint64_t* stack, uint64_t, uint64_t) { spread(stack, typename Count<sizeof...(A)>::type{}); }
};

}  // namespace stable
