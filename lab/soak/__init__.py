"""The command `python -m lab soak`: random problems of every product, cast and layer, for a given time."""
