"""CUDA C without a GPU: an op's `.cu` runs on the CPU, and races, deadlocks and bad addresses are named by line, block and thread.

`opjit test ./op --device cuda` uses it on a machine without a GPU. The device and its checks are C++, in kernels_c/emulate; this package
translates a kernel for them, builds it, and calls it. Nothing here measures time, and nothing counts as a run on a GPU."""
