"""Updates of the policy from fixed-shape batches; knows nothing of harnesses."""
