"""The binaries of llama.cpp and ik_llama.cpp as targets, with their flags, limits and exports."""
