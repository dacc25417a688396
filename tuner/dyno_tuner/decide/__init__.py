"""The decisions: finalists, acceptance, ablation, challengers, the quality gate and the trade of memory."""
