"""Which configuration runs a product: candidates, their costs, and why one is chosen."""
