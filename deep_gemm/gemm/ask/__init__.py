"""Checks of calls: each gives the problem of a call, or raises an error that names the wrong argument."""
