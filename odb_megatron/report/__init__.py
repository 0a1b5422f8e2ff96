"""What is told of lengths, plans and runs: inspect, simulate, trace, compare, live lines, pages."""
