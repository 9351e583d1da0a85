"""`make bench`: memgw beside what it is compared with, in one run. Start reading in `rows`."""
