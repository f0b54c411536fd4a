"""Mirrors the folders of the package; `reference` and `tiny_models` are what the tests measure against."""
