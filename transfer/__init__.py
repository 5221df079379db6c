"""What moves: regions, layouts, plans and the executor. No engine, no HTTP."""
