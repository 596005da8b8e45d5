"""One module for each kernel, of the same name as its source in `cuda/`."""
