"""Which harnesses a task should be tried under, from validation outcomes alone."""
