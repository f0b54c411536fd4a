"""Where blocks lie: hot and warm memory and cold flash, in which order they leave, and the moves between them."""
