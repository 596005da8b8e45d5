"""Modules that let other libraries' models use this package's products. Import the module of a library by its name."""
