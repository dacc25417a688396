"""Find, prove and write down the fastest settings."""
