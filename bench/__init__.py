"""Measurements behind the README; each runs as `python -m bench.NAME`."""
