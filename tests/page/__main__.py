"""Run the rows of the benchmarks' page again; see `rows`."""

import sys

from tests.page.rows import main

sys.exit(main())
