"""Run GGUF models with settings that were measured and proven."""
