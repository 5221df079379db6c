"""Transfer plans: operations, the parts that ranks get, stages, and the rows to verify."""
