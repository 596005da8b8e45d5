"""Products of groups along k."""
