"""Forms of call and names that older programs and other libraries use."""
