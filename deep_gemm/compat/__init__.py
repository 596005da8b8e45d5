"""Call forms and names of other programs and earlier years."""
