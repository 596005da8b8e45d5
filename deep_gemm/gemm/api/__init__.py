"""Public functions of products, and the product that each is."""
