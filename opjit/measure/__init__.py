"""Measure calls, for bench, notebook cells, the demo and judges. README.md explains the method."""
