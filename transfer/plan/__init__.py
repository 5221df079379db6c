"""Transfer plans: all operations of a pair, and the part of them that each rank gets.

`operations` has the columns of a plan, `parts` cuts out a rank's part, `stages` orders relays, `traffic` counts bytes.
`verification` says which rows are digested, and `digest_report` holds what a rank digested.
"""
