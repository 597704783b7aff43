"""One file per table or figure of the paper; each has the variants `debug` and `paper`."""
