"""`python -m tests.page`: the rows of the benchmarks' page, run again."""
