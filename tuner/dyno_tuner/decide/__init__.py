"""The decisions of a tune: finalists, acceptance, ablation, challengers, the quality gate, and the trade of
speed for memory."""
