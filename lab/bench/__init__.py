"""The benchmark: `python -m lab bench dense|grouped|host|compile`. How it measures: docs/benchmark.md.

Not named `bench`: importing a package of that name would hide the public function `deep_gemm.bench`.
"""
