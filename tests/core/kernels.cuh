// Kernels of tests/core/test_jit.py and test_cubin.py. Each is compiled alone, after the lines above the first kernel.

__device__ __forceinline__ void multiply(float (&d)[4], unsigned long long a, int accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %4, p, 1, 1;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "r"(accumulate));
}
#define FENCE() asm volatile("wgmma.fence.sync.aligned;" ::: "memory")
#define COMMIT() asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory")
#define WAIT(n) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory")
#define KERNEL extern "C" __global__ void __launch_bounds__(128, 1) kernel(float* p, unsigned long long a, int n)

// ---- clean
KERNEL {
  float d[4];
  FENCE(); multiply(d, a, 0); COMMIT(); WAIT(0);
  p[threadIdx.x] = d[0];
}

// ---- C7508
extern "C" __global__ void kernel(float* p) {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
  p[threadIdx.x] *= 2;
}

// ---- C7510
__device__ __noinline__ void part(float (&d)[4], unsigned long long a) {
  multiply(d, a, 1); COMMIT();
}
KERNEL {
  float d[4] = {};
  FENCE(); part(d, a); WAIT(0);
  p[threadIdx.x] = d[0];
}

// ---- C7514
KERNEL {
  float d[4], e[4], sum[4] = {};
  FENCE(); multiply(d, a, 0); COMMIT();
  for (int j = 0; j < n; ++j) {  // d is in flight when an iteration ends, and is read after wait_group 1
    FENCE(); multiply(e, a + j, 0); COMMIT(); WAIT(1);
    for (int i = 0; i < 4; ++i) sum[i] += d[i] * p[j];
    FENCE(); multiply(d, a + j, 0); COMMIT(); WAIT(1);
    for (int i = 0; i < 4; ++i) sum[i] += e[i] * p[j];
  }
  WAIT(0);
  for (int i = 0; i < 4; ++i) p[i * 128 + threadIdx.x] = sum[i] + d[i];
}

// ---- C7517
KERNEL {
  float d[4] = {};
  FENCE(); multiply(d, a, 1); COMMIT();
  p[threadIdx.x] = d[0];
}

// ---- C7519
KERNEL {
  float d[4] = {p[0], p[1], p[2], p[3]};
  multiply(d, a, 1); COMMIT(); WAIT(0);
  p[threadIdx.x] = d[0];
}

// ---- spills
extern "C" __global__ void __launch_bounds__(1024, 2) kernel(float* p) {
  float a[64];
  for (int i = 0; i < 64; ++i) a[i] = p[i * 1024 + threadIdx.x];
  __syncthreads();
  for (int j = 0; j < 9; ++j)
    for (int i = 0; i < 64; ++i) a[i] = a[i] * p[j] + p[i + j];
  for (int i = 0; i < 64; ++i) p[i * 1024 + threadIdx.x] = a[i];
}

// ---- stack frame
extern "C" __global__ void kernel(float* p, int* index, int n) {
  float a[40];
  for (int i = 0; i < 40; ++i) a[i] = p[i];
  for (int i = 0; i < 40; ++i) a[index[i]] *= 2;
  p[threadIdx.x] = a[n];
}

// ---- stack of a callee
__device__ __noinline__ float callee(float* p, int* index, int n) {
  float a[40];
  for (int i = 0; i < 40; ++i) a[i] = p[i];
  for (int i = 0; i < 40; ++i) a[index[i]] *= 2;
  return a[n];
}
extern "C" __global__ void kernel(float* p, int* index, int n) { p[threadIdx.x] = callee(p, index, n); }

// ---- planned
// Two tensor core instructions, both forms of setmaxnreg, and a store of the accumulators.
extern "C" __global__ void __launch_bounds__(256, 1) planned(float* p, unsigned long long a) {
  if (threadIdx.x >= 128) { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); return; }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  float d[4] = {};
  FENCE();
  for (int i = 0; i < 2; ++i)
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %4, 1, 1, 1;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a + i));
  COMMIT();
  WAIT(0);
  for (int i = 0; i < 4; ++i) p[i * 128 + threadIdx.x] = d[i];
}

// ---- two
extern "C" __global__ void plain(float* p) { p[threadIdx.x] *= 2; }
extern "C" __global__ void shared(float* p) {
  __shared__ float s[32];
  s[threadIdx.x] = p[0];
  __syncthreads();
  p[1] = s[3 - threadIdx.x];
}
