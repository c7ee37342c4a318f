// The product that defines the bits on a CUDA device: out[M, N] = x[M, K] weight[N, K]^T, bf16 in, and nothing clever.
//
// Sequential K: an output is a chain of k16 steps of the tensor core from zero, in order; K that is not a multiple of 16
// ends in zeros. A warp computes 16 rows by 8 columns, each value read from where it lies.

__device__ __forceinline__ unsigned short value(const unsigned short* p, long long row, long long rows, long long stride, int k, int depth) {
  return row < rows && k < depth ? p[row * stride + k] : 0;
}

__device__ __forceinline__ unsigned pair(const unsigned short* p, long long row, long long rows, long long stride, int k, int depth) {
  return value(p, row, rows, stride, k, depth) | unsigned(value(p, row, rows, stride, k + 1, depth)) << 16;
}

__device__ __forceinline__ unsigned short to_bf16(float x) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

extern "C" __global__ void reference_gemm(const unsigned short* x, const unsigned short* weight, const unsigned short* bias,
                                          void* out, long long m, long long n, int depth, long long x_stride,
                                          long long weight_stride, int fp32) {
  const int lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
  const long long row = blockIdx.y * 16ll, column = (blockIdx.x * (blockDim.x / 32ll) + threadIdx.x / 32) * 8;
  if (column >= n) return;
  float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int k = 0; k < depth; k += 16) {
    const int low = k + 2 * member, high = low + 8;
    const unsigned a0 = pair(x, row + group, m, x_stride, low, depth), a1 = pair(x, row + group + 8, m, x_stride, low, depth);
    const unsigned a2 = pair(x, row + group, m, x_stride, high, depth), a3 = pair(x, row + group + 8, m, x_stride, high, depth);
    const unsigned b0 = pair(weight, column + group, n, weight_stride, low, depth);
    const unsigned b1 = pair(weight, column + group, n, weight_stride, high, depth);
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
  for (int i = 0; i < 4; ++i) {
    const long long r = row + group + i / 2 * 8, c = column + 2 * member + i % 2;
    if (r >= m || c >= n) continue;
    if (fp32) {
      static_cast<float*>(out)[r * n + c] = d[i];
      continue;
    }
    unsigned short bits = to_bf16(d[i]);
    // The product is rounded, then the sum with the bias: two operators of torch.
    if (bias) bits = to_bf16(__uint_as_float(unsigned(bits) << 16) + __uint_as_float(unsigned(bias[c]) << 16));
    static_cast<unsigned short*>(out)[r * n + c] = bits;
  }
}
