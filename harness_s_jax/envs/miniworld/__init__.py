"""The embedded world: AppWorld's interface in small, deterministic and fast."""
