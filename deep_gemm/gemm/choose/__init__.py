"""The choice of a configuration: the tiles that may be chosen, the estimated time of each, and the cheapest."""
