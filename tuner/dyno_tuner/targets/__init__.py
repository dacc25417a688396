"""Engines behind the Target protocol. `dyno` is the engine of this project, `replay` a recorded sweep,
`simulated` an engine whose truth is known. llama.cpp and ik_llama.cpp have their places here, too, as
modules of those names."""
