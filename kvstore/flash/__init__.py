"""The cold tier: records on flash, their index, what may be written, who can read it, and the thread that writes it."""
