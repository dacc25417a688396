"""The choice of kernels: times of single launches first, then measurements in situ."""
