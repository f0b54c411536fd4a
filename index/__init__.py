"""Find: which held blocks match these tokens."""
