"""The doctor: describes a machine, checks whether a configuration can start there, and with `--gpu` tests its GPUs."""
