"""Memory of each process of a run, on its device and on its host, by plan, and whether it fits."""
