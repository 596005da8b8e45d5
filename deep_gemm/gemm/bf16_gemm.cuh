// D = C + A @ B.T of BF16 operands of either major: the kernel of fp8_gemm.cuh, in whose loop the tensor cores' accumulators stay
// where they are (slice.cuh), as there is nothing to promote.
#include "fp8_gemm.cuh"
