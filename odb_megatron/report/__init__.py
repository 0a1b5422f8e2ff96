"""What is said of lengths, plans and runs: inspect, simulate, trace, compare, live lines, pages."""
