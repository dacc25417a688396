"""The method of measuring: single measurements, paired rounds, their spread, and the state of the machine."""
