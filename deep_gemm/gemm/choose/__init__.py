"""The choice of a configuration: tiles, the time that each is thought to take, and the cheapest."""
