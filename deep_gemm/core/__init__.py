"""The common parts on which kernels are built. No module here names a kernel."""
