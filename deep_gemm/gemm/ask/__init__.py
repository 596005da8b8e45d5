"""Checks of calls: each function returns the `Problem` of a call, or raises an error that names the wrong argument."""
