"""Plain values and contracts that every stage shares: the target protocol, workloads, intervals,
options, outcomes and errors."""
