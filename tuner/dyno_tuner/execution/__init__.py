"""The execution of operations: in this process, in a worker process, on several devices, or through Ray."""
