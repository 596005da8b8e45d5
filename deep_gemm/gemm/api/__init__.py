"""Public functions that compute products, each beside the `Product` that describes it."""
