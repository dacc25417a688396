"""Plain values and protocols that all stages share: the target protocol, workloads, intervals, options,
outcomes and errors."""
