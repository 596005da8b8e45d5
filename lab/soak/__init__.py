"""`python -m lab soak`: random problems of every product, cast and layer, for as long as is wanted."""
