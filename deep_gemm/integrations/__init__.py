"""Modules that let other libraries' models use this package's products. A library's module has the library's name."""
