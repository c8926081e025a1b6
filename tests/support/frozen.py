"""Imported last by the process from which others are forked (forked.py): Python's search for garbage then leaves out
all that it has imported, and a fork does not copy the memory of millions of objects when it searches."""

import gc

gc.collect()
gc.freeze()
