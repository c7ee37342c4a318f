// What a library with kernels needs of CUDA and of torch on a CUDA device: the driver's functions by name, at first use
// (a machine without a GPU loads the library too), and the stream, device and memory that torch uses.
#pragma once

#include <dlfcn.h>

#include "../cpu/stable.h"

extern "C" {
int32_t aoti_torch_device_type_cuda();
int32_t aoti_torch_get_device_index(void* tensor, int32_t* index);
int32_t aoti_torch_get_current_cuda_stream(int32_t index, void** stream);
int32_t aoti_torch_create_cuda_guard(int32_t index, void** guard);
int32_t aoti_torch_delete_cuda_guard(void* guard);
}

namespace cuda {

using stable::done;
using stable::require;
using stable::Tensor;

// The structures and numbers of the driver's interface, CUDA 13.
struct LaunchAttribute {
  int32_t id;
  int32_t unused;
  union {
    char bytes[64];
    int32_t flag;
  };
};
struct LaunchConfig {
  uint32_t grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  uint32_t count;
};
static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56);
constexpr int32_t kProgrammaticStreamSerialization = 6;  // CUlaunchAttributeID
constexpr int32_t kMultiprocessors = 16;                 // CUdevice_attribute
constexpr int32_t kMaxDynamicShared = 8;                 // CUfunction_attribute

struct Driver {
  int32_t (*library_load)(void**, const void*, void*, void*, uint32_t, void*, void*, uint32_t);
  int32_t (*library_kernel)(void**, void*, const char*);
  int32_t (*kernel_attribute)(int32_t, int32_t, void*, int32_t);
  int32_t (*launch)(const LaunchConfig*, void*, void**, void**);
  int32_t (*device_attribute)(int32_t*, int32_t, int32_t);
  int32_t (*error_name)(int32_t, const char**);
  int32_t (*encode_tiled)(void* map, int32_t type, uint32_t rank, void* address, const uint64_t* sizes, const uint64_t* strides,
                          const uint32_t* box, const uint32_t* steps, int32_t interleave, int32_t swizzle, int32_t promotion,
                          int32_t fill);

  static const Driver& get() {
    static Driver* driver = nullptr;  // made twice by two threads at once, at worst
    if (!driver) {
      void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
      require(library, "batch_invariant: libcuda.so.1 does not load; install the NVIDIA driver");
      Driver* d = static_cast<Driver*>(malloc(sizeof(Driver)));
      find(library, "cuLibraryLoadData", d->library_load);
      find(library, "cuLibraryGetKernel", d->library_kernel);
      find(library, "cuKernelSetAttribute", d->kernel_attribute);
      find(library, "cuLaunchKernelEx", d->launch);
      find(library, "cuDeviceGetAttribute", d->device_attribute);
      find(library, "cuGetErrorName", d->error_name);
      find(library, "cuTensorMapEncodeTiled", d->encode_tiled);
      __atomic_store_n(&driver, d, __ATOMIC_RELEASE);
    }
    return *driver;
  }

  void check(int32_t error, const char* call, const char* what) const {
    const char* name = "an unknown error";
    if (error) error_name(error, &name);
    require(!error, "batch_invariant: %s of %s failed with %s", call, what, name);
  }

 private:
  template <class F>
  static void find(void* library, const char* name, F*& function) {
    function = reinterpret_cast<F*>(dlsym(library, name));
    require(function, "batch_invariant: the NVIDIA driver has no %s; install one for CUDA 12.4 or later", name);
  }
};

// The kernels of one cubin, loaded at first use, on every device of the process at once.
class Module {
  const void* image_;
  const char* architecture_;
  void* library_ = nullptr;

 public:
  constexpr Module(const void* image, const char* architecture) : image_(image), architecture_(architecture) {}
  void* kernel(const char* name) {
    const Driver& driver = Driver::get();
    if (!library_) {
      void* library = nullptr;
      const int32_t error = driver.library_load(&library, image_, nullptr, nullptr, 0, nullptr, nullptr, 0);
      require(!error, "batch_invariant: the kernels do not load (CUDA error %d); they are for %s alone", error, architecture_);
      __atomic_store_n(&library_, library, __ATOMIC_RELEASE);
    }
    void* kernel = nullptr;
    driver.check(driver.library_kernel(&kernel, library_, name), "cuLibraryGetKernel", name);
    return kernel;
  }
};

// Device and stream of a tensor, current while this lives.
class Place {
  void* guard_ = nullptr;

 public:
  int32_t index = 0;
  void* stream = nullptr;
  explicit Place(const Tensor& t) {
    index = t.ask(aoti_torch_get_device_index);
    done(aoti_torch_create_cuda_guard(index, &guard_));
    done(aoti_torch_get_current_cuda_stream(index, &stream));
  }
  Place(const Place&) = delete;
  ~Place() { aoti_torch_delete_cuda_guard(guard_); }
};

inline bool is_cuda(const Tensor& t) { return t.ask(aoti_torch_get_device_type) == aoti_torch_device_type_cuda(); }
inline bool is_bf16(const Tensor& t) { return t.dtype() == aoti_torch_dtype_bfloat16(); }

// A new contiguous tensor on a CUDA device, its memory not set.
inline Tensor empty(int64_t dim, const int64_t* sizes, int32_t dtype, int32_t index) {
  int64_t strides[16], step = 1;
  require(dim <= 16, "batch_invariant: a tensor of %lld dimensions; 16 are the most", (long long)dim);
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[i] = step;
    step *= sizes[i] > 1 ? sizes[i] : 1;
  }
  void* handle = nullptr;
  done(aoti_torch_empty_strided(dim, sizes, strides, dtype, aoti_torch_device_type_cuda(), index, &handle));
  return Tensor(handle);
}

// The arguments of a product of x [..., K] and weight [N, K], checked: bf16 on one CUDA device, K in a row in both.
struct Product {
  int64_t m = 1, n = 0, k = 0, x_stride = 0, weight_stride = 0;
  const void* bias = nullptr;

  Product(const char* op, const Tensor& x, const Tensor& weight, const Tensor& b) {
    using stable::Shape;
    require(x.dim() >= 1 && weight.dim() == 2 && weight.size(1) == x.last(),
            "%s: x is %s and weight %s; give it [..., K] and [N, K]", op, Shape(x).text, Shape(weight).text);
    require(is_cuda(x) && is_cuda(weight) && (!b || is_cuda(b)), "%s: an argument is not on a CUDA device; move it there", op);
    require(is_bf16(x) && is_bf16(weight) && (!b || is_bf16(b)), "%s: an argument is not bfloat16; convert it", op);
    n = weight.size(0), k = weight.size(1);
    for (int64_t i = 0; i + 1 < x.dim(); ++i) m *= x.size(i);
    require(k <= 1 || (x.stride(x.dim() - 1) == 1 && weight.stride(1) == 1),
            "%s: K does not lie in a row; make x and weight contiguous", op);
    require(x.dim() == 2 || x.is_contiguous(), "%s: x of %lld dimensions is not contiguous; make it so", op, (long long)x.dim());
    x_stride = x.dim() == 2 ? x.stride(0) : k;
    weight_stride = weight.stride(0);
    if (b) {
      require(b.dim() == 1 && b.size(0) == n && b.is_contiguous(), "%s: bias is %s; it must be [N], contiguous", op,
              Shape(b).text);
      bias = b.data<void>();
    }
  }

  Tensor result(const Tensor& x, bool fp32, int32_t index) const {
    int64_t sizes[16];
    memcpy(sizes, x.sizes(), x.dim() * sizeof(int64_t));
    sizes[x.dim() - 1] = n;
    return empty(x.dim(), sizes, fp32 ? aoti_torch_dtype_float32() : aoti_torch_dtype_bfloat16(), index);
  }
};

// Launches with each parameter by its address. With `dependent`, the kernel may start before the one ahead of it has ended,
// and waits in itself.
template <class... Parameters>
void launch(void* kernel, const char* name, void* stream, const uint32_t (&grid)[3], uint32_t threads, uint32_t shared,
            bool dependent, Parameters&... parameters) {
  void* list[] = {const_cast<void*>(static_cast<const void*>(&parameters))...};
  LaunchAttribute attribute = {};
  attribute.id = kProgrammaticStreamSerialization;
  attribute.flag = 1;
  const LaunchConfig config = {grid[0], grid[1], grid[2], threads, 1, 1, shared, stream, &attribute, dependent};
  const Driver& driver = Driver::get();
  driver.check(driver.launch(&config, kernel, list, nullptr), "the launch", name);
}

}  // namespace cuda
