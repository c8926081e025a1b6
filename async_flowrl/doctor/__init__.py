"""Doctor: describes a machine, checks if a configuration can start there, and with `--gpu` tests its GPUs."""
