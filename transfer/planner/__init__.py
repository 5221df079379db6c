"""The planner: ranks that send boxes, and ranks that receive them, directly or through relays.

`planner` makes a plan, and `replan` makes the next one from the last. `receives` finds the boxes that ranks need,
`holders` and `assign` choose their senders, and `routes` adds relays where `topology` finds them faster.
"""
