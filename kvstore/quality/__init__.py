"""What moved reuse and lossy codecs do to a model's answers, measured, and what follows for its policies."""
