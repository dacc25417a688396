"""The record of a run: the journal, the recorder that answers from it, and the history of tunes."""
