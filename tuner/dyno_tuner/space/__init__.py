"""The search space: knobs, their legal combinations, and the limit of memory."""
