"""Starts the experiments: on this machine, TPU VMs, Compute Engine and GKE."""
