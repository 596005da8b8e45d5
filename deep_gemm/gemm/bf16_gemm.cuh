// D = C + A @ B.T of BF16 operands with either majors. The kernel of fp8_gemm.cuh computes it, with a loop that leaves
// sums in the tensor cores' accumulators (slice.cuh), because nothing is promoted.
#include "fp8_gemm.cuh"
