"""What measures, plans and proves the project itself; it is not in the wheel."""
