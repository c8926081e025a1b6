"""What each process of a run will hold, on its device and on its host, and whether that fits."""
