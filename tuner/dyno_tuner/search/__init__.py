"""The search: proposers suggest points, the screen measures them, the crossover stage solves thresholds."""
