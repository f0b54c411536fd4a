"""Administration: what is held, for whom, whether it is sound, and how to act on it."""
