"""One way to measure calls: bench, notebook cells, the demo and judges use it. The page beside this file says how."""
