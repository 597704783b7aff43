"""Attempts and groups of attempts, each with a named outcome."""
