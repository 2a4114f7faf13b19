"""Building ahead of requests: precompile, and the record of the ops that a program uses."""
