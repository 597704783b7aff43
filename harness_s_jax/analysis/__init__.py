"""Tables, intervals and reports over finished trajectories."""
