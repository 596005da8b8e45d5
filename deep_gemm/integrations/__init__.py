"""Other libraries' models on this package's products: one module for each library, imported by name."""
