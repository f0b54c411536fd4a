"""Decide: what a block is worth, what to load or recompute, what to fetch ahead, what to evict."""
