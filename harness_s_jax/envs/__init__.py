"""What is to be solved and how it is verified."""
