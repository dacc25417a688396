"""This project's engine as a target: its answers, prompts and kernels."""
