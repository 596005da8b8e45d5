"""Tools for people: the demo, a look inside a kernel, and gates for its machine code."""
