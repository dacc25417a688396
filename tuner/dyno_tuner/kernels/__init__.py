"""The choice of kernels, first by times of single launches and then by measurements in situ."""
