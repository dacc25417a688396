"""The engine of this project as a target, with its answers, prompts and kernels."""
