"""The benchmark: `python -m lab bench dense|grouped|host|compile`. docs/benchmark.md explains how it measures."""
