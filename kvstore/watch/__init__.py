"""What the store does, to be looked at: counts, timings, snapshots, the live view, metrics, logs."""
