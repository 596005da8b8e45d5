"""Checks of calls: each gives the problem that a call asks for, or says what is wrong with it."""
