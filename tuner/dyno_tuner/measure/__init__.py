"""The measuring method: one measurement, paired rounds, their spread, and the state of the machine."""
