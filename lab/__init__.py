"""The laboratory: simulator, benchmark, soak, tuning, gates. It examines kernels, and is not part of the wheel.

Run it from a checkout: `python -m lab`. Nothing in `deep_gemm/` imports it.
"""
