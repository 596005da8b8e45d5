"""The laboratory: simulator, benchmark, soak, tuning, gates. It looks at kernels, and lies beside the wheel.

Run it from a checkout: `python -m lab`. Nothing in `deep_gemm/` imports it.
"""
