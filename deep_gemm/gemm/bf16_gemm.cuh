// D = C + A @ B.T of BF16 operands of either major. It is the kernel of fp8_gemm.cuh, with a loop that leaves the
// tensor cores' accumulators in place (slice.cuh), as there is nothing to promote.
#include "fp8_gemm.cuh"
