"""Doctor: what a machine has, and with `--gpu` an ordered series of checks whose report can be sent on."""
