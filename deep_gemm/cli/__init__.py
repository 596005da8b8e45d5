"""The commands of `python -m deep_gemm`."""
