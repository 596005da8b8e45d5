"""Additions to the configuration of a product that fetches its rows: gemm/work/rows_fetched.cuh."""

from __future__ import annotations

from ..core.check.layout import align

FETCHED_BYTES = 29696
"""Room in a CTA for rows that are on their way to it: four of 7168 columns, six of 4096."""
MOST_FETCHED = 6
"""Rows on their way at most."""
MOST_ROUTES = 32
"""Routes of a token whose row is fetched: a lane each."""
ROWS_OF_PART = 128
"""Rows of A that are waited for together: as many as a tile has."""
ARRIVAL_BYTES = align(FETCHED_BYTES + MOST_FETCHED * (2 * 8 + 4 + MOST_ROUTES * 4), 128)
"""Size of `ArrivalStorage`."""
CONSTANTS = {
    "kFetchedBytes": FETCHED_BYTES,
    "kMostFetched": MOST_FETCHED,
    "kMostRoutes": MOST_ROUTES,
    "kRowsOfPart": ROWS_OF_PART,
}
"""Numbers in the header."""
