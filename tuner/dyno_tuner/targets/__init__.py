"""Engines behind the Target protocol. `dyno` is the engine of this project, `replay` a recorded sweep,
`simulated` an engine whose truth is known. `llama_cpp` and `ik_llama_cpp` drive the binaries of those
engines through the `ggml_*` modules."""
