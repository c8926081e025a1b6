"""The doctor: describes a machine, and says whether a configuration can start there or on the nodes of its cluster."""
