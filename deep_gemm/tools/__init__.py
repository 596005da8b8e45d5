"""What people run: the demo, a look inside a kernel, the gates of its machine code."""
