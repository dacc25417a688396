"""A simulated engine with known true rates as a target, and its response surfaces."""
