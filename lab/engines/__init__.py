"""What engines call, as data; and what their newest wheels look for."""
