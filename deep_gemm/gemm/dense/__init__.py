"""Dense products."""
