"""Checks of arguments: types, shapes, layouts, overlaps."""
