"""The benchmark: `python -m deep_gemm bench dense|grouped|host|compile`. How it measures: docs/benchmark.md."""
