"""Transfer of weights between ranks. It knows no engine and no HTTP.

`protocols` names the two sides of an update, and `executor` runs one rank's part of a plan. Each folder is one step on
the way from layouts to written memory.
"""
