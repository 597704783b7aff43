"""Directional evolution of harnesses: from failures to siblings that each repair one direction."""
