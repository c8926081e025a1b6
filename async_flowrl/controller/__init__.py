"""The controller: one process that dispatches tickets, hands out weights, evaluates, saves and recovers."""
