"""The parts that a kernel is written against. It knows no kernel."""
