"""Calls of engines, as data; and the names that their newest wheels look for."""
