"""The controller: coroutines of one process that dispatch tickets, publish weights, evaluate and save checkpoints."""
