"""The record of a run: the journal, the recorder that reads and writes it, and the history of tunes."""
